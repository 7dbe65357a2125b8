"""What a rank's watch sees, and says: what is in flight here, and whether anything has ended.

Owns nothing: it reads what any thread may read of the runtime's rooms. Used by the watch's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable

from pyhvd.config import Config
from pyhvd.engine.executor import Executor
from pyhvd.engine.fast_path import FastLane
from pyhvd.engine.watchdog import Watch, give_up_after
from pyhvd.errors import HorovodInternalError
from pyhvd.observe.hang_report import Standing, describe_late_end, describe_standing, error_of_standing
from pyhvd.observe.hang_reporter import Whereabouts
from pyhvd.observe.timeline import Recorder
from pyhvd.queue import TensorQueue

_log = logging.getLogger("pyhvd")


class Onlooker:
    """See the module's docstring.

    Parameters
    ----------
    where : Whereabouts
        Of the ranks.
    queue : TensorQueue
        What goes by message.
    executor : Executor
        What is carried out.
    lane : FastLane or None
        What goes past both.
    recorder : Recorder
        Begins and ends timelines, which all ranks do together.
    """

    def __init__(
        self,
        where: Whereabouts,
        queue: TensorQueue,
        executor: Executor,
        lane: FastLane | None,
        recorder: Recorder,
    ) -> None:
        self._where = where
        self._queue = queue
        self._executor = executor
        self._lane = lane
        self._recorder = recorder

    def look(self) -> tuple[bool, Hashable]:
        """Return whether something is in flight here, and what changes as things end."""
        names, joins = self._queue.names()
        on_lane, _, position = self._lane.look() if self._lane is not None else ([], False, 0)
        # Whoever waits in a join has to wait while others work, but not for a rank 0 that is no more.
        waiting = bool(names or on_lane or self._executor.running or self._recorder.busy)
        waiting = waiting or (joins and self._where.states([0])[0].is_lost)
        return waiting, (self._executor.ended, position)

    def warn(self, passed: float) -> None:
        """Say that a collective does not end; what has not been submitted is told by the hang report."""
        standing = self._standing(passed)
        if standing.under_way:
            _log.warning("%s", describe_standing(standing, self._where.places))

    def error(self, passed: float) -> HorovodInternalError:
        """Return what a rank ends with where nothing has ended for so long (s)."""
        return error_of_standing(self._standing(passed), self._where.places)

    def late_end(self, passed: float) -> str:
        """Return what is said where a shutdown does not come to its end for so long (s)."""
        return describe_late_end(self._standing(passed), self._where.places)

    def _standing(self, passed: float) -> Standing:
        names, _ = self._queue.names()
        under_way = [entry.request.name for entry in self._executor.running if entry is not None]
        under_way += ["timeline"] * self._recorder.busy
        on_lane, running, _ = self._lane.look() if self._lane is not None else ([], False, 0)
        runs = bool(under_way or running)
        shown = under_way or (on_lane if running else [*names, *on_lane])
        others = [rank for rank in range(len(self._where.places)) if rank != self._where.rank]
        return Standing(self._where.rank, shown, runs, self._where.states(others), passed)


def give_up_time(config: Config) -> float:
    """Return when (s) a rank gives up by itself; 0 for never."""
    off = config.stall_check_disable or not config.stall_check_time_seconds
    return 0.0 if off else give_up_after(config.stall_shutdown_time_seconds)


def make_watch(
    config: Config, rank: int, onlooker: Onlooker, give_up: Callable[[float], None]
) -> Watch | None:
    """Return a rank's watch, if it needs one; ``give_up(passed)`` ends the rank."""
    if config.stall_check_disable or not config.stall_check_time_seconds:
        return None
    warn = config.stall_check_time_seconds if rank == 0 else 0.0
    end = give_up_time(config)
    if not (warn or end):
        return None
    return Watch(rank, warn, end, onlooker.look, onlooker.warn, give_up)
