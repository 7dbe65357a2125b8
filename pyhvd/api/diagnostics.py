"""What this rank has done so far, for the program itself to see."""

from __future__ import annotations

import os

from pyhvd.common.text import sendable
from pyhvd.engine import context
from pyhvd.errors import TimelineError
from pyhvd.negotiation.messages import TimelineOrder
from pyhvd.observe.metrics import Histogram, Metrics
from pyhvd.observe.timeline import new_job

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


def start_timeline(path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Record what every rank does from now on, one file per rank, until :func:`stop_timeline`.

    Rank 0's call takes effect on all ranks, at one place in the order of what they carry out, and returns
    once every rank records; a recording that is under way ends first. On other ranks the call checks its
    arguments, and does nothing: a program may call it everywhere.

    Parameters
    ----------
    path : str or path-like
        Rank 0's file; rank r writes ``<stem>.rank<r><suffix>`` beside it. A directory, or a path that ends
        in a slash, stands for ``timeline.json`` in it. Relative paths are relative to each rank's own
        directory.
    mark_cycles : bool
        Whether to mark when response lists, and the fast lane's decisions, are taken up (CYCLE_START).

    Raises
    ------
    NotInitializedError
        Before ``init()``.
    ValueError
        The timeline was not allowed: PYHVD_TIMELINE was not set for ``init()``.
    TimelineError
        Some rank cannot write its file; nothing is recorded. Raised on rank 0. Or the path is no text.
    HorovodInternalError
        pyhvd was shut down meanwhile.
    """
    text = os.fspath(path)
    if not isinstance(text, str) or not text:
        raise ValueError(f"start_timeline takes a path, not {path!r}")
    if "\0" in text or sendable(text) != text:
        raise TimelineError(f"start_timeline takes a path that is text, not {path!r}")
    _order(TimelineOrder(text, bool(mark_cycles), new_job()), "start_timeline")


def stop_timeline() -> None:
    """End the recording on all ranks, and close the files; does nothing if there is none.

    As with :func:`start_timeline`, rank 0's call counts; it returns once its own file is complete.

    Raises
    ------
    NotInitializedError
        Before ``init()``.
    ValueError
        The timeline was not allowed.
    """
    _order(TimelineOrder(), "stop_timeline")


def _order(order: TimelineOrder, verb: str) -> None:
    active = context.current()
    if not active.config.timeline:
        raise ValueError(
            f"{verb} needs PYHVD_TIMELINE in the environment of init(): a path, which is recorded to from the"
            " start, or DYNAMIC"
        )
    if active.topology.rank == 0:
        active.runtime.record(order)
