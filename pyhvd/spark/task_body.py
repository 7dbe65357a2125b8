"""The function that Spark runs for each partition: a task, which is the agent of one rank.

The rank is a process beside the task's Python worker. Of its task it may use:

1. Broadcast variables. Spark brings them to the worker, as the body holds them; the rank reads their files.
2. ``SparkFiles``: the rank has the worker's folder.

Accumulators are refused: the worker would not learn what a rank adds.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyhvd.common.kernel import host_hash
from pyhvd.job.agent.agent import LAST_MESSAGES_S, Agent, Dismissed
from pyhvd.job.agent.rank_process import RankProcess
from pyhvd.job.messages import Member
from pyhvd.job.rank.imports import SPARK_TASK, prepare_pyspark
from pyhvd.job.rank.pickles import PreparedCall
from pyhvd.spark.errors import SparkError
from pyhvd.spark.resources import RESOURCES
from pyhvd.transport.tcp.connection import Address, Secret, connect


def pack(
    context: Any, call: tuple[Any, Sequence[Any], Mapping[str, Any]], dump: Callable[[Any], bytes]
) -> tuple[bytes, dict[int, Any]]:
    """Return a call as `dump` pickles it for ranks, and the broadcast variables in it by number.

    Raises
    ------
    SparkError
        Spark encrypts the files of broadcast variables.
    """
    fn, args, kwargs = call
    registry = context._pickled_broadcast_vars  # of this thread; Spark's next job would take what is in it
    before = set(registry)
    registry.clear()
    try:
        code = dump(PreparedCall(prepare_pyspark, (fn, tuple(args), dict(kwargs))))
        found = {each._jbroadcast.id(): each for each in registry}
    finally:
        registry.clear()
        for each in before:
            registry.add(each)
    if found and is_on(context.getConf(), "spark.io.encryption.enabled"):
        raise SparkError(
            "the function uses a broadcast variable, whose file Spark encrypts (spark.io.encryption.enabled),"
            " and ranks cannot read it: pass the value in args"
        )
    return code, found


def is_on(conf: Any, name: str) -> bool:
    """Return whether a setting of Spark that is off by default is on."""
    return bool(conf.get(name, "false").lower() == "true")


def describe_task(broadcasts: Mapping[int, Any]) -> tuple[Any, dict[str, str]]:
    """Return Spark's context of the task that calls this, and the variables of the task's rank.

    The rank gets the task's resources, Spark's folder of files, and these broadcast variables.
    """
    from pyspark import SparkFiles, TaskContext

    context = TaskContext.get()
    assert context is not None
    resources = {name: list(each.addresses) for name, each in context.resources().items()}
    paths = {number: each._path for number, each in broadcasts.items()}
    told = {"folder": SparkFiles.getRootDirectory(), "broadcasts": paths}
    return context, {RESOURCES: json.dumps(resources), SPARK_TASK: json.dumps(told)}


@dataclass(frozen=True)
class TaskBody:
    """Runs one rank for a partition; Spark pickles it and sends it to the executors.

    Attributes
    ----------
    addresses : sequence of (str, int)
        Where the driver listens.
    secret : Secret
        The job's key.
    broadcasts : mapping of int to Broadcast
        The broadcast variables of the function.
    """

    addresses: Sequence[Address]
    secret: Secret
    broadcasts: Mapping[int, Any]

    def __call__(self, partition: Iterable[Any]) -> Iterator[tuple[int, bytes]]:
        """Yield the rank and its pickled result; yield nothing if the driver has ended the job."""
        (index,) = partition
        result = self.run(index, {})
        if result is not None:
            yield result

    def run(self, index: int, files: Mapping[str, int]) -> tuple[int, bytes] | None:
        """Run task `index`, whose rank gets `files`; see :meth:`run_attempt`."""
        context, env = describe_task(self.broadcasts)
        # Not attemptNumber(): when Spark retries a barrier stage as a whole, that begins at 0 again.
        return self.run_attempt(index, context.taskAttemptId(), files, env)

    def run_attempt(
        self, index: int, attempt: int, files: Mapping[str, int] = {}, env: Mapping[str, str] = {}
    ) -> tuple[int, bytes] | None:
        """Run task `index` of the job; return its rank and the pickled result, None if the driver wants none.

        Parameters
        ----------
        index, attempt : int
            The task, and this attempt at it; a later attempt has a larger number.
        files : mapping of str to int
            Descriptors that the rank inherits; variables of these names hold their numbers.
        env : mapping of str to str
            The rank's variables, in addition to those that the driver sends.

        Raises
        ------
        AgentStoppedError
            The rank failed, the driver is gone, or the driver refused this attempt.
        ChannelError
            The driver cannot be reached, or does not hold the job's key.
        """
        driver = connect(self.addresses, self.secret.reveal())
        agent = Agent(driver, functools.partial(RankProcess, files=files, env=env))
        host = host_hash(os.environ.get("PYHVD_SPARK_HOST_SALT", ""))
        try:
            ((rank, result),) = agent.run(Member(index, attempt, host, socket.gethostname())).items()
            driver.finish(LAST_MESSAGES_S)
        except Dismissed:
            return None
        finally:
            with contextlib.closing(driver):
                agent.close()
        return rank, result
