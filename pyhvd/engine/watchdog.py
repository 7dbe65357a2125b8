"""The watchdog: warns of a stall, or ends it, when a rank's background thread, or rank 0's, cannot.

Rank 0 reports tensors that have waited for too long, and ends the job (:mod:`pyhvd.observe.hang_reporter`).
Rank 0 cannot do so if it is stopped or dead, if its program holds the GIL, or if its background thread is
inside a collective that another rank does not finish. So each rank checks by itself whether anything has
ended since the last check:

1. After the warning time it asks whether rank 0 still answers, and reports a rank 0 that does not. If the
   tensors are being carried out already, it reports that. One rank of a host does so: :class:`HostClaim`.
2. Later than rank 0 would, it ends this rank, if a shutdown time is set.

Owns: the thread that checks, and :class:`ProgressTimer`, which is pure. The thread reads only what any thread
may read, and acts through the functions that it is given. It cannot run while its own program holds the GIL.
"""

from __future__ import annotations

import errno
import logging
import math
import socket
import sys
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pyhvd.common.kernel import hold_name
from pyhvd.config import Config
from pyhvd.engine.executor import Executor
from pyhvd.errors import HorovodInternalError
from pyhvd.observe.hang_report import (
    StallSnapshot,
    describe_late_end,
    describe_silence,
    describe_stall,
    error_of_stall,
)
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

    def resume(self, now: float) -> None:
        """Note that the time until ``now`` (s) was no pause: it counts in full."""
        self._last = now


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
        Called after the two times with the seconds that have passed; they return within seconds.
    calm : callable
        Called at each look that finds less than the two times.
    """

    rank: int
    warn_after: float
    end_after: float
    look: Callable[[], tuple[bool, Hashable]]
    warn: Callable[[float], None]
    end: Callable[[float], None]
    calm: Callable[[], object] = bool

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
                self.calm()
            elif self.end_after and passed >= self.end_after:
                self.end(passed)
                break
            elif self.warn_after and passed - warned >= self.warn_after:
                warned = passed
                self.warn(passed)
                timer.resume(time.monotonic())
        self.calm()


_log = logging.getLogger("pyhvd")


@dataclass(slots=True)
class HostClaim:
    """Lets one rank of a host speak for all: a name that one socket of the host can have at a time.

    The kernel frees the name when its rank releases it or ends. Only Linux has such names; elsewhere each
    rank speaks.
    """

    name: str
    _held: socket.socket | None = field(default=None, init=False)

    def take(self) -> bool:
        """Return whether this rank speaks, until :meth:`release`; it may call this again."""
        if self._held is not None or sys.platform != "linux":
            return True
        try:
            self._held = hold_name(self.name)
        except OSError as exc:
            return exc.errno != errno.EADDRINUSE
        return True

    def release(self) -> None:
        """Let another rank speak."""
        if self._held is not None:
            self._held.close()
            self._held = None


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
    rank_0_answers : callable
        Asks rank 0, and returns whether it answers within ANSWER_SECONDS.
    claim : HostClaim
        Whether this rank warns.
    """

    where: RankLocations
    queue: TensorQueue
    executor: Executor
    fast_path: FastPathAdapter | None
    recorder: Recorder
    rank_0_answers: Callable[[], bool]
    claim: HostClaim

    def look(self) -> tuple[bool, Hashable]:
        """Return whether something is in flight on this rank, and a position that changes with progress."""
        names, joins = self.queue.names()
        on_lane, _, position = self._look_at_fast_path()
        work = self.executor.devices.work
        # A rank in join() waits while others work, but not for a dead rank 0.
        waiting = bool(names or on_lane or self.executor.running or work.left() or self.recorder.busy)
        waiting = waiting or (joins and self.where.states([0])[0].is_lost)
        return waiting, (self.executor.ended, work.ended, position)

    def _look_at_fast_path(self) -> tuple[list[str], bool, int]:
        return ([], False, 0) if self.fast_path is None else self.fast_path.look()

    def warn(self, passed: float) -> None:
        """Warn that a collective does not end, or that rank 0 does not answer; once on each host.

        Rank 0 reports missing submissions, as long as it answers. A collective that has begun is reported on
        rank 0's host; on other hosts only where a process of that host is stopped or has ended.
        """
        places, rank = self.where.places, self.where.rank
        snapshot = self._snapshot(passed)
        if not (snapshot.under_way or rank) or not self.claim.take():
            return
        if snapshot.under_way:
            snapshot = self._with_states(snapshot)
            lost = any(state.is_lost for state in snapshot.states.values())
            if lost or places[rank].host == places[0].host:
                _log.warning("%s", describe_stall(snapshot, places))
                return
        elif not self.rank_0_answers():
            _log.warning("%s", describe_silence(snapshot, self.where.states([0])[0], places[0]))
            return
        self.claim.release()  # another rank of the host may have something to say

    def error(self, passed: float) -> HorovodInternalError:
        """Return the error of a rank without progress for ``passed`` s."""
        return error_of_stall(self._with_states(self._snapshot(passed)), self.where.places)

    def explain(self, passed: float) -> str:
        """Return what this rank alone knows of its wait of ``passed`` s."""
        return describe_stall(self._with_states(self._snapshot(passed)), self.where.places)

    def late_end(self, passed: float) -> str:
        """Return the text about a shutdown that has not ended for ``passed`` s."""
        return describe_late_end(self._with_states(self._snapshot(passed)), self.where.places)

    def _snapshot(self, passed: float) -> StallSnapshot:
        names, _ = self.queue.names()
        under_way = [entry.request.name for entry in self.executor.running if entry is not None]
        under_way += ["timeline"] * self.recorder.busy
        under_way += [f"{name} on its device" for name in self.executor.devices.work.names()]
        on_lane, running, _ = self._look_at_fast_path()
        runs = bool(under_way or running)
        shown = under_way or (on_lane if running else [*names, *on_lane])
        return StallSnapshot(self.where.rank, shown, runs, {}, passed)

    def _with_states(self, snapshot: StallSnapshot) -> StallSnapshot:
        others = [rank for rank in range(len(self.where.places)) if rank != self.where.rank]
        return replace(snapshot, states=self.where.states(others))


def give_up_time(config: Config) -> float:
    """Return the time (s) after which a rank gives up by itself; 0 for never."""
    off = config.stall_check_disable or not config.stall_check_time_seconds
    return 0.0 if off else give_up_after(config.stall_shutdown_time_seconds)


def make_watch(
    config: Config, rank: int, probe: ProgressProbe, give_up: Callable[[float], None]
) -> Watch | None:
    """Return a rank's watchdog, or None if the stall check is off; ``give_up(passed)`` ends the rank."""
    if config.stall_check_disable or not config.stall_check_time_seconds:
        return None
    end = give_up_time(config)
    # With a shutdown time the end says the same. A question would delay it behind that of other ranks.
    warn = config.stall_check_time_seconds if rank == 0 or not end else 0.0
    return Watch(rank, warn, end, probe.look, probe.warn, give_up, probe.claim.release)
