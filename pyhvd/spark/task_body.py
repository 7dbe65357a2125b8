"""What Spark runs for each partition: one task, which starts and watches one rank."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pyhvd.job.agent import RankInputs, run_task
from pyhvd.job.job_key import Secret
from pyhvd.spark.resources import RESOURCES
from pyhvd.transport.tcp.connection import Address


class TaskBody:
    """What Spark runs for each partition; all that goes to the executors is in it.

    Parameters
    ----------
    addresses : sequence of (str, int)
        Where the driver listens.
    secret : Secret
        The job's key.
    """

    def __init__(self, addresses: Sequence[Address], secret: Secret) -> None:
        self._addresses = list(addresses)
        self._secret = secret

    def __call__(self, partition: Iterable[Any]) -> Iterator[tuple[int, bytes]]:
        """Yield the rank and its pickled result; nothing if the driver has ended the job."""
        (index,) = partition
        result = self.run(index, {})
        if result is not None:
            yield result

    def run(self, index: int, files: Mapping[str, int]) -> tuple[int, bytes] | None:
        """Be task `index`; return the rank and its pickled result, None if the driver has ended the job.

        The rank inherits the descriptors in `files`, and finds their numbers in variables of these names.
        """
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        # Not its attemptNumber: a barrier stage is tried again as a whole, and that then begins at 0 again.
        attempt = context.taskAttemptId()
        resources = {name: list(given.addresses) for name, given in context.resources().items()}
        env = {RESOURCES: json.dumps(resources)}
        return run_task(self._addresses, self._secret, index, attempt, RankInputs(files, env))
