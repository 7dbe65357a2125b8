"""What the ranks print, on the driver: whole lines, with the rank in front."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

_NAMES = {1: "stdout", 2: "stderr"}
# A line that does not end is passed on in pieces of this many bytes.
_LONGEST = 1 << 16


class Output:
    """Where the ranks' output goes.

    Parameters
    ----------
    stdout, stderr : text file, optional
        sys.stdout and sys.stderr as they are when something is written.
    timestamp : bool
        Whether the time goes before the rank.
    quiet : bool
        Whether the ranks' stdout is not shown.
    clock : callable
        Seconds since the epoch.
    """

    def __init__(
        self,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
        timestamp: bool = False,
        quiet: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._files = {1: stdout, 2: stderr}
        self._timestamp = timestamp
        self._quiet = quiet
        self._clock = clock
        self._begun: dict[tuple[int, int], bytes] = {}

    def write(self, rank: int, stream: int, data: bytes) -> None:
        """Show the lines of a rank's stdout (1) or stderr (2) that are complete."""
        if self._quiet and stream == 1:
            return
        *lines, rest = (self._begun.pop((rank, stream), b"") + data).split(b"\n")
        if len(rest) > _LONGEST:
            lines.append(rest)
        elif rest:
            self._begun[rank, stream] = rest
        self._show(rank, stream, lines)

    def finish(self) -> None:
        """Show lines that have begun and never ended."""
        for (rank, stream), rest in sorted(self._begun.items()):
            self._show(rank, stream, [rest])
        self._begun.clear()

    def _show(self, rank: int, stream: int, lines: list[bytes]) -> None:
        if not lines:
            return
        prefix = f"[{rank}]<{_NAMES[stream]}>:"
        if self._timestamp:
            prefix = time.strftime("%Y-%m-%d %H:%M:%S ", time.localtime(self._clock())) + prefix
        file = self._files[stream] or (sys.stdout if stream == 1 else sys.stderr)
        file.write("".join(f"{prefix}{line.decode(errors='replace')}\n" for line in lines))
        file.flush()
