"""stdin, stdout and stderr: filled where a process starts without them, flushed, and launchers' own lines."""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def fill_standard_files() -> None:
    """Open /dev/null in place of each standard descriptor that is closed.

    cron and daemons start processes so. The next file or pipe would get its number, and mpiexec fails.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
            continue
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
        if opened == number:
            os.set_inheritable(number, True)
        else:
            os.dup2(opened, number)
            os.close(opened)
        if getattr(sys, name) is None:
            mode = "w" if number else "r"
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - it stays


def flush_standard_files() -> None:
    """Flush stdout and stderr, which the program may have closed or replaced."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def say(text: str) -> None:
    """Show a line of the launcher's own on stderr, after all that this process has written to stdout."""
    with suppress(OSError):  # the reader is gone
        sys.stdout.flush()
    with suppress(OSError):
        print(text.rstrip(), file=sys.stderr, flush=True)
