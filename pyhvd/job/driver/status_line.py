"""The launcher's own lines on stderr: those that stay, and on a terminal one that is written again.

Invariants
----------
1. The status line is the last on the screen. It is erased before any other line is shown.
2. It is shown while this process is in the foreground of the terminal.
3. A terminal that takes no bytes, as after Ctrl-S, blocks only who says a line that stays. A text that it has
   then keeps its place.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
from typing import TextIO

from pyhvd.job.process.signals import is_in_background

_ERASE = "\r\x1b[K"
_COLUMNS = 80


def say(text: str) -> None:
    """Show a line of the launcher's own on stderr, after all that this process has written to stdout."""
    with contextlib.suppress(OSError):  # the reader is gone
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        print(text.rstrip(), file=sys.stderr, flush=True)


class StatusLine:
    """One line that is written again until :meth:`end`; any thread may call.

    Parameters
    ----------
    file : text file
        Where it is shown.
    terminal : bool
        Whether that is a terminal; else nothing is shown.
    """

    def __init__(self, file: TextIO, *, terminal: bool) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._text = ""
        self._over = not terminal

    @property
    def over(self) -> bool:
        """Whether nothing more is shown."""
        return self._over

    def show(self, text: str) -> None:
        """Show a text in place of the last one."""
        if self._over or not self._lock.acquire(blocking=False):  # another thread erases it
            return
        try:
            if not self._over and text != self._text and self._takes_bytes():
                self._text = text
                self._write(f"{_ERASE}{text[: self._columns() - 1]}")
        finally:
            self._lock.release()

    def clear(self) -> None:
        """Erase the line; the next :meth:`show` writes it again."""
        with self._lock:
            self._erase()

    def end(self) -> None:
        """Erase the line, and show no more."""
        if not self._over:
            with self._lock:
                self._erase()
                self._over = True

    def say(self, text: str) -> None:
        """Show a line that stays; see :func:`say`."""
        with self._lock:
            self._erase()
            say(text)

    def _erase(self) -> None:
        if self._text:
            self._text = ""
            if self._takes_bytes():
                self._write(_ERASE)

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone
            self._file.write(text)
            self._file.flush()

    def _takes_bytes(self) -> bool:
        descriptor = self._file.fileno()
        return not is_in_background(descriptor) and bool(select.select([], [descriptor], [], 0)[1])

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._file.fileno()).columns or _COLUMNS
        except OSError:
            return _COLUMNS
