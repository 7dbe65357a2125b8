"""The ranks' output on the driver: whole lines, with the rank in front, written by a thread of its own.

The reader of the output may stop reading, as a pager does, but the thread that serves the job must not
block. So :meth:`Output.write` never waits. The driver acknowledges to each task the bytes that have been
shown; with :data:`~pyhvd.job.messages.OUTPUT_CREDIT` bytes unacknowledged, the task stops reading its rank's
output, and the rank's writes block.

:class:`Screen` decides what to show.

Invariants
----------
1. The bytes of a rank's stream appear in order, and unchanged.
2. Each line begins with its rank. If another rank's line interrupts one that has begun, the rest of that is a
   line of its own, with its rank.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import math
import os
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from types import TracebackType
from typing import TextIO

from pyhvd.common.text import describe_exception
from pyhvd.job.process.output import STREAMS, LinePrefixer, OutputFile, whole_lines

_log = logging.getLogger("pyhvd")

PIECE_S = 0.2
"""A line without its end is shown after this time."""

# Bytes of one write, unless a line is longer: progress of a slow reader shows in such steps.
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
    ranks : collection of int, optional
        The ranks whose output is shown; by default all.
    files : mapping of int to mapping of int to OutputFile
        For each rank, the files that get its output too, by its descriptor.
    before : callable, optional
        Called before anything is shown, by the thread that shows it.
    """

    def __init__(
        self,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
        files: Mapping[int, Mapping[int, OutputFile]] = {},
        ranks: Collection[int] | None = None,
        before: Callable[[], None] | None = None,
        *,
        timestamp: bool = False,
        quiet: bool = False,
    ) -> None:
        self._files = {1: stdout, 2: stderr}
        terminal = is_terminal(self._file(1))
        coloured = terminal and not os.environ.get("NO_COLOR")
        self._screen = Screen(
            timestamp=timestamp, coloured=coloured, apart=not _is_same(self._file(1), self._file(2))
        )
        self._quiet = quiet
        self._ranks = ranks
        self._copies = files
        self._before = before
        self._queue: queue.SimpleQueue[tuple[int, int, bytes] | None] = queue.SimpleQueue()
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
        self._queue.put((rank, stream, data))

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
        while True:
            item = None
            with contextlib.suppress(queue.Empty):
                item = self._queue.get(timeout=self._until_piece())
                if item is None:
                    break
            now = time.monotonic()
            for stream, text in self._screen.take_begun(now - PIECE_S):
                self._try_to_show(stream, text)
            if item is not None:
                self._take(*item, now)
        for stream, text in self._screen.end():
            self._try_to_show(stream, text)

    def _take(self, rank: int, stream: int, data: bytes, now: float) -> None:
        if rank in self._copies:
            self._copies[rank][stream].write(data)
        if (self._ranks is None or rank in self._ranks) and not (stream == 1 and self._quiet):
            self._try_to_show(stream, self._screen.take(rank, stream, data, now))
        self._count(rank, len(data))

    def _until_piece(self) -> float | None:
        """Return how long until a line that has begun is shown."""
        since = self._screen.waits_since
        return None if since is None else max(0.0, since + PIECE_S - time.monotonic())

    def _try_to_show(self, stream: int, text: bytes) -> None:
        try:
            if stream not in self._broken:
                self._show(stream, text)
        except BaseException as exc:
            self._broken.add(stream)
            with contextlib.suppress(BaseException):  # the log may fail too
                why = describe_exception(exc)
                _log.warning("the ranks' %s is no longer shown: %s", STREAMS[stream], why)

    def _file(self, stream: int) -> TextIO:
        own = self._files[stream] or (sys.stdout if stream == 1 else sys.stderr)
        return own or io.StringIO()  # this process was started without it: nobody reads that

    def _show(self, stream: int, text: bytes) -> None:
        if text and self._before is not None:
            self._before()
        for piece in whole_lines(text, _AT_ONCE):
            self._writing = file = self._file(stream)
            # Bytes as they are where this process's own file takes them: a rank's encoding may be another.
            buffer = None if file is self._files[stream] else getattr(file, "buffer", None)
            if buffer is None:
                file.write(_encodable(str(piece, errors="replace"), getattr(file, "encoding", None)))
            else:
                file.flush()
                buffer.write(piece)
            file.flush()
            self._written += 1

    def _count(self, rank: int, size: int) -> None:
        with self._lock:
            if not self._closed and size:
                if not self._shown:
                    os.write(self._waker, b".")
                self._shown[rank] += size


