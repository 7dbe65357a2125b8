"""The driver's stdin, which is rank 0's: read only as far as rank 0 takes it."""

from __future__ import annotations

import contextlib
import os
import selectors
from collections.abc import Callable

from pyhvd.job.driver.status_line import is_in_background
from pyhvd.job.messages import INPUT_CREDIT

_CHUNK = 1 << 16


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
