"""Virtual time: events in the order of their times, and processes whose work takes time."""

from __future__ import annotations

import gc
import heapq
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any


class Clock:
    """Calls functions at virtual times (s); those of one time in the order in which they were asked for.

    Attributes
    ----------
    now : float
        The time of the event that is being carried out.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._numbers = count()
        self._due: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []

    def at(self, when: float, call: Callable[..., object], *args: Any) -> None:
        """Call a function at a time; at once, after what is due already, if that has passed."""
        heapq.heappush(self._due, (max(when, self.now), next(self._numbers), call, args))

    def after(self, seconds: float, call: Callable[..., object], *args: Any) -> None:
        """Call a function so much later."""
        self.at(self.now + seconds, call, *args)

    def run(self, until: float) -> bool:
        """Carry out all events up to a time; return whether later ones are left.

        The garbage collector is off meanwhile: it would look at all ranks, on account of one.
        """
        due, collects = self._due, gc.isenabled()
        gc.disable()
        try:
            while due and due[0][0] <= until:
                self.now, _, call, args = heapq.heappop(due)
                call(*args)
        finally:
            if collects:
                gc.enable()
        return bool(due)


@dataclass(slots=True, eq=False)
class SimulatedProcess:
    """A thread of a simulated process: it carries out what has come, then settles, and so on.

    The CPU time of each turn is measured with the simulating thread's clock, or is the same for all turns. A
    turn takes longer if others share the core.

    Parameters
    ----------
    clock : Clock
        Virtual time.
    cpu : float or None
        Seconds that each turn takes; None: they are measured.
    settle : callable
        Called at the end of each turn.
    sharers : float
        How many processes share the core.

    Attributes
    ----------
    busy : float
        CPU time (s) of all turns so far.
    blocked : bool
        Whether tasks wait until :meth:`resume`.
    """

    clock: Clock
    cpu: float | None
    settle: Callable[[], object]
    sharers: float = 1.0
    busy: float = 0.0
    blocked: bool = False
    _begun: float = 0.0
    _extra: float = 0.0
    _free_at: float = 0.0
    _is_due: bool = False
    _tasks: deque[tuple[Callable[..., object], tuple[Any, ...]]] = field(default_factory=deque)

    @property
    def now(self) -> float:
        """The time: within a turn, with what it has taken so far."""
        return self.clock.now + self.sharers * self._used()

    def spend(self, seconds: float) -> None:
        """Count CPU time of the present turn that is not measured."""
        self._extra += seconds

    def call(self, task: Callable[..., object], *args: Any) -> None:
        """Carry out a task as soon as this process is free."""
        self._tasks.append((task, args))
        if not self._is_due:
            self._plan_turn()

    def _plan_turn(self) -> None:
        self._is_due = bool(self._tasks) and not self.blocked
        if self._is_due:
            self.clock.at(self._free_at, self._turn)

    def wake(self) -> None:
        """Take a turn as soon as this process is free, if only to settle."""
        self.call(bool)

    def resume(self) -> None:
        """Go on after `blocked` was set."""
        self.blocked = False
        self.wake()

    def _turn(self) -> None:
        self._extra = 0.0
        self._begun = time.thread_time()
        while self._tasks and not self.blocked:
            task, args = self._tasks.popleft()
            task(*args)
        if not self.blocked:
            self.settle()
        used = self._used()
        self._begun = 0.0
        self.busy += used
        self._free_at = self.clock.now + self.sharers * used
        self._plan_turn()

    def _used(self) -> float:
        if not self._begun:
            return 0.0
        measured = time.thread_time() - self._begun if self.cpu is None else self.cpu
        return measured + self._extra
