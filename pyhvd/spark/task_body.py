"""The function that Spark runs for each partition: a task, which is the agent of one rank."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pyhvd.common.host_id import host_hash
from pyhvd.job.agent import LAST_MESSAGES_S, Agent, Dismissed
from pyhvd.job.messages import Member
from pyhvd.job.rank_process import RankProcess
from pyhvd.spark.resources import RESOURCES
from pyhvd.transport.tcp.connection import Address, Secret, connect


class TaskBody:
    """Runs one rank for a partition; Spark pickles it and sends it to the executors."""

    def __init__(self, addresses: Sequence[Address], secret: Secret) -> None:
        self._addresses = list(addresses)
        self._secret = secret

    def __call__(self, partition: Iterable[Any]) -> Iterator[tuple[int, bytes]]:
        """Yield the rank and its pickled result; yield nothing if the driver has ended the job."""
        (index,) = partition
        result = self.run(index, {})
        if result is not None:
            yield result

    def run(self, index: int, files: Mapping[str, int]) -> tuple[int, bytes] | None:
        """Run task `index`, whose rank gets `files`; see :func:`run_task`."""
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        # Not attemptNumber(): when Spark retries a barrier stage as a whole, that begins at 0 again.
        attempt = context.taskAttemptId()
        resources = {name: list(each.addresses) for name, each in context.resources().items()}
        env = {RESOURCES: json.dumps(resources)}
        return run_task(self._addresses, self._secret, index, attempt, files, env)


def run_task(
    addresses: Sequence[Address],
    secret: Secret,
    index: int,
    attempt: int,
    files: Mapping[str, int] = {},
    env: Mapping[str, str] = {},
) -> tuple[int, bytes] | None:
    """Run task `index` of the job; return its rank and the pickled result, None if the driver wants none.

    Parameters
    ----------
    addresses : sequence of (str, int)
        Where the driver listens.
    secret : Secret
        The job's key.
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
    driver = connect(addresses, secret.reveal())
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
