"""The Python stacks of this process's threads, reduced to the user's own code.

Owns: which frames are the user's, and how much of a stack is reported. The frames of pyhvd, of the standard
library and of installed packages are replaced by the name of the function that the user's code has called. No
thread is stopped to read its stack.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import site
import sys
import sysconfig
import threading
from collections.abc import Collection
from types import CodeType, FrameType

import msgspec

from pyhvd.common.text import cut, sendable

THREAD_PREFIX = "pyhvd"
"""How the names of pyhvd's own threads begin."""
MAX_THREADS = 8
MAX_FRAMES = 10
MAX_TEXT = 160
"""Most characters of a path, a name or a line of code."""

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_INSTALLED = (sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib"))
_LIBRARY = tuple(
    {os.path.join(each, "") for each in (*_INSTALLED, *site.getsitepackages(), site.getusersitepackages())}
)
# Modules that start programs and threads; their frames are never shown.
_SCAFFOLD = ("threading", "importlib", "runpy", "_bootstrap", "mpi4py.run", "concurrent.futures.thread")


def user_stacks(only: Collection[int] | None = None) -> list[ThreadStack]:
    """Return the stacks of the threads that run the user's program, the main thread's first.

    ``only`` has the idents of the threads to report; None: all threads of the process.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sys._current_frames()
    idents = sorted((i for i in frames if only is None or i in only), key=lambda i: (i != main, i))
    stacks = (_stack(names.get(ident, f"thread {ident}"), frames[ident]) for ident in idents)
    return [stack for stack in stacks if stack is not None][:MAX_THREADS]


def waits_inside(only: Collection[int] | None = None) -> bool:
    """Return whether a thread of the user's program is inside a function of pyhvd; ``only`` as above."""
    own = {thread.ident for thread in threading.enumerate() if thread.name.startswith(THREAD_PREFIX)}
    frames = sys._current_frames()
    return any(
        _belongs(frame) == "pyhvd"
        for ident, frame in frames.items()
        if (ident not in own if only is None else ident in only)
    )


def shorten_path(path: str) -> str:
    """Return a path relative to the current directory if it is below it."""
    with contextlib.suppress(OSError):
        path = path.removeprefix(os.path.join(os.getcwd(), ""))
    path = sendable(path)
    return path if len(path) <= MAX_TEXT else f"...{path[3 - MAX_TEXT :]}"


def _stack(name: str, frame: FrameType) -> ThreadStack | None:
    """Return a thread's stack; None for a thread that runs none of the user's code."""
    chain = []
    walk: FrameType | None = frame
    while walk is not None:
        chain.append((walk, _belongs(walk)))
        walk = walk.f_back
    wanted = "user" if any(kind == "user" for _, kind in chain) else "library"
    shown = [each for each, kind in chain if kind == wanted]
    if not shown:
        return None
    deeper = [each for each, _ in chain[: chain.index((shown[0], wanted))]]
    frames = [_frame(each) for each in shown[:MAX_FRAMES]]
    return ThreadStack(_cut(name), frames, _inside(deeper[-1]) if deeper else "", len(shown) - len(frames))


def _belongs(frame: FrameType) -> str:
    """Return the owner of a frame: "pyhvd", "scaffold", "library" or "user"."""
    path = frame.f_code.co_filename
    module = str(frame.f_globals.get("__name__", ""))
    if path.startswith(_OWN):
        return "pyhvd"
    if path.startswith("<frozen ") or any(module == s or module.startswith(f"{s}.") for s in _SCAFFOLD):
        return "scaffold"
    if path.startswith(_LIBRARY):
        return "library"
    # mpi4py runs a script as __main__, and is itself started as __main__.
    return "scaffold" if path.endswith(("mpi4py/run.py", "mpi4py/__main__.py")) else "user"


def _inside(called: FrameType) -> str:
    """Return the function that the user's innermost frame has called."""
    code = called.f_code
    module = str(called.f_globals.get("__name__", ""))
    if code.co_filename.startswith(_OWN):
        return _cut(f"pyhvd.{code.co_name}")
    return _cut(f"{module}.{_name(code)}")


def _frame(frame: FrameType) -> Frame:
    code, line = frame.f_code, frame.f_lineno or 0
    text = linecache.getline(code.co_filename, line, frame.f_globals).strip()
    return Frame(shorten_path(code.co_filename), line, _name(code), _cut(text))


def _name(code: CodeType) -> str:
    return _cut(code.co_qualname.rpartition("<locals>.")[2])


def _cut(text: str) -> str:
    return cut(sendable(text), MAX_TEXT)


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """One call on a Python stack: file, line number, function, and the line's text if it can be read."""

    file: str
    line: int
    function: str
    text: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


class ThreadStack(msgspec.Struct, frozen=True, array_like=True):
    """The stack of one thread."""

    name: str
    frames: list[Frame]
    """The user's frames, innermost first, at most ``MAX_FRAMES``."""
    inside: str = ""
    """The library function that the innermost frame has called, or empty."""
    left_out: int = 0
    """Number of the user's frames that are left out."""
