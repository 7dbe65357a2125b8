"""The watchdog: gives a rank its error when its background thread, or rank 0's, cannot.

Rank 0 ends the job when tensors have waited for too long (:mod:`pyhvd.observe.hang_reporter`). Rank 0 cannot
do so if it is stopped or dead, or if its background thread is inside a collective that another rank does not
finish. So each rank also checks by itself, later than rank 0 would, whether anything has ended since the last
check.

Owns: the thread that checks, and :class:`ProgressTimer`, which is pure. The thread reads only what any thread
may read, and acts through the functions that it is given. It runs only if a shutdown time is set, and on rank
0, which warns.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyhvd.config import Config
from pyhvd.engine.executor import Executor
from pyhvd.errors import HorovodInternalError
from pyhvd.observe.hang_report import StallSnapshot, describe_late_end, describe_stall, error_of_stall
from pyhvd.observe.hang_reporter import RankLocations
from pyhvd.observe.stall_inspector import ANSWER_SECONDS
from pyhvd.observe.timeline import Recorder
from pyhvd.queue import TensorQueue

if TYPE_CHECKING:
    from pyhvd.engine.fast_path import FastPathAdapter

GRACE_SECONDS = 1.0 + ANSWER_SECONDS
"""Seconds by which a rank gives up later than rank 0, besides half of the shutdown time."""


def give_up_after(end_after: float) -> float:
    """Return the time (s) after which a rank gives up by itself, if rank 0 ends jobs after ``end_after``."""
    return 1.5 * end_after + GRACE_SECONDS if end_after else 0.0


@dataclass(slots=True)
class ProgressTimer:
    """Measures the time without progress while something is in flight.

    Attributes
    ----------
    longest : float
        Longest counted pause (s) between two looks: in a longer one this process was suspended.
    """

    longest: float = math.inf
    _last: float = 0.0
    _progress: Hashable = None
    _since: float = 0.0
    _waiting: bool = False

    def look(self, progress: Hashable, now: float, *, waiting: bool) -> float:
        """Return the time (s) without progress, from whether something is in flight, and a position."""
        self._since += max(now - self._last - self.longest, 0.0)
        self._last = now
        if not waiting or not self._waiting or progress != self._progress:
            self._since = now
        self._waiting, self._progress = waiting, progress
        return now - self._since


@dataclass
class Watch:
    """The watchdog thread.

    Parameters
    ----------
    rank : int
        This rank.
    warn_after, end_after : float
        Times (s) after which it warns and ends; 0 for never.
    look : callable
        ``look()`` returns whether something is in flight, and a position that changes with progress.
    warn, end : callable
        Called after the two times with the seconds that have passed; each returns at once.
    """

    rank: int
    warn_after: float
    end_after: float
    look: Callable[[], tuple[bool, Hashable]]
    warn: Callable[[float], None]
    end: Callable[[float], None]

    def __post_init__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._main, name=f"pyhvd-{self.rank}-watch", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end; from any thread."""
        self._over.set()

    def is_here(self) -> bool:
        """Return whether the calling thread is the watchdog."""
        return threading.current_thread() is self._thread

    def join(self) -> None:
        """Wait for the thread's end after :meth:`stop`; return at once in one of its callbacks."""
        if not self.is_here():
            self._thread.join()

    def _main(self) -> None:
        limits = [each for each in (self.warn_after, self.end_after) if each]
        pause = min(limits) / 4
        timer = ProgressTimer(2 * pause)
        warned = 0.0
        while not self._over.wait(pause):
            now = time.monotonic()
            waiting, progress = self.look()
            passed = timer.look(progress, now, waiting=waiting)
            if passed < min(limits):
                warned = 0.0
            elif self.end_after and passed >= self.end_after:
                self.end(passed)
                return
            elif self.warn_after and passed - warned >= self.warn_after:
                warned = passed
                self.warn(passed)


_log = logging.getLogger("pyhvd")


@dataclass(frozen=True, slots=True)
class ProgressProbe:
    """Reads one rank's progress, from any thread.

    Parameters
    ----------
    where : RankLocations
        Locations of the ranks.
    queue : TensorQueue
        Tensors that go by message.
    executor : Executor
        The running batch.
    fast_path : FastPathAdapter or None
        Tensors in flight there, and the batch that is running.
    recorder : Recorder
        Starts and stops of timelines, which are collective.
    """

    where: RankLocations
    queue: TensorQueue
    executor: Executor
    fast_path: FastPathAdapter | None
    recorder: Recorder

    def look(self) -> tuple[bool, Hashable]:
        """Return whether something is in flight on this rank, and a position that changes with progress."""
        names, joins = self.queue.names()
        on_lane, _, position = self._look_at_fast_path()
        # A rank in join() waits while others work, but not for a dead rank 0.
        waiting = bool(names or on_lane or self.executor.running or self.recorder.busy)
        waiting = waiting or (joins and self.where.states([0])[0].is_lost)
        return waiting, (self.executor.ended, position)

    def _look_at_fast_path(self) -> tuple[list[str], bool, int]:
        return ([], False, 0) if self.fast_path is None else self.fast_path.look()

    def warn(self, passed: float) -> None:
        """Warn that a collective does not end; the hang report covers missing submissions."""
        snapshot = self._snapshot(passed)
        if snapshot.under_way:
            _log.warning("%s", describe_stall(snapshot, self.where.places))

    def error(self, passed: float) -> HorovodInternalError:
        """Return the error of a rank without progress for ``passed`` s."""
        return error_of_stall(self._snapshot(passed), self.where.places)

    def late_end(self, passed: float) -> str:
        """Return the text about a shutdown that has not ended for ``passed`` s."""
        return describe_late_end(self._snapshot(passed), self.where.places)

    def _snapshot(self, passed: float) -> StallSnapshot:
        names, _ = self.queue.names()
        under_way = [entry.request.name for entry in self.executor.running if entry is not None]
        under_way += ["timeline"] * self.recorder.busy
        on_lane, running, _ = self._look_at_fast_path()
        runs = bool(under_way or running)
        shown = under_way or (on_lane if running else [*names, *on_lane])
        others = [rank for rank in range(len(self.where.places)) if rank != self.where.rank]
        return StallSnapshot(self.where.rank, shown, runs, self.where.states(others), passed)


def give_up_time(config: Config) -> float:
    """Return the time (s) after which a rank gives up by itself; 0 for never."""
    off = config.stall_check_disable or not config.stall_check_time_seconds
    return 0.0 if off else give_up_after(config.stall_shutdown_time_seconds)


def make_watch(
    config: Config, rank: int, probe: ProgressProbe, give_up: Callable[[float], None]
) -> Watch | None:
    """Return a rank's watchdog, or None if it needs none; ``give_up(passed)`` ends the rank."""
    if config.stall_check_disable or not config.stall_check_time_seconds:
        return None
    warn = config.stall_check_time_seconds if rank == 0 else 0.0
    end = give_up_time(config)
    if not (warn or end):
        return None
    return Watch(rank, warn, end, probe.look, probe.warn, give_up)
