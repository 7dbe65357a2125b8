"""The ranks' output on the driver: whole lines, with the rank in front, written by a thread of its own.

The reader of the output may stop reading, as a pager does, but the thread that serves the job must not
block. So :meth:`Output.write` never waits. The driver acknowledges to each task the bytes that have been
shown; with :data:`~pyhvd.job.messages.OUTPUT_CREDIT` bytes unacknowledged, the task stops reading its rank's
output, and the rank's writes block.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from types import TracebackType
from typing import TextIO

from pyhvd.common.text import describe_exception
from pyhvd.job.process.output import STREAMS, LinePrefixer

_log = logging.getLogger("pyhvd")

# Characters of one write, unless a line is longer: progress of a slow reader shows in such steps.
_AT_ONCE = 1 << 13
# How long the end of a job waits for a reader that has stopped; less if there is an error to raise.
_PATIENCE_S = 60.0
_PATIENCE_AFTER_ERROR_S = 1.0
_LOOK_S = 0.1


class Output:
    """Shows the ranks' output on the driver; a context manager, which shows the rest at its end.

    The end waits while the reader reads, and up to :data:`_PATIENCE_S` while it does not. The thread then
    continues, and the process ends when the rest has been shown, or at Ctrl-C. A file that fails gets no more
    output, with a warning; the job continues.

    Parameters
    ----------
    stdout, stderr : text file, optional
        By default sys.stdout and sys.stderr at the time of each write.
    timestamp : bool
        Whether the time of day precedes the rank.
    quiet : bool
        Whether to leave out the ranks' stdout.
    """

    def __init__(
        self,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
        timestamp: bool = False,
        quiet: bool = False,
    ) -> None:
        self._files = {1: stdout, 2: stderr}
        self._timestamp = timestamp
        self._quiet = quiet
        self._lines: dict[tuple[int, int], LinePrefixer] = {}  # of each rank's streams
        self._queue: queue.SimpleQueue[tuple[int, int, int, str] | None] = queue.SimpleQueue()
        self._broken: set[int] = set()
        self._written = 0  # pieces that have been written
        self._writing: TextIO | None = None
        self._lock = threading.Lock()
        self._shown: Counter[int] = Counter()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="pyhvd.job.output", daemon=True)

    def __enter__(self) -> Output:
        self._wake, self._waker = os.pipe()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.finish(_PATIENCE_S if kind is None else _PATIENCE_AFTER_ERROR_S)
        finally:
            with self._lock:
                self._closed = True
                os.close(self._wake)
                os.close(self._waker)

    def write(self, rank: int, stream: int, data: bytes) -> None:
        """Queue what a rank has written to its descriptor 1 or 2; do not wait until it is shown."""
        text = ""
        if stream != 1 or not self._quiet:
            if (rank, stream) not in self._lines:
                self._lines[rank, stream] = LinePrefixer(rank, stream, self._timestamp, ends_pieces=True)
            text = self._lines[rank, stream].take(data).decode(errors="replace")
        self._queue.put((rank, stream, len(data), text))

    def fileno(self) -> int:
        """Return a descriptor that is readable when :meth:`take_shown` has something to return."""
        return self._wake

    def take_shown(self) -> dict[int, int]:
        """Return how many bytes of each rank have been shown since the last call."""
        with self._lock:
            shown, self._shown = self._shown, Counter()
            if shown:
                os.read(self._wake, 1)
        return shown

    def finish(self, patience: float) -> bool:
        """Show the rest; return False if nothing could be written for `patience` seconds."""
        for (rank, stream), lines in sorted(self._lines.items()):
            self._queue.put((rank, stream, 0, lines.flush().decode(errors="replace")))
        self._queue.put(None)
        written, since = self._written, time.monotonic()
        while True:
            self._thread.join(_LOOK_S)
            if not self._thread.is_alive():
                return True
            now = time.monotonic()
            if written != self._written:
                written, since = self._written, now
            elif now > since + patience:
                break
        atexit.register(self._finish_at_exit)
        if self._writing not in (sys.stdout, sys.stderr):  # else the warning would block on the same reader
            _log.warning("not all output of the ranks is shown: nobody has read any of it for %g s", patience)
        return False

    def _finish_at_exit(self) -> None:
        """Wait for the rest when the process ends, as `print` would; Ctrl-C ends the wait."""
        try:
            self._thread.join()
        except KeyboardInterrupt:
            if not _is_same(self._writing, sys.stderr):  # else the warning would block on the same reader
                _log.warning("the rest of the ranks' output is not shown: interrupted")
            # The thread holds the file's lock; at its end the interpreter would flush the file and block.
            for name in ("stdout", "stderr"):
                if getattr(sys, name) is self._writing:
                    setattr(sys, name, None)

    def _run(self) -> None:
        """Show what is queued; count it as shown even if a file raises, as ranks wait for it."""
        while (item := self._queue.get()) is not None:
            rank, stream, size, text = item
            try:
                if stream not in self._broken:
                    self._show(stream, text)
            except BaseException as exc:
                self._broken.add(stream)
                with contextlib.suppress(BaseException):  # the log may fail too
                    why = describe_exception(exc)
                    _log.warning("the ranks' %s is no longer shown: %s", STREAMS[stream], why)
            self._count(rank, size)

    def _show(self, stream: int, text: str) -> None:
        for piece in pieces(text):
            file = self._files[stream] or (sys.stdout if stream == 1 else sys.stderr)
            self._writing = file
            file.write(_encodable(piece, getattr(file, "encoding", None)))
            file.flush()
            self._written += 1

    def _count(self, rank: int, size: int) -> None:
        with self._lock:
            if not self._closed and size:
                if not self._shown:
                    os.write(self._waker, b".")
                self._shown[rank] += size


def _is_same(one: TextIO | None, other: TextIO | None) -> bool:
    """Return whether two files have the same reader, as far as their descriptors tell."""
    if one is None or other is None or one is other:
        return one is other
    try:
        return os.path.sameopenfile(one.fileno(), other.fileno())
    except (OSError, ValueError):  # no descriptor
        return False


def pieces(text: str) -> Iterator[str]:
    """Cut a text after lines, into pieces of little more than :data:`_AT_ONCE` characters."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + _AT_ONCE)
        stop = len(text) if end < 0 else end + 1
        yield text[start:stop]
        start = stop


def _encodable(text: str, encoding: str | None) -> str:
    """Return a text with escapes for characters that an encoding lacks."""
    if encoding is None:
        return text
    return text.encode(encoding, "backslashreplace").decode(encoding)
