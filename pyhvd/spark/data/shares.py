"""Which rows are whose, and in what order an epoch brings them: arithmetic alone.

A dataset is a row of row groups. Each rank has a stretch of its rows; in an epoch it walks over the pieces of
groups that make up its stretch, a few at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

MIXED = 4
"""So many pieces have their rows mixed with each other, and are in memory at a time."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows `begin` up to `end` of row group `group`, counted over all files."""

    group: int
    begin: int
    end: int

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return self.end - self.begin


def stretch(rows: int, rank: int, size: int) -> tuple[int, int]:
    """Return the first row of a rank's share and the one after its last; shares differ by one row at most."""
    return rows * rank // size, rows * (rank + 1) // size


def pieces(groups: Sequence[int], begin: int, end: int) -> list[Piece]:
    """Return what of the groups lies in rows `begin` up to `end`, in order; `groups` are their row counts."""
    found = []
    first = 0
    for number, rows in enumerate(groups):
        low, high = max(begin - first, 0), min(end - first, rows)
        if low < high:
            found.append(Piece(number, low, high))
        first += rows
    return found


def draw(seed: int, epoch: int, rank: int) -> np.random.Generator:
    """Return the generator of all randomness of one rank's epoch."""
    import numpy as np

    return np.random.default_rng([seed, epoch, rank])


def windows(count: int, generator: np.random.Generator | None) -> list[list[int]]:
    """Return the order in which `count` pieces are read, as lists of those that are in memory together.

    Without a generator they come one by one, in their order.
    """
    if generator is None:
        return [[number] for number in range(count)]
    order = generator.permutation(count).tolist()
    return [order[begin : begin + MIXED] for begin in range(0, count, MIXED)]
