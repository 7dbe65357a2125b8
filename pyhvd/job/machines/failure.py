"""The failures of a job, and which of them is the cause. Pure: the caller passes the time.

A rank's own error, exit or death is the cause at once, unless another host was lost before it. Other
failures may follow from an earlier one: an error that names another rank, a lost task, or a crash, as MPI
sometimes crashes when it loses a host. They wait up to 1 s for a better cause.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

from pyhvd.job.mpi.rendezvous import RankPlacement
from pyhvd.job.process.exit_report import ENDED, INTERRUPT, LOST, SIGNAL, ExitReport, root_cause

# How long a failure that may follow from another one waits for that one to be reported.
_BETTER_CAUSE_S = 1.0
# How much later than the loss of a host the report of a rank may come that failed before it.
REPORT_S = 0.25
_CRASHES = {128 + number for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)}


@dataclass
class FailureAnalysis:
    """The failures of one job.

    Attributes
    ----------
    settled_at : float
        When the cause is final; infinity while nothing has failed.
    """

    settled_at: float = math.inf
    _reports: dict[ExitReport, float] = field(default_factory=dict)  # and when the driver heard of them

    def add(self, report: ExitReport, now: float, *, waited: bool = False) -> None:
        """Note that a rank has failed; `waited` says that the wait for a better cause is over already."""
        self._reports.setdefault(report, now)
        may_follow = report.follows_another or report.kind in (LOST, ENDED, INTERRUPT) or _is_crash(report)
        self.settled_at = min(self.settled_at, now + (_BETTER_CAUSE_S if may_follow and not waited else 0.0))

    def has(self, rank: int) -> bool:
        """Return whether this rank has failed."""
        return any(report.rank == rank for report in self._reports)

    def cause(self, by_rank: Mapping[int, RankPlacement]) -> ExitReport:
        """Return the failure that explains the others; there must be one."""
        cause = root_cause(self._reports)
        assert cause is not None
        lost = [report for report in self._reports if report.kind == LOST]
        if not cause.follows_another:
            # It may itself have ended the other tasks of its host: their loss explains nothing.
            here = _first_rank_of_host(by_rank, cause.rank)
            lost = [report for report in lost if _first_rank_of_host(by_rank, report.rank) != here]
        first = root_cause(lost)
        may_follow = cause.follows_another or _is_crash(cause)
        if first is not None and (may_follow or self._reports[first] + REPORT_S < self._reports[cause]):
            cause = first
        if cause.follows_another or cause.kind == ENDED:
            ended = (report for report in self._reports if report.kind == ENDED and report.rank in by_rank)
            by_mpiexec = cause.kind == ENDED  # the rank's end says more than mpiexec's
            cause = root_cause(each for each in ended if by_mpiexec or each.when < cause.when) or cause
        return cause


def _is_crash(report: ExitReport) -> bool:
    return report.kind == SIGNAL and report.code in _CRASHES


def _first_rank_of_host(by_rank: Mapping[int, RankPlacement], rank: int) -> int:
    placement = by_rank.get(rank)
    return -1 if placement is None else placement.rank - placement.local_rank
