"""A rank's output: each line with its rank in front, and copies of it in files."""

from __future__ import annotations

import contextlib
import os
import re
import select
import time
from collections.abc import Callable, Iterator
from typing import BinaryIO

STREAMS = {1: "stdout", 2: "stderr"}
_CHUNK = 1 << 16
KEPT = 1 << 14
"""The last bytes of a rank's stderr that are kept: a transport's stack, if a signal kills the rank."""
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)")
# Foregrounds of the ranks' prefixes: all but black, red and white.
_COLOURS = (36, 33, 32, 35, 34)
# A line that grows longer than this is passed on in pieces.
_LONGEST = 1 << 16
# Between two calls of `meanwhile`, and the longest time for what is left after a rank's end.
_LOOK_S = 0.1
_REST_S = 2.0


class LinePrefixer:
    """Puts the rank before each line of one of its streams. A carriage return ends a line too.

    Parameters
    ----------
    rank : int or None
        None for no prefix.
    stream : int
        The rank's descriptor.
    timestamp : bool
        Whether the time of day precedes the prefix.
    coloured : bool
        Whether the prefix has a colour, by rank.
    """

    def __init__(self, rank: int | None, stream: int, *, timestamp: bool, coloured: bool = False) -> None:
        self._prefix = b"" if rank is None else f"[{rank}]<{STREAMS[stream]}>:".encode()
        if coloured and rank is not None:
            self._prefix = b"\x1b[%dm%b\x1b[m" % (_COLOURS[rank % len(_COLOURS)], self._prefix)
        self._timestamp = timestamp
        self._begun = b""
        self._continues = False  # the line's first piece has been returned

    @property
    def waits(self) -> bool:
        """Whether a line has begun, of which :meth:`flush` would return a piece."""
        return bool(self._begun)

    def take(self, data: bytes) -> bytes:
        """Return the lines that are complete now."""
        data = self._begun + data
        # A carriage return at the end may be the first half of a line's end.
        end = max(data.rfind(b"\n"), data.rfind(b"\r", 0, len(data) - 1)) + 1
        self._begun = data[end:]
        if not (self._prefix or self._timestamp):
            text = data[:end]
        else:
            text = b"".join(self._decorate(line) for line in _LINE.findall(data[:end]))
        return text + self.flush() if len(self._begun) > _LONGEST else text

    def flush(self) -> bytes:
        """Return a line that has begun but not ended; its rest follows without a prefix."""
        if not self._begun:
            return b""
        piece, self._begun = self._decorate(self._begun), b""
        self._continues = not piece.endswith(b"\r")
        return piece

    def interrupt(self) -> None:
        """Note that another line has begun after a piece: the rest gets a prefix too."""
        self._continues = False

    def _decorate(self, line: bytes) -> bytes:
        if self._continues:
            self._continues = False
            return line
        now = time.strftime("%Y-%m-%d %H:%M:%S ").encode() if self._timestamp else b""
        return now + self._prefix + line


class OutputFile:
    """A new file that gets a copy of a rank's output, until writing fails: the job matters more.

    Parameters
    ----------
    path : str
        Its path.
    failures : set of int
        The error numbers of all files of a job, so that a full disk is told once.
    """

    def __init__(self, path: str, failures: set[int]) -> None:
        self._path = path
        self._failures = failures
        self._file: BinaryIO | None = open(path, "wb", buffering=0)  # noqa: SIM115

    def write(self, data: bytes) -> None:
        """Write to the file; if that fails, say so on stderr, but only for the first file."""
        if self._file is None:
            return
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as exc:
            self.close()
            if exc.errno in self._failures:
                return
            self._failures.add(exc.errno or 0)
            with contextlib.suppress(OSError):
                os.write(2, f"pyhvd: {self._path} gets no more output: {exc.strerror}\n".encode())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def rank_files(directory: str, rank: int, size: int, failures: set[int]) -> dict[int, OutputFile]:
    """Return new files for the stdout and stderr of a rank, in a folder of its own; may raise OSError.

    For `failures`, see :class:`OutputFile`.
    """
    digits = len(str(size - 1))
    folder = os.path.join(directory, f"rank.{rank:0{digits}d}")
    os.makedirs(folder, exist_ok=True)
    return {stream: OutputFile(os.path.join(folder, name), failures) for stream, name in STREAMS.items()}


