"""How the kernels of ``pack_kernels.cu`` find their work: the table that the host makes for one launch. Pure.

The buffer is cut into *vectors* of 16 bytes and these into *tiles*, one for each block of threads. For every
tile the table says with which tensor it begins; a thread has to search only where a tile holds several.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

THREADS = 256
"""Threads per block; as in ``pack_kernels.cu``."""

EACH = {"small": 1, "large": 4}
"""Vectors per thread, by the suffix of the kernels' names."""

LARGE = 1 << 18
"""Vectors (4 MiB) from which on each thread moves several: there are blocks enough for any GPU then."""

_ENTRY = np.dtype([("address", "<u8"), ("first", "<i8"), ("count", "<i8")])


class Tiles(NamedTuple):
    """The work of one launch.

    Attributes
    ----------
    suffix : str
        Of the kernel's name.
    skipped : int
        Bytes of the buffer before the first tensor.
    vectors : int
        Vectors of the buffer, counted from there.
    blocks : int
        Blocks of threads; 0 if there is nothing to do.
    tensors : int
        Entries of the table.
    table : numpy.ndarray of uint8
        The entries, and behind them for each tile, as an int32, the entry in which it begins; at the end the
        last entry.
    """

    suffix: str
    skipped: int
    vectors: int
    blocks: int
    tensors: int
    table: npt.NDArray[np.uint8]

    @property
    def firsts(self) -> int:
        """Where in the table the tiles' first entries begin (bytes)."""
        return self.tensors * _ENTRY.itemsize


def make_tiles(offsets: Words, addresses: Words, counts: Words, itemsize: int) -> Tiles:
    """Return the work of one launch.

    Parameters
    ----------
    offsets : numpy.ndarray of int64
        Element of the buffer at which each tensor begins; ascending, each at a multiple of 16 bytes, and no
        tensor reaches into the next one's vectors.
    addresses : numpy.ndarray of int64
        Of each tensor; 0 where there is none.
    counts : numpy.ndarray of int64
        Elements of each.
    itemsize : int
        Bytes per element in the buffer.
    """
    held = np.flatnonzero(counts)
    per_vector = ALIGNMENT // itemsize
    entries = np.empty(len(held), _ENTRY)
    first = offsets[held] // per_vector
    skipped = int(first[0]) if len(held) else 0
    entries["address"] = addresses[held]
    entries["first"] = first - skipped
    entries["count"] = counts[held]
    vectors = int(entries["first"][-1] - (-counts[held[-1]] // per_vector)) if len(held) else 0
    suffix = "large" if vectors >= LARGE else "small"
    starts = np.arange(0, vectors, THREADS * EACH[suffix])
    firsts = np.full(len(starts) + 1, len(held) - 1, np.int32)
    firsts[:-1] = np.searchsorted(entries["first"], starts, side="right") - 1
    table = np.concatenate([entries.view(np.uint8), firsts.view(np.uint8)])
    return Tiles(suffix, skipped * ALIGNMENT, vectors, len(starts), len(held), table)


ALIGNMENT = 16
"""Bytes: every tensor begins on such a boundary, so that the kernels may move 16 bytes at a time."""


Words = npt.NDArray[np.int64]


def lay_out(counts: Sequence[int], itemsize: int) -> tuple[Words, int]:
    """Return at which element of the buffer each tensor begins, and the buffer's length in elements.

    Parameters
    ----------
    counts : sequence of int
        Elements of each tensor; the same on every rank, and so the result is.
    itemsize : int
        Bytes per element in the buffer; divides :data:`ALIGNMENT`.

    Returns
    -------
    offsets : numpy.ndarray of int64
        First element of each tensor; ``offsets * itemsize`` is a multiple of :data:`ALIGNMENT`.
    total : int
        Elements in the buffer, the gaps between tensors included.
    """
    step = max(ALIGNMENT // itemsize, 1)
    offsets = np.zeros(len(counts), np.int64)
    total = 0
    for i, count in enumerate(counts):
        offsets[i] = total
        total += -(-count // step) * step
    return offsets, total


def refuse_overlap(shape: Sequence[int], strides: Sequence[int]) -> None:
    """Refuse an array to write to, some of whose elements are the same memory.

    Parameters
    ----------
    shape, strides : sequence of int
        Of the array; strides in any unit.

    Raises
    ------
    ValueError
        A dimension of more than one element has a stride of 0.
    """
    if any(extent > 1 and stride == 0 for extent, stride in zip(shape, strides, strict=True)):
        raise ValueError(
            "an in-place operation cannot write to an array whose elements share memory, as that of a"
            " broadcast view: pass a copy"
        )
