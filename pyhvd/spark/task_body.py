"""The function that Spark runs for each partition: a task, which starts and supervises one rank."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pyhvd.job.agent import run_task
from pyhvd.job.job_key import Secret
from pyhvd.spark.resources import RESOURCES
from pyhvd.transport.tcp.connection import Address


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
        """Run task `index`, whose rank gets `files`; see :func:`pyhvd.job.agent.run_task`."""
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        # Not attemptNumber(): when Spark retries a barrier stage as a whole, that begins at 0 again.
        attempt = context.taskAttemptId()
        resources = {name: list(each.addresses) for name, each in context.resources().items()}
        env = {RESOURCES: json.dumps(resources)}
        return run_task(self._addresses, self._secret, index, attempt, files, env)
