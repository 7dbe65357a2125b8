"""Plan the work of ``pack_kernels.cu``: where tensors lie in a buffer, and which block copies them.

The plan is pure. The buffer is cut into *vectors* of 16 bytes, and these into *tiles*, one per block of
threads. The host makes a table for each launch; it names the first tensor of every tile. A thread searches
the table only if its tile contains several tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

ALIGNMENT = 16
"""Bytes; every tensor starts at a multiple, so the kernels move 16 bytes at a time."""

THREADS = 256
"""Threads per block; ``pack_kernels.cu`` has the same number."""

EACH = {"small": 1, "large": 4}
"""Vectors per thread, by the suffix of the kernels' names."""

LARGE = 1 << 18
"""Vectors (4 MiB) from which the large kernels run: there are enough blocks for any GPU then."""

Words = npt.NDArray[np.int64]

_ENTRY = np.dtype([("address", "<u8"), ("first", "<i8"), ("count", "<i8")])


def lay_out(counts: Sequence[int], itemsize: int) -> tuple[Words, int]:
    """Return the first element of each tensor in a buffer, and the buffer's length in elements.

    Parameters
    ----------
    counts : sequence of int
        Elements of each tensor. They are equal on all ranks, so the result is too.
    itemsize : int
        Bytes per element in the buffer; divides :data:`ALIGNMENT`.

    Returns
    -------
    offsets : numpy.ndarray of int64
        First element of each tensor; ``offsets * itemsize`` is a multiple of :data:`ALIGNMENT`.
    total : int
        Elements in the buffer, including the gaps between tensors.
    """
    step = max(ALIGNMENT // itemsize, 1)
    offsets = np.zeros(len(counts), np.int64)
    total = 0
    for i, count in enumerate(counts):
        offsets[i] = total
        total += -(-count // step) * step
    return offsets, total


class Tiles(NamedTuple):
    """The work of one launch.

    Attributes
    ----------
    suffix : str
        Suffix of the kernel's name.
    skipped : int
        Bytes of the buffer before the first tensor.
    vectors : int
        Vectors of the buffer from there on.
    blocks : int
        Blocks of threads; 0 if there is nothing to do.
    tensors : int
        Entries of the table.
    table : numpy.ndarray of uint8
        The entries; then for each tile the index of its first entry, as an int32; then the last entry's
        index.
    """

    suffix: str
    skipped: int
    vectors: int
    blocks: int
    tensors: int
    table: npt.NDArray[np.uint8]

    @property
    def firsts(self) -> int:
        """Byte of the table at which the tiles' indices start."""
        return self.tensors * _ENTRY.itemsize


def make_tiles(offsets: Words, addresses: Words, counts: Words, itemsize: int) -> Tiles:
    """Return the work of one launch.

    Parameters
    ----------
    offsets : numpy.ndarray of int64
        First element of each tensor in the buffer: ascending multiples of 16 bytes; tensors share no vector.
    addresses : numpy.ndarray of int64
        Address of each tensor; 0 for a missing tensor.
    counts : numpy.ndarray of int64
        Elements of each tensor.
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
