"""Copying a rank's output: each line with its rank in front, and into a file."""

from __future__ import annotations

import contextlib
import os
import time
from typing import BinaryIO

from pyhvd.job.mpi.rank_env import Place


class Relay:
    """What a rank writes to one of its descriptors goes to the same descriptor here, and to a file.

    Parameters
    ----------
    target : int
        1 or 2.
    prefix : bytes
        Put before each line; empty for none.
    timestamp : bool
        Whether the time of day goes before the prefix.
    path : str or None
        The file, which gets the bytes as they are.
    """

    def __init__(self, target: int, prefix: bytes, timestamp: bool, path: str | None) -> None:
        self._target = target
        self._prefix = prefix
        self._timestamp = timestamp
        self._path = path
        self._file: BinaryIO | None = open(path, "wb", buffering=0) if path is not None else None  # noqa: SIM115
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        self._line = b""  # begun, not ended
        self._continues = False  # the beginning of this line was passed on already
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
        """In the supervisor, after the fork."""
        os.close(self._write)

    def pump(self) -> None:
        """Pass on what has come."""
        try:
            chunk = os.read(self._read, 65536)
        except BlockingIOError:
            return
        if not chunk:
            self.closed = True
            return
        self._keep(chunk)
        *lines, self._line = (self._line + chunk).split(b"\n")
        self._show(b"".join(self._decorate(line + b"\n") for line in lines))
        if len(self._line) > 65536:
            self.flush()

    def _keep(self, chunk: bytes) -> None:
        """Write to the file; where it takes no more, say so, and go on without it: the job is worth more."""
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
        """Pass on a line that has begun and not ended."""
        if self._line:
            self._show(self._decorate(self._line))
            self._line, self._continues = b"", True

    def finish(self) -> None:
        """The rank has ended: pass on the rest, but wait for nobody who holds its output open."""
        while not self.closed:
            before = self._line
            with contextlib.suppress(BlockingIOError):
                self.pump()
            if not self.closed and self._line == before and not self._has_more():
                break
        self.flush()
        if self._file is not None:
            self._file.close()

    def _has_more(self) -> bool:
        import select

        return bool(select.select([self._read], [], [], 0)[0])

    def _decorate(self, line: bytes) -> bytes:
        if self._continues:
            self._continues = False
            return line
        now = time.strftime("%Y-%m-%d %H:%M:%S ").encode() if self._timestamp and self._prefix else b""
        return now + self._prefix + line

    def _show(self, text: bytes) -> None:
        with contextlib.suppress(OSError):  # nobody reads any more: the file still gets it
            while text:
                text = text[os.write(self._target, text) :]


def make_relays(place: Place, directory: str | None, prefix: bool, timestamp: bool) -> list[Relay]:
    """Return a relay each for stdout and stderr; none if neither files nor prefixes are wanted."""
    if directory is None and not prefix:
        return []
    folder = None
    if directory is not None:
        digits = len(str(place.size - 1))
        folder = os.path.join(directory, f"rank.{place.rank:0{digits}d}")
        os.makedirs(folder, exist_ok=True)
    return [
        Relay(
            target,
            f"[{place.rank}]<{name}>:".encode() if prefix else b"",
            timestamp,
            None if folder is None else os.path.join(folder, name),
        )
        for target, name in ((1, "stdout"), (2, "stderr"))
    ]
