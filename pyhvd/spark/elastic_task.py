"""The function that Spark runs for each task of an elastic job: it has an agent beside it, a process.

The agent, :mod:`pyhvd.job.agent.arriving_agent`, holds what its rank commits. The failure of a rank ends
neither the agent nor the task. A lost executor's tasks are started again by Spark, as other hosts. So is the
task of a drained executor, which fails for that.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyhvd.job.agent.arriving_agent import GO_ON_ELSEWHERE, start_agent
from pyhvd.job.mpi.rank_env import own_environment
from pyhvd.spark.task_body import describe_task
from pyhvd.transport.tcp.connection import Address, Secret

DECOMMISSIONED = "its executor is being decommissioned"
"""The reason by which the driver stops an agent whose task shall run on another executor."""


@dataclass(frozen=True, eq=False)
class ElasticTask:
    """Runs an agent for a partition; Spark pickles it and sends it to the executors.

    Attributes
    ----------
    addresses : sequence of (str, int)
        Where the driver listens.
    secret : Secret
        The job's key.
    executable : str, optional
        The Python of agent and rank; by default the executor's.
    most_failures : int
        The number of failures of one task after which Spark ends the job.
    broadcasts : mapping of int to Broadcast
        The broadcast variables of the function.
    """

    addresses: Sequence[Address]
    secret: Secret
    executable: str | None
    most_failures: int
    broadcasts: Mapping[int, Any]

    def __call__(self, partition: Iterable[Any]) -> Iterator[tuple[int, bytes]]:
        """Run the agent until the job is over; yield nothing."""
        tuple(partition)
        context, variables = describe_task(self.broadcasts)
        salt = {"PYHVD_HOST_SALT": os.environ.get("PYHVD_SPARK_HOST_SALT", "")}
        agent = start_agent(
            *(self.addresses, self.secret, context.taskAttemptId()),
            *(own_environment(os.environ) | variables | salt, self.executable, DECOMMISSIONED),
        )
        agent.wait()
        if agent.returncode == GO_ON_ELSEWHERE:
            if context.attemptNumber() + 1 < self.most_failures:
                raise RuntimeError(f"{DECOMMISSIONED}: the task shall run on another one")
        elif agent.returncode:
            raise RuntimeError(
                f"the agent of this task ended with exit code {agent.returncode}, and says why on stderr"
            )
        yield from ()
