"""Start a Spark cluster and session, and average gradients inside it in several ways.

Owns the driver's side; `spark_ranks` holds the executors' side. The peer is a program that uses Spark alone,
with the driver as parameter server:

1. The tasks read the broadcast parameters.
2. treeAggregate brings the sum of their gradients to the driver.
3. The driver divides the sum and broadcasts it.

Like a good program, the peer keeps its gradients from step to step and serialises no zero value.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import pyhvd.spark
from benchmarks.spark_ranks import (
    WARM_UPS,
    add_gradient,
    add_totals,
    average_by_pyhvd,
    check_average,
    first_collective,
)
from tests.spark.cluster import ROOT, WORKERS, standalone_cluster

PYHVD, TCP, TREE, EMPTY = (
    "pyhvd",
    "pyhvd, over TCP as between hosts",
    "treeAggregate + broadcast",
    "an empty barrier job of Spark's",
)
# MPICH then treats each rank as its own host, and its UCX uses sockets: no rank uses shared memory.
_AS_HOSTS = {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp,self"}
_EXECUTORS = len(WORKERS)
_EXECUTORS_S = 120.0


@contextmanager
def spark_context(ranks: int) -> Iterator[Any]:
    """Yield the SparkContext of a session with the given number of slots, in two executors on this host."""
    if importlib.util.find_spec("pyspark") is None:
        raise SystemExit('pyspark is not installed: pip install "pyhvd[spark]", or make bench-spark')
    cores = -(-ranks // _EXECUTORS)
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        standalone_cluster(Path(folder), cores=cores, memory="2g", hosts=False) as url,
    ):
        context = _session(url).sparkContext
        context.setLogLevel("FATAL")  # a failure is raised as an exception too
        try:
            _wait_for_executors(context)
            yield context
        finally:
            context.stop()


def _session(url: str) -> Any:
    from pyspark.sql import SparkSession

    os.environ |= {"PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    settings = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "4g",
        "spark.executor.memory": "2g",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    builder = SparkSession.builder.master(url).appName("pyhvd benchmarks")
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def _wait_for_executors(context: Any) -> None:
    """Wait until all executors have started; Spark retries an earlier barrier job only after 15 s."""
    until = time.monotonic() + _EXECUTORS_S
    while context._jsc.sc().getExecutorMemoryStatus().size() <= _EXECUTORS:  # the driver counts as one
        if time.monotonic() > until:
            raise SystemExit(f"Spark has not started {_EXECUTORS} executors within {_EXECUTORS_S:g} s")
        time.sleep(0.1)


def describe_spark(context: Any) -> str:
    """Return Spark's and Java's versions and the cluster's layout, for the report."""
    java = context._jvm.java.lang.System.getProperty("java.version")
    return (
        f"Spark {context.version} on Java {java}: a standalone cluster on this host,"
        f" {_EXECUTORS} executors that talk over loopback"
    )


# -- the start -----------------------------------------------------------------------------------------


def time_start(ranks: int) -> dict[str, float]:
    """Return the worst rank's seconds of each phase, from run() to the first collective."""
    found = pyhvd.spark.run(first_collective, (time.time(),), num_proc=ranks)
    return {phase: max(each[phase] for each in found) for phase in found[0]}


def time_empty_job(context: Any, ranks: int) -> float:
    """Return the seconds of a barrier job whose tasks do nothing."""
    start = time.perf_counter()
    context.parallelize(range(ranks), ranks).barrier().mapPartitions(list).collect()
    return time.perf_counter() - start


# -- a step --------------------------------------------------------------------------------------------

Averaging = Callable[[Any, int, int, int], list[float]]
"""A way to average: a function of context, ranks, bytes and steps that returns the seconds of each step."""


def _by_pyhvd(env: Mapping[str, str], _context: Any, ranks: int, nbytes: int, steps: int) -> list[float]:
    by_rank = pyhvd.spark.run(average_by_pyhvd, (nbytes, steps), num_proc=ranks, env=env)
    return [max(step) for step in zip(*by_rank, strict=True)]


def _by_tree(context: Any, ranks: int, nbytes: int, steps: int) -> list[float]:
    data = context.parallelize(range(ranks), ranks)
    parameters = context.broadcast(np.zeros(nbytes // 4, np.float32))
    seconds = []
    for step in range(WARM_UPS + steps):
        add = functools.partial(add_gradient, parameters, nbytes)
        start = time.perf_counter()
        average = data.treeAggregate(None, add, add_totals)
        average /= ranks
        fresh = context.broadcast(average)
        if step >= WARM_UPS:
            seconds.append(time.perf_counter() - start)
        check_average(average, ranks)
        parameters.destroy()
        parameters = fresh
    parameters.destroy()
    return seconds


WAYS: dict[str, Averaging] = {
    PYHVD: functools.partial(_by_pyhvd, {}),
    TCP: functools.partial(_by_pyhvd, _AS_HOSTS),
    TREE: _by_tree,
}
