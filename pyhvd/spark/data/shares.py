"""Each rank's share of the rows, and their order in an epoch. Pure.

A dataset is a sequence of row groups. Each rank has a share of consecutive rows. In an epoch it reads the
pieces of row groups in its share, a few at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

MIXED = 4
"""How many pieces are in memory at a time; their rows are mixed."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows `begin` to `end` (excluded) of row group `group`, which is numbered over all files."""

    group: int
    begin: int
    end: int

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.end - self.begin


def share(rows: int, rank: int, size: int) -> tuple[int, int]:
    """Return the first row of a rank's share and the row after its last; shares differ by at most one row."""
    return rows * rank // size, rows * (rank + 1) // size


def pieces(groups: Sequence[int], begin: int, end: int) -> list[Piece]:
    """Return the pieces of rows `begin` to `end` (excluded); `groups` are the groups' numbers of rows."""
    found = []
    first = 0
    for number, rows in enumerate(groups):
        low, high = max(begin - first, 0), min(end - first, rows)
        if low < high:
            found.append(Piece(number, low, high))
        first += rows
    return found


def draw(seed: int, epoch: int, rank: int) -> np.random.Generator:
    """Return the random generator of one rank's epoch."""
    import numpy as np

    return np.random.default_rng([seed, epoch, rank])


def read_order(count: int, generator: np.random.Generator | None) -> list[list[int]]:
    """Return the order of reading `count` pieces, as lists of pieces that are in memory together.

    Without a generator, pieces are read one by one in their own order.
    """
    if generator is None:
        return [[number] for number in range(count)]
    order = generator.permutation(count).tolist()
    return [order[begin : begin + MIXED] for begin in range(0, count, MIXED)]
