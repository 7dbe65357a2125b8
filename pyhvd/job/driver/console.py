"""The user's side of a job: the launcher's own lines, and a terminal's status line, stdin and signals.

Invariants
----------
1. The status line is the last on the screen. It is erased before any other line is shown.
2. It is shown while this process is in the foreground of the terminal.
3. A terminal that takes no bytes, as after Ctrl-S, blocks only who says a line that stays. A text that it has
   then keeps its place.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import selectors
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TextIO

from pyhvd.common.standard_files import say
from pyhvd.job.connections import Peer
from pyhvd.job.messages import INPUT_CREDIT, FromDriver, Input
from pyhvd.job.process.signals import is_in_background, to_handle, wake_on_signals

_log = logging.getLogger("pyhvd")

_CHUNK = 1 << 16
_ERASE = "\r\x1b[K"
_COLUMNS = 80


@dataclass(frozen=True)
class Console:
    """The user's side of a job.

    Attributes
    ----------
    say : callable
        Shows a line about how the job goes.
    warn : callable
        Shows a line that the user must see.
    terminal : Terminal or None
        That of pyhvdrun; None if a program has started the job, whose signals and stdin are its own.
    """

    say: Callable[[str], None]
    warn: Callable[[str], None]
    terminal: Terminal | None = None


class StatusLine:
    """One line that is written again until :meth:`end`; any thread may call.

    Parameters
    ----------
    file : text file
        Where it is shown.
    terminal : bool
        Whether that is a terminal; else nothing is shown.

    Attributes
    ----------
    over : bool
        Whether nothing more is shown.
    """

    def __init__(self, file: TextIO, *, terminal: bool) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._text = ""
        self.over = not terminal

    def show(self, text: str) -> None:
        """Show a text in place of the last one."""
        if self.over or not self._lock.acquire(blocking=False):  # another thread erases it
            return
        try:
            if not self.over and text != self._text and self._takes_bytes():
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
        if not self.over:
            with self._lock:
                self._erase()
                self.over = True

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


def log_warning(text: str) -> None:
    """Log a line of a job that a program has started."""
    _log.warning("%s", text.removeprefix("pyhvd: "))


@dataclass
class Terminal:
    """Stdin, signals and the status line of pyhvdrun, for one set of ranks.

    Attributes
    ----------
    status : StatusLine
        Shows how far the start has come.
    reads : bool
        Whether rank 0 gets what comes from stdin, descriptor 0.
    signals : list of int
        Signals for the ranks that nobody has passed on yet; a signal handler may append.
    """

    status: StatusLine
    reads: bool = True
    signals: list[int] = field(default_factory=list)
    _input: InputReader | None = None

    def step(self, describe_start: Callable[[float], str], now: float) -> None:
        """Do what is due: show how far the start has come, and look for input."""
        if self._input is not None:
            self._input.check()
        if self.status.over:
            return
        if text := describe_start(now):
            self.status.show(text)
        else:
            self.status.end()

    def input_for(self, peer: Peer, selector: selectors.BaseSelector) -> Iterator[FromDriver]:
        """Begin to read stdin for rank 0; the feed of its agent does so after the rank has been started."""
        if self.reads:
            self._input = InputReader(0, selector, lambda data: peer.send(Input(data)))
        else:
            yield Input(b"")

    def acknowledge_input(self, count: int) -> None:
        """Note that rank 0 has taken bytes."""
        if self._input is not None:
            self._input.acknowledge(count)

    def close(self) -> None:
        """Read no more input."""
        if self._input is not None:
            self._input.close()


@contextlib.contextmanager
def noting_signals(note: Callable[[int], None]) -> Iterator[int]:
    """Call `note` with this process's signals; yield a descriptor that is readable after each of them."""
    numbers = [*to_handle(), signal.SIGCHLD, signal.SIGTSTP]
    before = {number: signal.getsignal(number) for number in numbers}
    wake = wake_on_signals(lambda number, _: note(number))
    if before[signal.SIGTSTP] != signal.SIG_IGN:  # a shell without job control
        signal.signal(signal.SIGTSTP, lambda number, _: note(number))
    try:
        yield wake
    finally:
        os.close(signal.set_wakeup_fd(-1))
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(wake)


def wake_by(selector: selectors.BaseSelector, wake: int) -> None:
    """Let a descriptor of :func:`noting_signals` wake a selector."""
    selector.register(wake, selectors.EVENT_READ, lambda: os.read(wake, 4096))


class InputReader:
    """Reads a descriptor when it has bytes, while less than the credit is on the way to rank 0.

    A terminal is read only in the foreground: reading would stop this process in the background.

    Parameters
    ----------
    source : int
        The descriptor; it stays the caller's.
    selector : selectors.BaseSelector
        Calls the data of its ready keys, without arguments.
    send : callable
        Called with bytes, and at the end with none.
    """

    def __init__(self, source: int, selector: selectors.BaseSelector, send: Callable[[bytes], None]) -> None:
        self._source = source
        self._selector = selector
        self._send = send
        self._unacknowledged = 0
        self._ended = False
        self._listens = False
        self.check()

    def acknowledge(self, count: int) -> None:
        """Note that rank 0 has taken bytes."""
        self._unacknowledged -= count
        self.check()

    def close(self) -> None:
        """Read no more."""
        self._ended = True
        self.check()

    def check(self) -> None:
        """Wait for bytes if there is credit; a file has its bytes at once, and cannot be waited for.

        In the background bytes may wait for another program: this process would look for them without end.
        """
        wanted = self._has_credit and not is_in_background(self._source)
        if wanted and not self._listens:
            try:
                self._selector.register(self._source, selectors.EVENT_READ, self._read)
                self._listens = True
            except PermissionError:
                while self._has_credit:
                    self._read()
            except (OSError, ValueError, KeyError):  # closed
                self._ended = True
                self._send(b"")
        elif not wanted:
            self._ignore()

    @property
    def _has_credit(self) -> bool:
        return not self._ended and self._unacknowledged < INPUT_CREDIT

    def _ignore(self) -> None:
        """Wait no more, until the next :meth:`check`."""
        if self._listens:
            self._listens = False
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(self._source)

    def _read(self) -> None:
        if is_in_background(self._source):
            self._ignore()
            return
        try:
            data = os.read(self._source, _CHUNK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        self._unacknowledged += len(data)
        self._ended = self._ended or not data
        self._send(data)
        if self._listens:
            self.check()
