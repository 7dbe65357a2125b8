"""Metrics of this rank, and starting and stopping the timeline."""

from __future__ import annotations

import os

from pyhvd.common.text import sendable
from pyhvd.common.urls import is_url
from pyhvd.engine import context
from pyhvd.errors import TimelineError
from pyhvd.negotiation.messages import TimelineOrder
from pyhvd.observe.metrics import Histogram, Metrics
from pyhvd.observe.timeline import new_job

__all__ = ["Histogram", "Metrics", "metrics"]


def metrics() -> Metrics:
    """Return a snapshot of this rank's counters since ``init()``. Not collective; takes about 50 us.

    Two snapshots make a rate: subtract their fields, and divide by the difference of ``seconds``.

    Returns
    -------
    Metrics
        A frozen dataclass; ``dataclasses.asdict`` converts it for JSON.

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


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:  # noqa: FBT001, FBT002 - Horovod's
    """Start a timeline of every rank, one file per rank, until :func:`stop_timeline`.

    Rank 0's call takes effect on all ranks, at one place in the order of responses, and returns when every
    rank records. A running recording ends first. On other ranks the call only checks its arguments, so a
    program may call it everywhere.

    Parameters
    ----------
    file_path : str or path-like
        Rank 0's file; rank r writes ``<stem>.rank<r><suffix>`` beside it. A directory, or a path that ends
        in a slash, stands for ``timeline.json`` in it. Relative paths are relative to each rank's own
        directory.
    mark_cycles : bool
        Whether to mark each response list, and each batch of the fast lane (CYCLE_START).

    Raises
    ------
    NotInitializedError
        Before ``init()``.
    ValueError
        PYHVD_TIMELINE was not set at ``init()``.
    TimelineError
        Some rank cannot write its file, and none records (raised on rank 0); or the path is not text.
    HorovodInternalError
        pyhvd was shut down during the call.
    """
    text = os.fspath(file_path)
    if not isinstance(text, str) or not text:
        raise ValueError(f"start_timeline takes a path, not {file_path!r}")
    if "\0" in text or sendable(text) != text:
        raise TimelineError(f"start_timeline takes a path that is text, not {file_path!r}")
    if is_url(text):
        raise TimelineError(f"start_timeline takes a local path, not {file_path!r}")
    _order(TimelineOrder(text, bool(mark_cycles), new_job()), "start_timeline")


def stop_timeline() -> None:
    """Stop the timeline on all ranks, and close the files; do nothing without a recording.

    Only rank 0's call has an effect, as with :func:`start_timeline`. It returns when its file is complete.

    Raises
    ------
    NotInitializedError
        Before ``init()``.
    ValueError
        PYHVD_TIMELINE was not set at ``init()``.
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
