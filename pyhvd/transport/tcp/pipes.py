"""Two pipes in the place of a connected socket: stdin and stdout of a process that sshd has started."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select

# The most that a user may ask for by default. With the usual 64 KiB the ends of a pipe wait for each other.
_SIZE = 1 << 20


class PipePair:
    """A pipe to read from and a pipe to write to, with the methods of a socket that a connection calls.

    Its descriptor is readable when the first pipe is, and also when the second takes bytes again after
    :meth:`send` has raised BlockingIOError. Linux only.

    Parameters
    ----------
    reader, writer : int
        The descriptors; owned.
    """

    def __init__(self, reader: int, writer: int) -> None:
        self._reader = reader
        self.writer = writer
        self._events = select.epoll()
        self._waits = False  # for the second pipe
        for pipe in (reader, writer):
            with contextlib.suppress(OSError):  # a file, or more than the system allows
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _SIZE)
        with contextlib.suppress(PermissionError):  # a file, which is always ready
            self._events.register(reader, select.EPOLLIN)

    def fileno(self) -> int:
        """Return the descriptor for selectors."""
        return self._events.fileno()

    def setblocking(self, flag: bool) -> None:  # noqa: FBT001 - as a socket's
        """Choose whether calls block."""
        os.set_blocking(self._reader, flag)
        os.set_blocking(self.writer, flag)

    def send(self, data: memoryview | bytes) -> int:
        """Write some of the data; return how many bytes."""
        full = False
        try:
            return os.write(self.writer, data)
        except BlockingIOError:
            full = True
            raise
        finally:
            self._wait(wanted=full)

    def recv(self, size: int) -> bytes:
        """Read at most so many bytes."""
        return os.read(self._reader, size)

    def close(self) -> None:
        """Close both pipes."""
        self._wait(wanted=False)
        if self.writer >= 0:
            os.close(self.writer)
            os.close(self._reader)
            self.writer = self._reader = -1
            self._events.close()

    def _wait(self, *, wanted: bool) -> None:
        if wanted == self._waits:
            return
        self._waits = wanted
        if wanted:
            self._events.register(self.writer, select.EPOLLOUT)
        else:
            self._events.unregister(self.writer)
