"""The job in Spark: one task per rank, in a job group of its own, collected by a thread of its own."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
from typing import TYPE_CHECKING

from pyhvd.spark.data.partition import collect_beside
from pyhvd.spark.data.schema import Selection
from pyhvd.spark.errors import DataError, SparkError, reason_of
from pyhvd.spark.task_body import TaskBody

if TYPE_CHECKING:
    from pyspark import SparkContext

_log = logging.getLogger("pyhvd")

_numbers = itertools.count()


class CollectJob:
    """Runs a task body in every partition, from its construction on.

    Spark's `collect` cannot be interrupted, and may take for ever; so a thread calls it, and whoever waits
    for it can poll :meth:`fileno`.

    Parameters
    ----------
    context : SparkContext
        Where it runs.
    size : int
        How many tasks.
    body : TaskBody
        What each of them does.
    barrier : bool
        Whether Spark starts either all tasks or none.
    rows : Selection, optional
        The ranks get its partitions, one each; as many as tasks.
    """

    def __init__(
        self,
        context: SparkContext,
        size: int,
        body: TaskBody,
        barrier: bool,
        rows: Selection | None = None,
    ) -> None:
        from pyspark import InheritableThread

        self.group = f"pyhvd.spark.run.{next(_numbers)}"
        self._context = context
        self._size = size
        self._body = body
        self._barrier = barrier
        self._rows = rows
        self._results: list[tuple[int, bytes]] = []
        self._error: BaseException | None = None
        self._over = threading.Event()
        self._told, self._tell = os.pipe()
        # It inherits the caller's local properties (scheduler pool and the like); the group is its own.
        self._thread = InheritableThread(target=self._collect, name=self.group, daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Readable when the job is over."""
        return self._told

    @property
    def done(self) -> bool:
        """Whether the job is over."""
        return self._over.is_set()

    def results(self) -> list[tuple[int, bytes]]:
        """Return what the tasks returned.

        Raises
        ------
        DataError
            There are no rows, and so there was no task.
        SparkError
            Spark has ended the job; the text has a line of what it says.
        """
        if isinstance(self._error, DataError):
            raise self._error
        if self._error is not None:
            raise SparkError(f"Spark ended the job: {reason_of(self._error)}") from self._error
        return self._results

    def cancel(self) -> None:
        """Have Spark end the job; it kills the Python workers that do not end by themselves.

        Raises nothing, as there is an error already: Spark may be what has failed.
        """
        if self.done:
            return
        try:
            self._cancel()
        except Exception as exc:
            _log.warning("Spark could not be told to end job group %s: %s", self.group, exc)

    def join(self, timeout: float) -> bool:
        """Wait until the job is over; return whether it is."""
        return self._over.wait(timeout)

    def close(self) -> None:
        """Give up the descriptor."""
        with contextlib.suppress(OSError):
            os.close(self._told)

    def _cancel(self) -> None:
        from py4j.protocol import Py4JError

        try:
            # Of what waits for its slots in barrier mode Spark knows no job yet.
            self._context._jsc.sc().cancelJobGroupAndFutureJobs(self.group)
        except Py4JError:  # Spark 3 has no such method
            self._context.cancelJobGroup(self.group)

    def _collect(self) -> None:
        try:
            self._context.setJobGroup(self.group, f"pyhvd.spark.run on {self._size} ranks", True)
            self._results = self._run_tasks()
        except BaseException as exc:
            self._error = exc
        finally:
            self._over.set()
            os.close(self._tell)

    def _run_tasks(self) -> list[tuple[int, bytes]]:
        if self._rows is not None:
            told = collect_beside(self._rows, self._body, self._barrier)
            if not told:  # Spark starts no task, however many partitions there were, for what it finds empty
                raise DataError("the DataFrame has no rows")
            return told
        data = self._context.parallelize(range(self._size), self._size)
        tasks = data.barrier().mapPartitions(self._body) if self._barrier else data.mapPartitions(self._body)
        results: list[tuple[int, bytes]] = tasks.collect()
        return results
