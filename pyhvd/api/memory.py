"""Arrays in memory that all ranks of a node share, which the ranks reduce without copies."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pyhvd.arrays import Array
from pyhvd.dtypes import lookup
from pyhvd.engine import context
from pyhvd.transport.arena import Arena

_log = logging.getLogger("pyhvd")


def empty(shape: int | Sequence[int], dtype: npt.DTypeLike = np.float32) -> Array:
    """Return a new array in shared memory, which allreduces of this node do not copy.

    The result is an ordinary numpy array. From the second allreduce of a name on, each rank reduces a share
    where the arrays are, with about half the memory traffic. That needs arrays from this function on every
    rank, no prescale factor and, out of place, a name and 64 KiB; the result is in shared memory then.
    Allocate once and reuse the array: new shared memory is slower to get than other memory. The memory is
    freed with the last reference. Not collective.

    Parameters
    ----------
    shape : int or sequence of int
        Shape of the array.
    dtype : dtype, optional
        Any dtype that can be reduced; float32 by default.

    Returns
    -------
    numpy.ndarray
        Page-aligned, with arbitrary contents. Without shared memory it is an ordinary array, and a warning
        says why.

    Raises
    ------
    NotInitializedError
        Before ``init()``.
    UnsupportedDtypeError
        pyhvd does not support the dtype.

    Notes
    -----
    A forked process shares the array with its parent; it gets no copy.

    Examples
    --------
    >>> import pyhvd as hvd
    >>> hvd.init()
    >>> gradient = hvd.empty((1000, 1000))
    >>> gradient[:] = 1
    >>> hvd.allreduce_(gradient, name="gradient", op=hvd.Average)[0, 0].item()
    1.0
    """
    active = context.current()
    kind = np.dtype(dtype)
    lookup(kind)
    dims = np.empty(shape, np.dtype(np.void)).shape
    arena = active.arena
    if isinstance(arena, Arena):
        try:
            return arena.empty(dims, kind)
        except OSError as exc:
            mebibytes = math.prod(dims) * kind.itemsize / (1 << 20)
            cause = f"{exc.strerror} (this array needs {mebibytes:.1f} MiB of it)"
    else:
        cause = arena.cause
    if not active.warned_of_memory:
        active.warned_of_memory = True
        _log.warning("pyhvd.empty() returns ordinary arrays, as there is no shared memory: %s", cause)
    return np.empty(dims, kind)


def empty_like(array: Any) -> Array:
    """Return a new array with the shape and dtype of another one; see :func:`empty`."""
    given = np.asanyarray(array)
    return empty(given.shape, given.dtype)
