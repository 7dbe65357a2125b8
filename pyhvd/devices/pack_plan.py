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

    Tensors have ``counts`` elements, which are equal on all ranks, so the result is too. The length includes
    the gaps between tensors: ``offsets * itemsize`` are multiples of :data:`ALIGNMENT`, which ``itemsize``
    divides.
    """
    step = max(ALIGNMENT // itemsize, 1)
    offsets = np.zeros(len(counts), np.int64)
    total = 0
    for i, count in enumerate(counts):
        offsets[i] = total
        total += -(-count // step) * step
    return offsets, total


class Tiles(NamedTuple):
    """The work of one launch."""

    suffix: str
    """Suffix of the kernel's name."""
    skipped: int
    """Bytes of the buffer before the first tensor."""
    vectors: int
    """Vectors of the buffer from there on."""
    blocks: int
    """Blocks of threads; 0 if there is nothing to do."""
    table: npt.NDArray[np.uint8]
    """The tensors; then for each tile the index of its first tensor, as an int32; then the last tensor's."""
    firsts: int
    """Byte of the table at which the tiles' indices start."""


def make_tiles(offsets: Words, addresses: Words, counts: Words, itemsize: int) -> Tiles:
    """Return the work of one launch; see :meth:`pyhvd.devices.base.Packer.pack`.

    ``offsets`` ascend, in elements of ``itemsize`` bytes, and are multiples of 16 bytes, so tensors share no
    vector.
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
    return Tiles(suffix, skipped * ALIGNMENT, vectors, len(starts), table, entries.nbytes)
