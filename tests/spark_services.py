"""The driver and the tasks in one process: ranks are real, Spark is threads."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

from pyhvd.job.driver.console import Console
from pyhvd.job.driver.generation_driver import GenerationDriver
from pyhvd.job.messages import Member, encode
from pyhvd.job.mpi.rendezvous import PmiRendezvous
from pyhvd.job.rank.pickles import dump_functions, load
from pyhvd.job.spec import JobSpec
from pyhvd.spark.errors import SparkError
from pyhvd.spark.job import TaskSource, serve_tasks
from pyhvd.spark.task_body import TaskBody
from pyhvd.transport.tcp.connection import Connection, Secret, connect

PATIENCE_S = 60.0
_log = logging.getLogger("pyhvd")
Show = Callable[[int, int, bytes], None]
Result = tuple[int, bytes] | None


class Threads:
    """A job in Spark, as the driver sees it: here a thread per task."""

    def __init__(self, tasks: list[Callable[[], Any]]) -> None:
        self._wake, self._waker = os.pipe()
        self._left = len(tasks)
        self._lock = threading.Lock()
        self._results: list[tuple[int, bytes]] = []
        self.errors: list[Exception] = []
        self._threads = [threading.Thread(target=self._run, args=(task,)) for task in tasks]
        for thread in self._threads:
            thread.start()

    def _run(self, task: Callable[[], Any]) -> None:
        try:
            result = task()
            if isinstance(result, list):
                self._results += result
            elif result is not None:
                self._results.append(result)
        except Exception as exc:
            self.errors.append(exc)
        with self._lock:
            self._left -= 1
            if not self._left:
                os.close(self._waker)

    def fileno(self) -> int:
        return self._wake

    @property
    def done(self) -> bool:
        return not self._left

    def results(self) -> list[tuple[int, bytes]]:
        if self.errors:
            raise SparkError(f"Spark ended the job: {self.errors[0]}")
        return self._results

    def close(self) -> None:
        for thread in self._threads:
            thread.join(PATIENCE_S)
        assert not any(thread.is_alive() for thread in self._threads)
        os.close(self._wake)


class EagerDisplay:
    """Calls a test with the ranks' output."""

    def __init__(self, show: Show) -> None:
        self._show = show
        self._wake, self._waker = os.pipe()
        self._shown: Counter[int] = Counter()

    def fileno(self) -> int:
        return self._wake

    def write(self, rank: int, stream: int, data: bytes) -> None:
        self._show(rank, stream, data)
        if not self._shown:
            os.write(self._waker, b".")
        self._shown[rank] += len(data)

    def take_shown(self) -> dict[int, int]:
        os.read(self._wake, 1)
        shown, self._shown = self._shown, Counter()
        return shown

    def close(self) -> None:
        os.close(self._wake)
        os.close(self._waker)


class Bench:
    """A driver, its secret and its display."""

    def __init__(
        self,
        function: Callable[..., Any],
        size: int,
        show: Show,
        secret: Secret | None = None,
        rendezvous: Any = None,
        display: Any = None,
        agents: int | None = None,
        **spec: Any,
    ) -> None:
        self.secret = secret or Secret()
        call = dump_functions((function, (), {}))
        self.display = display or cast(Any, EagerDisplay(show))
        job = JobSpec(call, **spec)
        rendezvous = rendezvous or PmiRendezvous()
        source = TaskSource(size, self.secret, ["127.0.0.1"], rendezvous, job.start_timeout, agents)
        self.driver = GenerationDriver(job, source, self.display, Console(_warn, _warn))
        self.addresses = [("127.0.0.1", self.driver.connections.ports[0])]

    def task(self, index: int, attempt: int = 0) -> Callable[[], Result]:
        return lambda: TaskBody(self.addresses, self.secret, {}).run_attempt(index, attempt)

    def run(self, *tasks: Callable[[], Any]) -> list[Any]:
        job = Threads(list(tasks))
        try:
            return [load(bytearray(result)) for result in serve_tasks(self.driver, cast(Any, job))]
        finally:
            self.driver.stop("the test is over", 10)
            self.driver.close()
            self.display.close()
            job.close()

    def register(self, index: int, attempt: int = 0, host: str = "a") -> Connection:
        """Register as a task that sends nothing more by itself."""
        connection = connect(self.addresses, self.secret.reveal(), PATIENCE_S)
        connection.send(encode(Member(index, attempt, host, host)))
        return connection


def _warn(text: str) -> None:
    _log.warning("%s", text)


def drop(rank: int, stream: int, data: bytes) -> None:
    """Show nothing."""
