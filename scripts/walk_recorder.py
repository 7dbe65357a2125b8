"""Record the calls of pyhvd's Python functions in one process, on every thread.

Owns the profile function. Call :func:`install` before pyhvd starts its threads: a thread that runs already
is not seen. Imports nothing of pyhvd, and little else: it also runs first in Spark's Python workers.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

Event = tuple[int, int, int, str, str]
"""Monotonic ns, native thread id, 1 for a call and 0 for a return, file below the package, function."""

IMPORT = "<module>"
"""Function of an event that runs the body of a module which is being imported."""

PROGRAM = "__main__"
"""Function of an event that runs the body of a module as the process's program."""

FOLDER = "PYHVD_WALK_FOLDER"
"""Environment variable: each process writes its events into a file of its own in this folder."""
PACKAGE = "PYHVD_WALK_PACKAGE"
"""Environment variable: the folder of the pyhvd that is walked through."""

_INLINE = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}  # part of the function around them


def install(package: str, write: Callable[[Event], Any]) -> None:
    """Call ``write`` with each call and return of a function below the folder ``package``."""
    prefix = package + os.sep

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "return"):
            return
        code = frame.f_code
        if not code.co_filename.startswith(prefix) or code.co_name in _INLINE:
            return
        path, name = code.co_filename[len(prefix) :], code.co_name
        if name == IMPORT and frame.f_globals.get("__name__") == "__main__":
            name = PROGRAM
        write((time.monotonic_ns(), threading.get_native_id(), int(event == "call"), path, name))

    threading.setprofile(profile)
    sys.setprofile(profile)


def install_from_environment() -> None:
    """Record from now on into a file, if the environment says so; processes forked later do too."""
    folder, package = os.environ.get(FOLDER), os.environ.get(PACKAGE)
    if not folder or not package:
        return
    install(package, lambda event: _write(folder, event))


def _write(folder: str, event: Event) -> None:
    """Append an event at once, as a process may be killed, or close all its descriptors."""
    path = os.path.join(folder, f"{os.getppid()}-{os.getpid()}.events")
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
    try:
        os.write(file, ("\t".join(map(str, event)) + "\n").encode())
    finally:
        os.close(file)
