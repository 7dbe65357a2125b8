"""Clock offsets between ranks, and the conversion of one rank's times to rank 0's.

Owns the measurement, over any fabric, and the mapping. Every offset is against rank 0's clock.

Source of the bounds: F. Cristian, "Probabilistic clock synchronization" (Distributed Computing 3, 1989),
applied to each direction by itself: a message cannot arrive before its sender sent it. In every round each
rank sends its clock on entry and reads the clock again on exit. Rank 0's message bounds the offset from
above, the message to rank 0 bounds it from below. The fastest message of each direction gives the bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pyhvd.transport.fabric import Fabric

ROUNDS = 32


@dataclass(frozen=True, slots=True)
class ClockReading:
    """One measurement, in ns: at this rank's time ``at`` its clock was ``offset`` ahead of rank 0's.

    The true offset differs from ``offset`` by at most ``uncertainty``.
    """

    at: int
    offset: int
    uncertainty: int


def measure(fabric: Fabric, clock: Callable[[], int], rounds: int = ROUNDS) -> ClockReading:
    """Measure this rank's clock (ns) against rank 0's. Collective over the fabric.

    Each of the ``rounds`` is one exchange. More rounds make a fast message in each direction more likely.
    """
    mine = np.zeros(2, np.int64)
    table = np.empty((fabric.size, 2), np.int64)
    low, high, before = -(1 << 62), 1 << 62, 0
    for turn in range(rounds + 1):
        mine[0] = entered = clock()
        fabric.allgather(mine.view(np.uint8), table.reshape(-1).view(np.uint8))
        left = clock()
        high = min(high, left - int(table[0, 0]))
        if turn:
            low = max(low, before - int(table[0, 1]))  # rank 0's clock at the exit of the previous round
        before, mine[1] = entered, left
    if fabric.rank == 0:
        return ClockReading(left, 0, 0)
    return ClockReading(left, (low + high) // 2, max(high - low + 1, 0) // 2)


@dataclass(frozen=True, slots=True)
class ClockMap:
    """Converts one rank's times to rank 0's, from a reading at the start and perhaps one at the end.

    With two readings the offset changes linearly between them: crystals differ by parts per million and keep
    their rate for minutes. With one reading the offset is constant.
    """

    start: ClockReading
    end: ClockReading | None = None

    def to_root(self, at: float) -> float:
        """Return rank 0's time (ns) at this rank's time ``at`` (ns)."""
        return at - self.offset(at)

    def offset(self, at: float) -> float:
        """Return the ns by which this rank's clock is ahead of rank 0's at its time ``at``."""
        if self.end is None or self.end.at <= self.start.at:
            return self.start.offset
        passed = (at - self.start.at) / (self.end.at - self.start.at)
        return self.start.offset + passed * (self.end.offset - self.start.offset)

    @property
    def uncertainty(self) -> int:
        """The larger uncertainty of the readings (ns); without an end it excludes drift."""
        return max(self.start.uncertainty, self.end.uncertainty if self.end is not None else 0)

    @property
    def drift(self) -> float | None:
        """Parts per million by which this clock runs faster than rank 0's; None if not measured."""
        return None if self.end is None else self._per_million(self.end.offset - self.start.offset)

    @property
    def drift_uncertainty(self) -> float | None:
        """Uncertainty of the drift, in parts per million."""
        return None if self.end is None else self._per_million(self.end.uncertainty + self.start.uncertainty)

    def _per_million(self, gained: int) -> float | None:
        """Return a gain (ns) in parts per million of the time between the readings, by rank 0's clock."""
        if self.end is None or self.end.at <= self.start.at:
            return None
        return gained / (self.end.at - self.end.offset - self.start.at + self.start.offset) * 1e6
