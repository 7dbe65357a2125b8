"""Clocks of different ranks: how far apart they are, and how times of one become times of another.

Owns: the measurement, over any fabric, and the mapping. Offsets are against rank 0's clock.

Source of the bounds: F. Cristian, "Probabilistic clock synchronization" (Distributed Computing 3, 1989), with
the two directions taken apart: a message cannot arrive before it was sent. In every round each rank sends its
clock as it enters and reads it again as it leaves; rank 0's message bounds the offset from above, the one to
rank 0 from below. The fastest message of either direction decides, as the shortest round trip would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pyhvd.arrays import Bytes

ROUNDS = 32


class Gathering(Protocol):
    """What of a fabric the measurement needs; see :class:`pyhvd.transport.fabric.Fabric`."""

    rank: int
    size: int

    def allgather(self, send: Bytes, recv: Bytes) -> None:
        """Gather ``send`` of every rank, all of one length, into ``recv`` in rank order."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One measurement, in ns: at this rank's time ``at`` its clock was ``offset`` ahead of rank 0's.

    The true offset is within ``uncertainty`` of it.
    """

    at: int
    offset: int
    uncertainty: int


def measure(fabric: Gathering, clock: Callable[[], int], rounds: int = ROUNDS) -> Reading:
    """Measure this rank's clock against rank 0's. Collective over the fabric.

    Parameters
    ----------
    fabric : Gathering
        Of all ranks.
    clock : callable
        Returns ns.
    rounds : int
        Exchanges; the more, the likelier a fast message each way.
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
            low = max(low, before - int(table[0, 1]))  # what rank 0 read as it left the round before
        before, mine[1] = entered, left
    if fabric.rank == 0:
        return Reading(left, 0, 0)
    return Reading(left, (low + high) // 2, max(high - low + 1, 0) // 2)


@dataclass(frozen=True, slots=True)
class ClockMap:
    """Turns one rank's times into rank 0's, by its readings at the start and, if there is one, at the end.

    Between the two the offset is taken to change linearly (crystals differ by parts per million, and keep
    their rate for minutes); with one reading it is taken to stay.
    """

    start: Reading
    end: Reading | None = None

    def to_root(self, at: float) -> float:
        """Return rank 0's time (ns) at this rank's time ``at`` (ns)."""
        return at - self.offset(at)

    def offset(self, at: float) -> float:
        """Return by how much (ns) this rank's clock is ahead at its time ``at``."""
        if self.end is None or self.end.at <= self.start.at:
            return self.start.offset
        passed = (at - self.start.at) / (self.end.at - self.start.at)
        return self.start.offset + passed * (self.end.offset - self.start.offset)

    @property
    def uncertainty(self) -> int:
        """The larger of the readings' uncertainties (ns); drift is not covered if there is no end."""
        return max(self.start.uncertainty, self.end.uncertainty if self.end is not None else 0)

    @property
    def drift(self) -> float | None:
        """By how many parts per million this clock runs faster than rank 0's; None if nobody knows."""
        return None if self.end is None else self._per_million(self.end.offset - self.start.offset)

    @property
    def drift_uncertainty(self) -> float | None:
        """By how many parts per million the drift may be wrong."""
        return None if self.end is None else self._per_million(self.end.uncertainty + self.start.uncertainty)

    def _per_million(self, gained: int) -> float | None:
        """Return what the clock has gained in the time between the readings, which rank 0's tells."""
        if self.end is None or self.end.at <= self.start.at:
            return None
        return gained / (self.end.at - self.end.offset - self.start.at + self.start.offset) * 1e6
