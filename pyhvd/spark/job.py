"""The job in Spark: one task per rank, in its own job group; its own thread collects the results."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
from typing import TYPE_CHECKING

from pyhvd.spark.data.partition import collect_beside
from pyhvd.spark.data.schema import Selection
from pyhvd.spark.elastic_task import ElasticTask
from pyhvd.spark.errors import DataError, SparkError, reason_of
from pyhvd.spark.task_body import TaskBody

if TYPE_CHECKING:
    from pyspark import SparkContext

_log = logging.getLogger("pyhvd")

_numbers = itertools.count()


class CollectJob:
    """Runs a task body in every partition, of `rows` if given; starts at once. For :class:`DriverService`.

    Spark's `collect` cannot be interrupted, and may never return. So a thread calls it, and the caller can
    poll :meth:`fileno`. With `barrier`, Spark starts either all tasks or none.
    """

    def __init__(
        self,
        context: SparkContext,
        size: int,
        body: TaskBody | ElasticTask,
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
        self._wake, self._waker = os.pipe()
        # It inherits the caller's local properties, e.g. the scheduler pool, but not the job group.
        self._thread = InheritableThread(target=self._collect, name=self.group, daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return a descriptor that is readable when the job is over."""
        return self._wake

    @property
    def done(self) -> bool:
        """Whether the job is over."""
        return self._over.is_set()

    def results(self) -> list[tuple[int, bytes]]:
        """Return the results of the tasks.

        Raises
        ------
        DataError
            There are no rows, so that Spark started no task.
        SparkError
            Spark ended the job; the text has a line of Spark's error.
        """
        if isinstance(self._error, DataError):
            raise self._error
        if self._error is not None:
            raise SparkError(f"Spark ended the job: {reason_of(self._error)}") from self._error
        return self._results

    def cancel(self) -> None:
        """Make Spark end the job; it kills Python workers that do not end by themselves.

        Raise nothing: there is an error already, perhaps of Spark itself.
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
        """Close the descriptor."""
        with contextlib.suppress(OSError):
            os.close(self._wake)

    def _cancel(self) -> None:
        from py4j.protocol import Py4JError

        try:
            # A stage in barrier mode that waits for slots is no job of Spark yet: this call ends it too.
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
            os.close(self._waker)

    def _run_tasks(self) -> list[tuple[int, bytes]]:
        if self._rows is not None:
            assert isinstance(self._body, TaskBody)
            results = collect_beside(self._rows, self._body, self._barrier)
            if not results:  # Spark starts no task for a DataFrame that it finds empty
                raise DataError("the DataFrame has no rows")
            return results
        data = self._context.parallelize(range(self._size), self._size)
        tasks = data.barrier().mapPartitions(self._body) if self._barrier else data.mapPartitions(self._body)
        collected: list[tuple[int, bytes]] = tasks.collect()
        return collected
