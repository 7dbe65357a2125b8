"""A rank's output: each line with its rank in front, and copies of it in files."""

from __future__ import annotations

import contextlib
import os
import select
import time
from typing import BinaryIO

from pyhvd.job.mpi.rank_env import RankEnv

STREAMS = {1: "stdout", 2: "stderr"}
_CHUNK = 1 << 16
# A line that grows longer than this is passed on in pieces.
_LONGEST = 1 << 16


class LinePrefixer:
    """Puts the rank before each line of one of its streams.

    Parameters
    ----------
    rank : int or None
        None for no prefix.
    stream : int
        The rank's descriptor.
    timestamp : bool
        Whether the time of day precedes the prefix.
    ends_pieces : bool
        Whether a piece of a line ends like a line, because another stream's line may follow.
    """

    def __init__(self, rank: int | None, stream: int, timestamp: bool, ends_pieces: bool = False) -> None:
        self._prefix = b"" if rank is None else f"[{rank}]<{STREAMS[stream]}>:".encode()
        self._timestamp = timestamp
        self._ends_pieces = ends_pieces
        self._begun = b""
        self._continues = False  # the line's first piece has been returned

    def take(self, data: bytes) -> bytes:
        """Return the lines that are complete now."""
        *lines, self._begun = (self._begun + data).split(b"\n")
        text = b"".join(self._decorate(line + b"\n") for line in lines)
        return text + self.flush() if len(self._begun) > _LONGEST else text

    def flush(self) -> bytes:
        """Return a line that has begun but not ended."""
        if not self._begun:
            return b""
        piece, self._begun = self._decorate(self._begun + b"\n" * self._ends_pieces), b""
        self._continues = not self._ends_pieces
        return piece

    def _decorate(self, line: bytes) -> bytes:
        if self._continues:
            self._continues = False
            return line
        now = time.strftime("%Y-%m-%d %H:%M:%S ").encode() if self._timestamp else b""
        return now + self._prefix + line


class Relay:
    """Passes what a rank writes to a descriptor on to the same descriptor here, and unchanged to a file."""

    def __init__(self, target: int, lines: LinePrefixer, path: str | None) -> None:
        self._target = target
        self._lines = lines
        self._path = path
        self._file: BinaryIO | None = open(path, "wb", buffering=0) if path is not None else None  # noqa: SIM115
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        self.closed = False

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
        self._write_file(chunk)
        self._show(self._lines.take(chunk))

    def _write_file(self, chunk: bytes) -> None:
        """Write to the file; if that fails, say so and stop writing to it, as the job matters more."""
        if self._file is None:
            return
        try:
            while chunk:
                chunk = chunk[self._file.write(chunk) :]
        except OSError as exc:
            self._file.close()
            self._file = None
            with contextlib.suppress(OSError):
                os.write(2, f"pyhvd: {self._path} gets no more output: {exc.strerror}\n".encode())

    def flush(self) -> None:
        """Pass on a line that has begun but not ended."""
        self._show(self._lines.flush())

    def finish(self) -> None:
        """Pass on the rest after the rank has ended, without waiting for other holders of the pipe."""
        while not self.closed and select.select([self._read], [], [], 0)[0]:
            self.pump()
        self.flush()
        if self._file is not None:
            self._file.close()

    def _show(self, text: bytes) -> None:
        with contextlib.suppress(OSError):  # the reader is gone; the file still gets the output
            while text:
                text = text[os.write(self._target, text) :]


def make_relays(rank_env: RankEnv, directory: str | None, prefix: bool, timestamp: bool) -> list[Relay]:
    """Return a relay each for stdout and stderr; none if neither files nor prefixes are wanted."""
    if directory is None and not prefix:
        return []
    folder = None
    if directory is not None:
        digits = len(str(rank_env.size - 1))
        folder = os.path.join(directory, f"rank.{rank_env.rank:0{digits}d}")
        os.makedirs(folder, exist_ok=True)
    return [
        Relay(
            target,
            LinePrefixer(rank_env.rank if prefix else None, target, timestamp),
            None if folder is None else os.path.join(folder, name),
        )
        for target, name in STREAMS.items()
    ]
