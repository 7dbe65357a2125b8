"""What this rank has done so far, for the program itself to see."""

from __future__ import annotations

from pyhvd.engine import context
from pyhvd.observe.metrics import Histogram, Metrics

__all__ = ["Histogram", "Metrics", "metrics"]


def metrics() -> Metrics:
    """Return a snapshot of what this rank has counted since ``init()``. Not collective; costs some 50 us.

    Two snapshots make a rate: subtract their fields, and divide by the difference of ``seconds``.

    Returns
    -------
    Metrics
        A frozen dataclass; ``dataclasses.asdict`` makes it fit for JSON.

    Raises
    ------
    NotInitializedError
        Before ``init()``, or after ``shutdown()``.

    Examples
    --------
    >>> import numpy as np, pyhvd as hvd
    >>> hvd.init()
    >>> _ = hvd.allreduce(np.ones(1000), name="x")
    >>> hvd.metrics().bytes["allreduce"]
    {'window': 8000}
    """
    return context.current().runtime.meter.snapshot()
