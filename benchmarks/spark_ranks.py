"""The executors' side of the Spark benchmark: pyhvd's ranks, and Spark's own Python workers.

Functions import their modules on use: a rank's imports are part of the time to its first collective.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.float32]

# Phases of the start.
ALL, CALLED, INIT, FIRST = (
    "pyhvd",
    "... until the function is called",
    "... import and init()",
    "... first allreduce",
)
WARM_UPS = 3
_PERIOD = 7
_BLOCK = _PERIOD * 8192
_kept: dict[int, Array] = {}


def first_collective(began: float) -> dict[str, float]:
    """Reduce 4 bytes; return the seconds of each phase since `began`, a time by the driver's clock."""
    called = time.time()
    import numpy as np

    import pyhvd as hvd

    hvd.init()
    ready = time.time()
    total = hvd.allreduce(np.ones(1, np.float32), name="first", op=hvd.Sum)
    done = time.time()
    if float(total[0]) != hvd.size():
        raise ValueError(f"the first allreduce of ones over {hvd.size()} ranks is {float(total[0])}")
    return {ALL: done - began, CALLED: called - began, INIT: ready - called, FIRST: done - ready}


def average_by_pyhvd(nbytes: int, steps: int) -> list[float]:
    """Average a gradient in place, once per step; return the seconds of each step."""
    import pyhvd as hvd

    hvd.init()
    source = gradient(hvd.rank(), nbytes)
    array = source.copy()
    seconds = []
    for step in range(WARM_UPS + steps):
        array[:] = source
        hvd.barrier()
        start = time.perf_counter()
        hvd.allreduce_(array, name="gradient", op=hvd.Average)
        if step >= WARM_UPS:
            seconds.append(time.perf_counter() - start)
        check_average(array, hvd.size())
    return seconds


def gradient(rank: int, nbytes: int) -> Array:
    """Return a rank's gradient: (rank + 1) * (1 + i % 7), float32."""
    return _pattern(rank + 1.0, nbytes // 4)


def kept_gradient(rank: int, nbytes: int) -> Array:
    """Return the same gradient, cached in each of Spark's Python workers, which Spark reuses for any task."""
    if any(each.nbytes != nbytes for each in _kept.values()):
        _kept.clear()
    if rank not in _kept:
        _kept[rank] = gradient(rank, nbytes)
    return _kept[rank]


def add_gradient(parameters: Any, nbytes: int, total: Array | None, rank: int) -> Array:
    """Read the parameters, and add the task's gradient; a task of treeAggregate."""
    if parameters.value.nbytes != nbytes:
        raise ValueError(f"the parameters have {parameters.value.nbytes} bytes, expected {nbytes}")
    mine = kept_gradient(rank, nbytes)
    return mine if total is None else total + mine


def add_totals(one: Array | None, other: Array | None) -> Array | None:
    """Add two partial sums into the first, which was unpickled for this task alone."""
    if one is None or other is None:
        return other if one is None else one
    one += other
    return one


def check_average(array: Array, size: int) -> None:
    """Raise ValueError unless an array is the average of the ranks' gradients."""
    expected = _pattern((size + 1) / 2, array.size)
    right = abs(array - expected) <= 1e-6 * size * _PERIOD
    if not right.all():
        at = int(right.argmin())
        raise ValueError(
            f"not the average over {size} ranks: element {at} is {array[at]} instead of {expected[at]}"
        )


def _pattern(factor: float, count: int) -> Array:
    import numpy as np

    block = np.asarray(factor * (1 + np.arange(_BLOCK) % _PERIOD), np.float32)
    return np.resize(block, count)