def whole_lines(text: bytes, most: int = select.PIPE_BUF) -> Iterator[memoryview]:
    """Yield a text in pieces that a pipe takes as a whole, so that no line of another rank comes between.

    Each piece has whole lines, and at most `most` bytes unless one line has more. mpiexec reads from the pipe
    what is there, and passes that on: with larger pieces it would pass on a part of a line.
    """
    view, begin = memoryview(text), 0
    while begin < len(text):
        last = text.rfind(b"\n", begin, begin + most) + 1
        end = last or text.find(b"\n", begin) + 1 or len(text)
        yield view[begin:end]
        begin = end


class Relay:
    """Passes what a rank writes to a descriptor on: if `shown`, to the same one here; unchanged to a file.

    It calls `meanwhile` again and again while nobody reads what it passes on.
    """

    def __init__(
        self, target: int, lines: LinePrefixer, file: OutputFile | None, *, shown: bool = True
    ) -> None:
        self._target = target
        self._lines = lines
        self._file = file
        self._shown = shown
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        self.closed = False
        self.last = b""  # of what has arrived on stderr
        self.meanwhile: Callable[[], None] = lambda: None

    def fileno(self) -> int:
        """For selectors."""
        return self._read

    def attach(self) -> None:
        """In the rank: write to the pipe instead of the descriptor."""
        os.dup2(self._write, self._target)
        os.close(self._read)
        os.close(self._write)
        if self._file is not None:
            self._file.close()

    def detach(self) -> None:
        """In the supervisor, after the fork: leave the writing end to the rank."""
        os.close(self._write)

    def pump(self) -> None:
        """Pass on what has arrived."""
        try:
            chunk = os.read(self._read, _CHUNK)
        except BlockingIOError:
            return
        if not chunk:
            self.closed = True
            return
        if self._target == 2:
            self.last = (self.last + chunk)[-KEPT:]
        if self._file is not None:
            self._file.write(chunk)
        self._show(self._lines.take(chunk))

    def flush(self) -> None:
        """Pass on a line that has begun but not ended."""
        self._show(self._lines.flush())

    def finish(self) -> None:
        """Pass on the rest after the rank has ended, without waiting for other holders of the pipe."""
        until = time.monotonic() + _REST_S  # another holder may write without end
        while not self.closed and select.select([self._read], [], [], 0)[0] and time.monotonic() < until:
            self.pump()
        self.flush()
        if self._file is not None:
            self._file.close()

    def _show(self, text: bytes) -> None:
        with contextlib.suppress(OSError):  # the reader is gone; the file still gets the output
            for piece in whole_lines(text) if self._shown else ():
                while piece:
                    while not select.select([], [self._target], [], _LOOK_S)[1]:
                        self.meanwhile()
                    piece = piece[os.write(self._target, piece[: select.PIPE_BUF]) :]


def make_relays(
    rank: int, size: int, directory: str | None, *, prefix: bool, timestamp: bool, shown: bool, whole: bool
) -> list[Relay]:
    """Return a relay each for stdout and stderr; none if the rank may write to them itself.

    `whole`: no line of another rank shall come inside of a line, and what the rank leaves behind shall not
    hold these descriptors.
    """
    if directory is None and not prefix and shown and not whole:
        return []
    files = {} if directory is None else rank_files(directory, rank, size, set())
    return [
        Relay(
            target,
            LinePrefixer(rank if prefix else None, target, timestamp=timestamp),
            files.get(target),
            shown=shown,
        )
        for target in STREAMS
    ]
