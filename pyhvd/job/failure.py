"""What goes wrong in a job, and which of it is the cause. Pure: times are told to it.

A rank's own error, exit or death explains all the rest, and settles the matter at once. What may follow from
another failure (an error that names another rank, a task that is gone, a crash, as MPI itself crashes at
times when it loses a host) waits a moment for a better reason.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pyhvd.errors import HorovodInternalError, RankFailedError, RemoteError
from pyhvd.job.errors import LaunchError
from pyhvd.job.placement import Seat
from pyhvd.job.process.exit_report import INTERRUPT, LOST, SECONDARY, SIGNAL, ExitReport, root_cause

# So long is waited for a better reason than that a task is gone, or that a rank complains of another one.
_BETTER_S = 1.0
_CRASHES = {128 + number for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)}


@dataclass(frozen=True)
class _Case:
    record: ExitReport
    traceback: str


class FailureAnalysis:
    """The failures of one job."""

    def __init__(self) -> None:
        self._cases: list[_Case] = []
        self._settled_at = math.inf

    def add(self, record: ExitReport, now: float, traceback: str = "", waited: bool = False) -> None:
        """Note that a rank has failed.

        Parameters
        ----------
        record : ExitReport
            Its text is the cause in one line, as after "rank 1 ".
        now : float
            The time, in seconds.
        traceback : str
            The rank's own.
        waited : bool
            Whether there was time enough already for a better reason.
        """
        self._cases.append(_Case(record, traceback))
        may_follow = record.kind in (SECONDARY, LOST, INTERRUPT) or _is_crash(record)
        patience = _BETTER_S if may_follow and not waited else 0.0
        self._settled_at = min(self._settled_at, now + patience)

    def has(self, rank: int) -> bool:
        """Whether this rank has failed."""
        return any(case.record.rank == rank for case in self._cases)

    @property
    def settled_at(self) -> float:
        """When the cause can be told; infinity while nothing has failed."""
        return self._settled_at

    def error(self, seats: Iterable[Seat]) -> HorovodInternalError:
        """Return the one error of the job."""
        places = {seat.rank: seat for seat in seats}
        cause = self._cause(places)
        case = next(case for case in self._cases if case.record is cause)
        seat = places.get(cause.rank)
        if seat is None:
            return LaunchError(cause.text)
        error = RankFailedError(
            f"rank {cause.rank} of {len(places)} on host {seat.host} (Spark task {seat.index}) {cause.text}",
            cause.rank,
        )
        if case.traceback:
            error.__cause__ = RemoteError(cause.rank, case.traceback)
        return error

    def _cause(self, places: Mapping[int, Seat]) -> ExitReport:
        records = [case.record for case in self._cases]
        cause = root_cause(records)
        assert cause is not None
        if cause.kind == SECONDARY or _is_crash(cause):
            # On the same host it may be the other way round: that the crash has taken the task along.
            here = _host(places, cause.rank)
            lost = (record for record in records if record.kind == LOST)
            cause = root_cause(each for each in lost if _host(places, each.rank) != here) or cause
        return cause


def _is_crash(record: ExitReport) -> bool:
    return record.kind == SIGNAL and record.code in _CRASHES


def _host(places: Mapping[int, Seat], rank: int) -> int:
    """The first rank of a rank's host."""
    seat = places.get(rank)
    return -1 if seat is None else seat.rank - seat.local_rank
