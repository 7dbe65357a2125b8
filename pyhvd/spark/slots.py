"""How many ranks a cluster has room for, by Spark's own reckoning."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pyhvd.spark.errors import SparkError, StartTimeoutError, reason_of

if TYPE_CHECKING:
    from pyspark import SparkContext

_LOOK_S = 0.1


def count_slots(context: SparkContext) -> int:
    """Return how many tasks could run at once on the executors that are there, busy or not.

    Each executor has room for as many as its cores allow by ``spark.task.cpus``, and its GPUs and other
    resources by ``spark.task.resource.*``: by this figure Spark decides whether a job in barrier mode may
    start. (``SparkContext.defaultParallelism`` knows of neither, and ``spark.default.parallelism`` sets it.)

    Raises
    ------
    SparkError
        It does not tell.
    """
    from py4j.protocol import Py4JError

    try:
        # Not in PySpark's own interface, but the same from Spark 3.1 to 4.3.
        scala: Any = context._jsc.sc()
        profile = scala.resourceProfileManager().defaultResourceProfile()
        return int(scala.maxNumConcurrentTasks(profile))
    except Py4JError as exc:
        raise SparkError(
            f"Spark does not tell how many tasks it can run at once ({reason_of(exc)}): say num_proc"
        ) from exc


def wait_for_slots(count: Callable[[], int], timeout: float, dynamic: bool) -> int:
    """Return the number of slots once there are any: executors come seconds after their session.

    Parameters
    ----------
    count : callable
        Returns how many there are.
    timeout : float
        Seconds.
    dynamic : bool
        Whether executors only come when a job asks for them.

    Raises
    ------
    StartTimeoutError
        No executor has come.
    SparkError
        None will come before a job asks for it.
    """
    until = time.monotonic() + timeout
    while not (slots := count()):
        if dynamic:
            raise SparkError(
                "with dynamic allocation and no executor at the moment, nothing says how many ranks to start:"
                " say num_proc"
            )
        if time.monotonic() > until:
            raise StartTimeoutError(
                f"after {timeout:g} s the cluster has no executor that can run a task: are its workers up,"
                " and have they the cores and resources that spark.executor.* and spark.task.* ask for?"
            )
        time.sleep(_LOOK_S)
    return slots
