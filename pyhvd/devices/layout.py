"""Where tensors lie in a fused device buffer. Pure; the kernels' index arithmetic starts from here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

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
