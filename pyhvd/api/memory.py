"""Arrays that reduce without being moved: memory that all ranks of a node reach."""

from __future__ import annotations

import logging
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
    """Return a new array that in-place allreduces of this node need not move.

    A numpy array like any other, but in shared memory: the ranks reduce it where it lies, each its share of
    it, which takes about half the memory traffic. This is so from the second in-place allreduce of a name on,
    if every rank's array comes from here and there is no prescale factor; else it is reduced as any array is.
    Allocate once, and use it again: new shared memory is slower to come by than other memory. It is given
    back when nothing refers to it any longer. Not collective.

    Parameters
    ----------
    shape : int or sequence of int
        Its shape.
    dtype : dtype, optional
        Any that can be reduced; float32 by default.

    Returns
    -------
    numpy.ndarray
        Page-aligned, with arbitrary contents. Where there is no shared memory to be had it is an ordinary
        one, and a warning says why.

    Raises
    ------
    NotInitializedError
        Before ``init()``.
    UnsupportedDtypeError
        The dtype cannot travel.

    Notes
    -----
    A process that is forked shares the array with its parent, rather than getting a copy.

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
            cause = f"{exc.strerror} (this array needs {_mebibytes(dims, kind):.1f} MiB of it)"
    else:
        cause = arena.cause
    if not active.warned_of_memory:
        active.warned_of_memory = True
        _log.warning("pyhvd.empty() returns ordinary arrays, as there is no shared memory: %s", cause)
    return np.empty(dims, kind)


def empty_like(array: Any) -> Array:
    """Return a new array of the shape and dtype of another one; see :func:`empty`."""
    given = np.asanyarray(array)
    return empty(given.shape, given.dtype)


def _mebibytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> float:
    return float(np.prod(shape, dtype=np.float64)) * dtype.itemsize / (1 << 20)
