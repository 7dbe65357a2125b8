"""Arrays with values that reveal every wrong sum, and the gradient sizes of ResNet-50.

Rank r fills element i of tensor t with (r + 1) * (1 + (i + t) % 7). Sums over up to 8 ranks are integers
below 256: float32, float16 and bfloat16 hold them exactly, for every order of summation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pyhvd.simulation.models import resnet50 as resnet50

Array = npt.NDArray[Any]

_PERIOD = 7
_BLOCK = _PERIOD * 8192
"""Elements per write or comparison: few, so that most of the cache stays with the tensors."""


class WrongResultError(Exception):
    """Raised if a contender's result is not the sum."""


class Tensors:
    """The arrays of one case on one rank; all contenders reduce them in turn.

    Parameters
    ----------
    counts : sequence of int
        Elements of each array.
    rank, size : int
        This rank, and the number of ranks.
    dtype : dtype-like
        float32, float16 or ml_dtypes.bfloat16.
    loops : int
        Number of reductions per repetition; see :func:`benchmarks.peers.contender`.
    empty : callable
        Allocates an array.
    """

    def __init__(
        self,
        counts: Sequence[int],
        rank: int,
        size: int,
        dtype: Any = np.float32,
        loops: int = 1,
        empty: Callable[[int, Any], Array] = np.empty,
    ) -> None:
        self.loops = loops
        self.arrays: list[Array] = [empty(count, dtype) for count in counts]
        for array in self.arrays:
            array.fill(1)  # touch the pages: no contender shall pay for fresh pages
        self.nbytes = sum(array.nbytes for array in self.arrays)
        pattern = 1.0 + np.arange(_BLOCK + _PERIOD) % _PERIOD
        self._mine = (pattern * (rank + 1)).astype(dtype)
        self._sum = (pattern * (size * (size + 1) // 2)).astype(dtype)
        self._bits = np.dtype(f"u{self._mine.itemsize}")

    def fill(self) -> None:
        """Write this rank's values."""
        for t, array in enumerate(self.arrays):
            for first in range(0, array.size, _BLOCK):
                block = array[first : first + _BLOCK]
                block[:] = self._mine[t % _PERIOD : t % _PERIOD + block.size]

    def zero(self) -> None:
        """Write zeros, which stay zeros after any number of reductions."""
        for array in self.arrays:
            array.fill(0)

    def check(self, thorough: bool = True) -> None:
        """Raise WrongResultError unless the arrays hold the sums.

        Parameters
        ----------
        thorough : bool
            Compare every element; otherwise the first, middle and last of each array.
        """
        for t, array in enumerate(self.arrays):
            for first, last in _ranges(array.size) if thorough else _samples(array.size):
                offset = t % _PERIOD + first % _PERIOD
                expected = self._sum[offset : offset + last - first]
                found = array[first:last]
                if not np.array_equal(found.view(self._bits), expected.view(self._bits)):
                    where = f"tensor {t} of {len(self.arrays)}, elements {first} to {last - 1}"
                    raise WrongResultError(f"{where}: {found} instead of {expected}")

    def pieces(self, nbytes: int) -> list[list[Array]]:
        """Cut the arrays into buckets of limited bytes; each bucket is a list of views, in order."""
        room = limit = max(1, nbytes // self.arrays[0].itemsize)
        buckets: list[list[Array]] = [[]]
        for array in self.arrays:
            first = 0
            while first < array.size:
                if not room:
                    buckets.append([])
                    room = limit
                piece = array[first : first + room]
                buckets[-1].append(piece)
                first += piece.size
                room -= piece.size
        return buckets


def _ranges(count: int) -> Iterator[tuple[int, int]]:
    return ((first, min(first + _BLOCK, count)) for first in range(0, count, _BLOCK))


def _samples(count: int) -> Iterator[tuple[int, int]]:
    return ((at, at + 1) for at in (0, count // 2, count - 1))
