"""How many ranks a cluster has room for, as Spark counts."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pyhvd.spark.errors import SparkError, StartTimeoutError, reason_of

if TYPE_CHECKING:
    from pyspark import SparkContext

_LOOK_S = 0.1
EXECUTORS_START_S = 15.0
"""The executors of a standalone cluster start within seconds, one after another."""


def count_slots(context: SparkContext) -> int:
    """Return how many tasks the present executors can run at once, busy or not.

    An executor's cores limit its tasks by ``spark.task.cpus``, and its GPUs and other resources by
    ``spark.task.resource.*``. Spark uses this number to decide whether a job in barrier mode may start.
    (``SparkContext.defaultParallelism`` ignores both, and ``spark.default.parallelism`` overrides it.)

    Raises
    ------
    SparkError
        Spark does not tell.
    """
    from py4j.protocol import Py4JError

    try:
        # PySpark has no such method; Spark's own is the same from 3.1 to 4.3.
        scala: Any = context._jsc.sc()
        profile = scala.resourceProfileManager().defaultResourceProfile()
        return int(scala.maxNumConcurrentTasks(profile))
    except Py4JError as exc:
        raise SparkError(
            f"Spark does not tell how many tasks it can run at once ({reason_of(exc)}): set num_proc"
        ) from exc


def require_slots(context: SparkContext, size: int, unknown_s: float) -> None:
    """Raise SparkError if the cluster has too few slots, and gets no more: Spark would wait for minutes.

    Executors that are busy count. Where more executors may come, leave the wait to the job.

    Parameters
    ----------
    context : SparkContext
        The session's.
    size : int
        The number of ranks.
    unknown_s : float
        How long more executors of a standalone cluster may take to start, in seconds: nobody knows how many
        there will be.
    """
    patience = _patience(context, unknown_s)
    until = time.monotonic() + patience
    while (slots := count_slots(context)) < size and patience != math.inf:
        if time.monotonic() >= until:
            fewer = f"set num_proc to {slots} or fewer, or " if slots else ""
            raise SparkError(
                f"num_proc={size}, and the cluster has {slots} slots: {fewer}give the session more executors"
                " or cores (spark.executor.instances, spark.executor.cores, spark.cores.max, spark.task.cpus)"
            )
        time.sleep(_LOOK_S)


def _patience(context: Any, unknown_s: float) -> float:
    """Return how many seconds more executors may take to come; inf if Spark has yet to start some."""
    conf = context.getConf()
    if re.fullmatch(r"local(\[.*\])?", context.master):
        return 0.0
    if conf.get("spark.dynamicAllocation.enabled", "false").lower() == "true":
        return math.inf
    if context.master.startswith(("spark://", "local-cluster")):
        return unknown_s
    expected = int(conf.get("spark.executor.instances", "2"))  # Spark's own default
    executors = len(context._jsc.sc().statusTracker().getExecutorInfos()) - 1  # one is the driver
    return 0.0 if executors >= expected else math.inf


def wait_for_slots(count: Callable[[], int], timeout: float, *, dynamic: bool) -> int:
    """Return the number of slots as soon as there are any: executors start seconds after their session.

    If they only start when a job needs them (`dynamic`), raise SparkError at once.

    Raises
    ------
    StartTimeoutError
        No executor has started within `timeout` seconds.
    """
    until = time.monotonic() + timeout
    while not (slots := count()):
        if dynamic:
            raise SparkError(
                "with dynamic allocation and no executor yet, the number of ranks is unknown: set num_proc"
            )
        if time.monotonic() > until:
            raise StartTimeoutError(
                f"after {timeout:g} s the cluster has no executor that can run a task: do its workers run,"
                " and do they have the cores and resources that spark.executor.* and spark.task.* ask for?"
            )
        time.sleep(_LOOK_S)
    return slots