class Screen:
    """What is shown of the output of all ranks. Pure.

    Parameters
    ----------
    timestamp, coloured : bool
        See :class:`LinePrefixer`.
    apart : bool
        Whether the ranks' stdout and stderr go to different places.
    """

    def __init__(self, *, timestamp: bool = False, coloured: bool = False, apart: bool = True) -> None:
        self._timestamp = timestamp
        self._coloured = coloured
        self._apart = apart
        self._lines: dict[tuple[int, int], LinePrefixer] = {}  # of each rank's streams
        self._begun: dict[tuple[int, int], float] = {}  # when their lines began
        self._open: dict[int, tuple[int, int]] = {}  # whose line has begun to show, by place

    def take(self, rank: int, stream: int, data: bytes, now: float) -> bytes:
        """Return what to show of a rank's bytes now."""
        who = rank, stream
        if who not in self._lines:
            self._lines[who] = LinePrefixer(rank, stream, timestamp=self._timestamp, coloured=self._coloured)
        text = self._show(who, lambda lines: lines.take(data))
        if not self._lines[who].waits:
            self._begun.pop(who, None)
        elif text:
            self._begun[who] = now
        else:
            self._begun.setdefault(who, now)
        return text

    def take_begun(self, before: float) -> list[tuple[int, bytes]]:
        """Return what to show of lines that have waited since before a time, each with its stream."""
        due = sorted(who for who, since in self._begun.items() if since <= before)
        for who in due:
            del self._begun[who]
        return [(who[1], self._show(who, LinePrefixer.flush)) for who in due]

    def end(self) -> list[tuple[int, bytes]]:
        """Return the rest of all lines, and an end for those that have none, each with its stream."""
        left = self.take_begun(math.inf)
        left += [(who[1], b"\n") for who in self._open.values()]
        self._open.clear()
        return left

    @property
    def waits_since(self) -> float | None:
        """When the line began that has waited longest; None if none waits."""
        return min(self._begun.values(), default=None)

    def _show(self, who: tuple[int, int], cut: Callable[[LinePrefixer], bytes]) -> bytes:
        place = who[1] if self._apart else 0
        before = self._open.get(place)
        if before != who:
            self._lines[who].interrupt()
        text = cut(self._lines[who])
        if text and before not in (None, who):
            text = b"\n" + text
        if text:
            self._open.pop(place, None)
            if not text.endswith((b"\n", b"\r")):
                self._open[place] = who
        return text


def _is_same(one: TextIO | None, other: TextIO | None) -> bool:
    """Return whether two files have the same reader, as far as their descriptors tell."""
    if one is None or other is None or one is other:
        return one is other
    try:
        return os.path.sameopenfile(one.fileno(), other.fileno())
    except (OSError, ValueError):  # no descriptor
        return False


def is_terminal(file: TextIO) -> bool:
    """Return whether a file is a terminal that understands escape sequences."""
    try:
        return file.isatty() and os.environ.get("TERM") != "dumb"
    except (AttributeError, ValueError):
        return False


def _encodable(text: str, encoding: str | None) -> str:
    """Return a text with escapes for characters that an encoding lacks."""
    if encoding is None:
        return text
    return text.encode(encoding, "backslashreplace").decode(encoding)
