"""The function that Spark runs for each task of an elastic job: it has an agent beside it, a process.

The agent is that of :mod:`pyhvd.job.host_agent`, and holds what its rank commits. The failure of a rank ends
neither the agent nor the task. A lost executor's tasks are started again by Spark, as other hosts. So is the
task of a drained executor, which fails for that.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pyhvd.job.host_agent import exit_code, serve_on
from pyhvd.job.process.guardian import die_with_parent
from pyhvd.job.rank_process import own_environment
from pyhvd.spark.resources import RESOURCES
from pyhvd.transport.tcp.connection import Address, Secret, connect

_MOST_BYTES = 1 << 16
DECOMMISSIONED = "its executor is being decommissioned"
"""The reason by which the driver stops an agent whose task shall run on another executor."""
_GO_ON_ELSEWHERE = 75
"""The exit code of such an agent."""


class ElasticTask:
    """Runs an agent for a partition; Spark pickles it and sends it to the executors.

    Parameters
    ----------
    addresses : sequence of (str, int)
        Where the driver listens.
    secret : Secret
        The job's key.
    executable : str, optional
        The Python of agent and rank; by default the executor's.
    most_failures : int
        Spark ends the job when a task has failed so many times.
    """

    def __init__(
        self, addresses: Sequence[Address], secret: Secret, executable: str | None, most_failures: int
    ) -> None:
        self._addresses = list(addresses)
        self._secret = secret
        self._executable = executable
        self._most_failures = most_failures

    def __call__(self, partition: Iterable[Any]) -> Iterator[tuple[int, bytes]]:
        """Run the agent until the job is over; yield nothing."""
        from pyspark import TaskContext

        tuple(partition)
        context = TaskContext.get()
        assert context is not None
        resources = {name: list(each.addresses) for name, each in context.resources().items()}
        env = own_environment(os.environ) | {
            RESOURCES: json.dumps(resources),
            "PYHVD_HOST_SALT": os.environ.get("PYHVD_SPARK_HOST_SALT", ""),
        }
        agent = subprocess.Popen(
            [self._executable or sys.executable, "-P", "-m", "pyhvd.spark.elastic_task"],
            stdin=subprocess.PIPE,
            stdout=2,  # the worker's stdout is Spark's
            env=env,
        )
        told = {
            "key": self._secret.reveal().hex(),
            "addresses": self._addresses,
            "task": context.taskAttemptId(),
        }
        agent.communicate(json.dumps(told).encode())
        if agent.returncode == _GO_ON_ELSEWHERE:
            if context.attemptNumber() + 1 < self._most_failures:
                raise RuntimeError(f"{DECOMMISSIONED}: the task shall run on another one")
        elif agent.returncode:
            raise RuntimeError(
                f"the agent of this task ended with exit code {agent.returncode}, and says why on stderr"
            )
        yield from ()


def main() -> int:
    """Run the agent; return its exit code."""
    die_with_parent(signal.SIGKILL, os.getppid())
    told = json.loads(sys.stdin.buffer.read(_MOST_BYTES))
    addresses = [(host, port) for host, port in told["addresses"]]
    stopped = ""

    def run() -> None:
        nonlocal stopped
        stopped = serve_on(connect(addresses, bytes.fromhex(told["key"])), told["task"])

    return exit_code(run) or (_GO_ON_ELSEWHERE if stopped == DECOMMISSIONED else 0)


if __name__ == "__main__":
    sys.exit(main())
