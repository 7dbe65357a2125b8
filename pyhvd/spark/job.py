"""The job in Spark: one task per rank, in its own job group; its own thread collects the results.

:mod:`pyhvd.job.driver.generation_driver` serves the ranks; its agents are the tasks.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import selectors
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyhvd.common.text import list_numbers
from pyhvd.errors import RankFailedError, RemoteError
from pyhvd.job.driver.generation_driver import AgentSource, GenerationDriver
from pyhvd.job.errors import LaunchError, StartTimeoutError
from pyhvd.job.machines.agent_pool import AgentPool
from pyhvd.job.messages import Member
from pyhvd.job.mpi.rendezvous import RankPlacement, Rendezvous
from pyhvd.job.process.exit_report import ExitReport
from pyhvd.spark.data.partition import run_with_rows
from pyhvd.spark.data.schema import Selection
from pyhvd.spark.elastic_task import ElasticTask
from pyhvd.spark.errors import DataError, SparkError, reason_of
from pyhvd.spark.task_body import TaskBody

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark import SparkContext

    from pyhvd.transport.tcp.connection import Secret

_log = logging.getLogger("pyhvd")

_numbers = itertools.count()
# After the Spark job has failed, its ranks have this long to report the cause.
_LAST_REPORTS_S = 1.0
END_S = 15.0
"""Spark has this long to end a job."""


@dataclass(frozen=True)
class TaskTexts:
    """The errors of a job whose agents are tasks; a :class:`~pyhvd.job.machines.machine.JobTexts`."""

    size: int
    start_timeout: float

    def name(self, placement: RankPlacement) -> str:
        """See :meth:`JobTexts.name`."""
        return placement.host

    def describe_loss(self, member: Member, why: str) -> str:
        """See :meth:`JobTexts.describe_loss`."""
        return f"Spark task {member.index} on host {member.host} {why}"

    def late_error(self, waits_for: str) -> Exception:
        """See :meth:`JobTexts.late_error`."""
        return StartTimeoutError(
            f"all {self.size} Spark tasks have started, but not all ranks within {self.start_timeout:g} s:"
            f" {waits_for}"
        )

    def missing_error(self, pool: AgentPool) -> Exception:
        """See :meth:`JobTexts.missing_error`."""
        size, missing = self.size, pool.missing
        return StartTimeoutError(
            f"{len(missing)} of {size} Spark tasks have not started within"
            f" {self.start_timeout:g} s: index {list_numbers(missing)}. Does the cluster have {size} free"
            " slots? Ask for fewer ranks with num_proc, stop what uses the slots, or wait longer with"
            " start_timeout or PYHVD_SPARK_START_TIMEOUT",
            missing,
        )

    def failure(self, cause: ExitReport, placement: RankPlacement | None) -> Exception:
        """See :meth:`JobTexts.failure`."""
        if placement is None:
            return LaunchError(cause.text)
        error = RankFailedError(
            f"rank {cause.rank} of {self.size} on host {placement.host} (Spark task {placement.index})"
            f" {cause.text}",
            cause.rank,
        )
        if cause.traceback:
            error.__cause__ = RemoteError(cause.rank, cause.traceback)
        return error


@dataclass(eq=False)
class TaskSource(AgentSource):
    """Waits for tasks of Spark, which connect by themselves.

    Attributes
    ----------
    size : int
        The number of ranks.
    secret : Secret
        The key that an agent must hold.
    addresses : sequence of str
        Where agents connect.
    rendezvous : Rendezvous
        How the ranks find each other.
    start_timeout : float
        The time limit in seconds that errors name.
    agents : int, optional
        The number of agents; by default one for each rank.
    """

    size: int
    secret: Secret
    addresses: Sequence[str]
    rendezvous: Rendezvous
    start_timeout: float
    agents: int | None = None
    gone = "its Spark task is gone (Python worker, executor or host)"

    def __post_init__(self) -> None:
        self.pool = AgentPool([""] * (self.agents or self.size), starts=False)
        self.texts = TaskTexts(self.size, self.start_timeout)

    def find_rendezvous(self) -> Rendezvous:
        """See :meth:`AgentSource.find_rendezvous`."""
        return self.rendezvous


@dataclass(eq=False)
class CollectJob:
    """Runs a task body in every partition, of `rows` if given; starts at once.

    Spark's `collect` cannot be interrupted, and may never return. So a thread calls it, and the caller can
    poll :meth:`fileno`. With `barrier`, Spark starts either all tasks or none.
    """

    context: SparkContext
    size: int
    body: TaskBody | ElasticTask
    rows: Selection | None = None
    barrier: bool = False

    def __post_init__(self) -> None:
        from pyspark import InheritableThread

        self.group = f"pyhvd.spark.run.{next(_numbers)}"
        self._results: list[tuple[int, bytes]] = []
        self._error: BaseException | None = None
        self._over = threading.Event()
        self._wake, self._waker = os.pipe()
        # It inherits the caller's local properties, e.g. the scheduler pool, but not the job group.
        InheritableThread(target=self._collect, name=self.group, daemon=True).start()

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

    def end(self) -> None:
        """Make Spark end the job, and wait; it kills Python workers that do not end by themselves.

        Raise nothing: there is an error already, perhaps of Spark itself.
        """
        if self.done:
            return
        try:
            self._cancel()
        except Exception as exc:
            _log.warning("Spark could not be told to end job group %s: %s", self.group, exc)
        if not self.join(END_S):
            _log.warning("Spark has not ended job group %s within %g s", self.group, END_S)

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
            self.context._jsc.sc().cancelJobGroupAndFutureJobs(self.group)
        except Py4JError:  # Spark 3 has no such method
            self.context.cancelJobGroup(self.group)

    def _collect(self) -> None:
        try:
            self.context.setJobGroup(self.group, f"pyhvd.spark.run on {self.size} ranks", True)
            self._results = self._run_tasks()
        except BaseException as exc:
            self._error = exc
        finally:
            self._over.set()
            os.close(self._waker)

    def _run_tasks(self) -> list[tuple[int, bytes]]:
        if self.rows is not None:
            assert isinstance(self.body, TaskBody)
            results = run_with_rows(self.rows, self.body, barrier=self.barrier)
            if not results:  # Spark starts no task for a DataFrame that it finds empty
                raise DataError("the DataFrame has no rows")
            return results
        data = self.context.parallelize(range(self.size), self.size)
        tasks = data.barrier().mapPartitions(self.body) if self.barrier else data.mapPartitions(self.body)
        return list(tasks.collect())


def serve_tasks(driver: GenerationDriver, job: CollectJob) -> list[bytes]:
    """Serve the ranks until Spark's job is over; return their pickled results in rank order.

    Raises
    ------
    RankFailedError
        A rank raised, ended, was killed, or its host is lost.
    StartTimeoutError
        Some tasks did not register in time.
    LaunchError
        Spark ended the job for a reason of its own.
    """
    driver.selector.register(job, selectors.EVENT_READ, lambda: None)
    job_ended = math.inf
    try:
        driver.begin()
        while True:
            now = driver.step()
            if not job.done:
                continue
            _ignore(driver, job)
            try:
                by_rank = dict(job.results())
            except LaunchError:
                job_ended = min(job_ended, now)
                if now > job_ended + _LAST_REPORTS_S and not driver.machine.failing:
                    raise
            else:
                driver.receive_the_rest()
                return [by_rank[rank] for rank in range(driver.machine.size)]
    finally:
        _ignore(driver, job)


def _ignore(driver: GenerationDriver, job: CollectJob) -> None:
    """Take a job out of the selector: once over, it stays readable, and no turn would wait."""
    with contextlib.suppress(KeyError):
        driver.selector.unregister(job)
