"""What the ranks print, on the driver: whole lines, with the rank in front, written by a thread of its own.

Who reads them may stand still, as a pager does; the thread that serves the job must not. So nothing waits in
:meth:`Output.write`, and a task is told what of its rank's output has been shown: with
:data:`~pyhvd.job.messages.OUTPUT_CREDIT` bytes that have not, it stops to read, and its rank has to wait.
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
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TextIO

from pyhvd.common.text import describe_exception

_log = logging.getLogger("pyhvd")

_NAMES = {1: "stdout", 2: "stderr"}
# A line that does not end is passed on in pieces of this many bytes.
_LONGEST = 1 << 16
# Characters that are written at once, if lines are not longer: a slow reader is seen to read in such steps.
_AT_ONCE = 1 << 13
# At the end of a job who reads may stand still for so long; less when there is an error to be told.
_PATIENCE_S = 60.0
_PATIENCE_AFTER_ERROR_S = 1.0
_LOOK_S = 0.1


class Lines:
    """Makes lines of what comes in pieces. Pure but for the clock.

    Parameters
    ----------
    timestamp : bool
        Whether the time goes before the rank.
    quiet : bool
        Whether the ranks' stdout is left out.
    clock : callable
        Seconds since the epoch.
    """

    def __init__(
        self, timestamp: bool = False, quiet: bool = False, clock: Callable[[], float] = time.time
    ) -> None:
        self._timestamp = timestamp
        self._quiet = quiet
        self._clock = clock
        self._begun: dict[tuple[int, int], bytes] = {}

    def take(self, rank: int, stream: int, data: bytes) -> str:
        """Return the lines of a rank's stdout (1) or stderr (2) that are complete now."""
        if self._quiet and stream == 1:
            return ""
        *lines, rest = (self._begun.pop((rank, stream), b"") + data).split(b"\n")
        if len(rest) > _LONGEST:
            lines.append(rest)
        elif rest:
            self._begun[rank, stream] = rest
        return self._show(rank, stream, lines)

    def rest(self) -> list[tuple[int, int, str]]:
        """Return rank, stream and text of lines that have begun and never ended."""
        begun, self._begun = sorted(self._begun.items()), {}
        return [(rank, stream, self._show(rank, stream, [rest])) for (rank, stream), rest in begun]

    def _show(self, rank: int, stream: int, lines: list[bytes]) -> str:
        prefix = f"[{rank}]<{_NAMES[stream]}>:"
        if self._timestamp:
            prefix = time.strftime("%Y-%m-%d %H:%M:%S ", time.localtime(self._clock())) + prefix
        return "".join(f"{prefix}{line.decode(errors='replace')}\n" for line in lines)


class Output:
    """Where the ranks' output goes, from ``with`` on; at its end what has been written is shown.

    The end waits as long as somebody takes it, and :data:`_PATIENCE_S` when nobody does; the thread goes on
    with the rest, and the process ends when that has been shown, or with Ctrl-C. A file that is broken is no
    reason to end a job: its output is left out, with a warning.

    Parameters
    ----------
    stdout, stderr : text file, optional
        sys.stdout and sys.stderr as they are when something is written.
    lines : Lines, optional
        How it is shown.
    """

    def __init__(
        self, stdout: TextIO | None = None, stderr: TextIO | None = None, lines: Lines | None = None
    ) -> None:
        self._files = {1: stdout, 2: stderr}
        self._lines = lines or Lines()
        self._queue: queue.SimpleQueue[tuple[int, int, int, str] | None] = queue.SimpleQueue()
        self._broken: set[int] = set()
        self._taken = 0  # pieces that a file has taken
        self._taking: TextIO | None = None
        self._lock = threading.Lock()
        self._shown: Counter[int] = Counter()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="pyhvd.job.output", daemon=True)

    def __enter__(self) -> Output:
        self._told, self._tell = os.pipe()
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
                os.close(self._told)
                os.close(self._tell)

    def write(self, rank: int, stream: int, data: bytes) -> None:
        """Have what a rank has written shown; does not wait for it."""
        self._queue.put((rank, stream, len(data), self._lines.take(rank, stream, data)))

    def fileno(self) -> int:
        """Readable when there is something for :meth:`take_shown`."""
        return self._told

    def take_shown(self) -> dict[int, int]:
        """Return how many bytes of each rank have been shown since the last call."""
        with self._lock:
            shown, self._shown = self._shown, Counter()
            if shown:
                os.read(self._told, 1)
        return shown

    def finish(self, patience: float) -> bool:
        """Show all there is; return False when nobody has taken any of it for `patience` seconds."""
        for rank, stream, text in self._lines.rest():
            self._queue.put((rank, stream, 0, text))
        self._queue.put(None)
        taken, since = self._taken, time.monotonic()
        while True:
            self._thread.join(_LOOK_S)
            if not self._thread.is_alive():
                return True
            now = time.monotonic()
            if taken != self._taken:
                taken, since = self._taken, now
            elif now > since + patience:
                break
        atexit.register(self._see_to_the_end)
        if self._taking not in (sys.stdout, sys.stderr):  # a warning would wait for the same reader
            _log.warning("not all output of the ranks is shown: nobody has read any of it for %g s", patience)
        return False

    def _see_to_the_end(self) -> None:
        """Wait for the rest when the process ends, as a `print` that nobody reads would; Ctrl-C ends it."""
        try:
            self._thread.join()
        except KeyboardInterrupt:
            if not _is_same(self._taking, sys.stderr):  # else a warning would wait for the same reader
                _log.warning("the rest of the ranks' output is not shown: interrupted")
            # The thread holds the file's lock; the interpreter, as it ends, would wait for it to flush.
            for name in ("stdout", "stderr"):
                if getattr(sys, name) is self._taking:
                    setattr(sys, name, None)

    def _run(self) -> None:
        """Show what comes; whatever a file raises, all is counted: ranks wait for it."""
        while (item := self._queue.get()) is not None:
            rank, stream, size, text = item
            try:
                if stream not in self._broken:
                    self._show(stream, text)
            except BaseException as exc:
                self._broken.add(stream)
                with contextlib.suppress(BaseException):  # the log may be broken as well
                    said = describe_exception(exc)
                    _log.warning("the ranks' %s is no longer shown: %s", _NAMES[stream], said)
            self._count(rank, size)

    def _show(self, stream: int, text: str) -> None:
        for piece in pieces(text):
            file = self._files[stream] or (sys.stdout if stream == 1 else sys.stderr)
            self._taking = file
            file.write(_fit(piece, getattr(file, "encoding", None)))
            file.flush()
            self._taken += 1

    def _count(self, rank: int, size: int) -> None:
        with self._lock:
            if not self._closed and size:
                if not self._shown:
                    os.write(self._tell, b".")
                self._shown[rank] += size


def _is_same(one: TextIO | None, other: TextIO | None) -> bool:
    """Whether who reads one file reads the other, as far as can be known."""
    if one is None or other is None or one is other:
        return one is other
    try:
        return os.path.sameopenfile(one.fileno(), other.fileno())
    except (OSError, ValueError):  # no descriptor
        return False


def pieces(text: str) -> Iterator[str]:
    """Cut a text, at the ends of lines, into pieces that are not much longer than :data:`_AT_ONCE`."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + _AT_ONCE)
        stop = len(text) if end < 0 else end + 1
        yield text[start:stop]
        start = stop


def _fit(text: str, encoding: str | None) -> str:
    """Return a text without the characters that an encoding does not have."""
    if encoding is None:
        return text
    return text.encode(encoding, "backslashreplace").decode(encoding)
