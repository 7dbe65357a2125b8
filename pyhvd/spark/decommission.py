"""Asks Spark which of a job's executors it decommissions.

Spark tells neither its listeners nor the tasks when it begins to decommission an executor. Its scheduler
knows, since Spark 3.1. The methods that this module calls are Spark's own, and no interface for users:
without them no executor is found, and a line in the log at level DEBUG says why.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

_log = logging.getLogger("pyhvd")

_INTERVAL_S = 1.0
_JOIN_S = 2.0


class DecommissionWatch:
    """Asks in a thread of its own, as Spark may be slow to answer.

    Parameters
    ----------
    find_scheduler : callable
        Returns Spark's ``TaskSchedulerImpl``, on the driver.
    interval : float
        Seconds between two questions.

    Attributes
    ----------
    tasks : mapping of str to int
        The ids of the tasks to ask for, by names. The job's thread replaces it.
    leaving : frozenset of str
        The names of those whose executors are being decommissioned. The thread of this object replaces it.
    """

    def __init__(self, find_scheduler: Callable[[], Any], interval: float = _INTERVAL_S) -> None:
        self.tasks: Mapping[str, int] = {}
        self.leaving: frozenset[str] = frozenset()
        self._find_scheduler = find_scheduler
        self._interval = interval
        self._executors: dict[int, str] = {}  # of tasks; a task never moves
        self._failed = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pyhvd.spark.decommission", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; wait at most 2 s for an answer of Spark's."""
        self._closed.set()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while not self._closed.wait(self._interval):
            tasks = self.tasks
            try:
                scheduler = self._find_scheduler()
                leaving = {name for name, task in tasks.items() if self._is_leaving(scheduler, task)}
                self.leaving = frozenset(leaving)
            except Exception as exc:
                if not self._failed:
                    self._failed = True
                    _log.debug("Spark does not tell which executors it decommissions: %s", exc)

    def _is_leaving(self, scheduler: Any, task: int) -> bool:
        """Return whether the executor of a task is being decommissioned."""
        if task not in self._executors:
            found = scheduler.taskIdToExecutorId().get(task)
            if not found.isDefined():
                return False
            self._executors[task] = str(found.get())
        return bool(scheduler.isExecutorDecommissioned(self._executors[task]))
