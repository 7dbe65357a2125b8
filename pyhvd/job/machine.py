"""The life of a job: which agents it has, when its ranks start, and which failure ends it. Pure.

Events are calls, with the time where it matters. :meth:`JobMachine.tick` returns what is to be done.

Invariants
----------
1. An agent is accepted only before all have registered. So the ranks of a job never change their agents.
2. The ranks are placed once, when every agent has registered.
3. A job ends once, with the failure that explains the others, and not before that is settled.
4. A lost agent is a failure of its lowest rank that had neither ended nor failed; it is none after all of its
   ranks have ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pyhvd.common.text import list_numbers
from pyhvd.job.errors import StartTimeoutError
from pyhvd.job.failure import FailureAnalysis
from pyhvd.job.messages import FromDriver, Member
from pyhvd.job.placement import RankPlacement, Registry
from pyhvd.job.process.exit_report import ENDED, EXIT, LOST, ExitReport

NEWER_ATTEMPT = "a newer attempt of this task has registered"
_ALL_THERE = "all tasks of the job have registered already, and none can be replaced"


@dataclass(frozen=True)
class Begin:
    """All agents have registered: begin to make their ranks one world."""

    groups: Sequence[Sequence[Member]]


@dataclass(frozen=True)
class Late:
    """The ranks have not found their places in time: the job ends with an error that says why."""


@dataclass(frozen=True)
class End:
    """The job is over, with this error."""

    error: Exception


@dataclass(frozen=True)
class Tell:
    """Send a message to an agent."""

    index: int
    message: FromDriver


@dataclass(frozen=True)
class StartCommand:
    """Start the command of a host's agent."""

    host: int


@dataclass(frozen=True)
class PassOn:
    """Send a signal to all ranks."""

    number: int


@dataclass(frozen=True)
class Pause:
    """Send what is to be sent, and stop this process until it is continued."""


@dataclass(frozen=True)
class Say:
    """Show a line of the driver's own."""

    text: str


@dataclass(frozen=True)
class Done:
    """All ranks have ended without error."""


Action = Begin | Late | End | Done | Tell | StartCommand | PassOn | Pause | Say


class JobMachine:
    """The life of one job, whose agents come by themselves, as Spark's tasks do.

    Parameters
    ----------
    size : int
        The number of ranks.
    agents : int
        The number of agents.
    start_timeout : float
        For messages: the seconds until `until`.
    epoch : float
        The wall-clock time when the caller's time was 0: reports of failures have wall-clock times.
    """

    def __init__(self, size: int, agents: int, start_timeout: float, epoch: float = 0.0) -> None:
        self.size = size
        self.start_timeout = start_timeout
        self._epoch = epoch
        self.until = math.inf  # the ranks must have started by then
        self.placements: list[RankPlacement] = []
        self.ended: set[int] = set()
        self._registry = Registry(agents)
        self._failures = FailureAnalysis()
        self._begun = False
        self._owned: dict[int, frozenset[int]] = {}
        self._by_rank: dict[int, RankPlacement] = {}

    @property
    def all_registered(self) -> bool:
        """Whether all agents have registered; from then on a lost agent is a failure."""
        return self._begun

    @property
    def failing(self) -> bool:
        """Whether the job will end with a failure."""
        return self._failures.settled_at < math.inf

    def ranks_of(self, index: int) -> frozenset[int]:
        """Return the ranks of an agent; none before they start."""
        return self._owned.get(index, frozenset())

    def register(self, member: Member) -> str:
        """Accept an agent, in place of an older attempt of the same index; else return why not."""
        if self._begun:
            return _ALL_THERE
        return "" if self._registry.add(member) else NEWER_ATTEMPT

    def place(self, placements: Sequence[RankPlacement]) -> None:
        """Note where the ranks are, as they start."""
        self.placements = list(placements)
        self._by_rank = {placement.rank: placement for placement in placements}
        owned: dict[int, set[int]] = {}
        for placement in placements:
            owned.setdefault(placement.index, set()).add(placement.rank)
        self._owned = {index: frozenset(ranks) for index, ranks in owned.items()}

    def end(self, rank: int) -> None:
        """Note that a rank ended without error."""
        self.ended.add(rank)

    def report(self, report: ExitReport, now: float, *, ended: bool = False) -> None:
        """Note a failure that a rank's agent reports.

        If MPI may have `ended` the rank because another one was lost, the failure gets the driver's time: the
        earliest of these failures explains the others.
        """
        if ended:
            report = replace(report, kind=ENDED, when=self._epoch + now)
        self._failures.add(report, now)

    def blame(
        self, rank: int, text: str, code: int, now: float, kind: str = EXIT, *, waited: bool = False
    ) -> None:
        """Note a failure that the driver has seen.

        Parameters
        ----------
        rank : int
            The rank; -1 for a failure that belongs to no rank.
        text : str
            What happened, for messages.
        code : int
            The job's exit code, if this is the cause.
        now : float
            The time.
        kind : str
            See :mod:`pyhvd.job.process.exit_report`.
        waited : bool
            Whether a better cause would be known by now.
        """
        self._failures.add(ExitReport(rank, kind, code, text, self._epoch + now), now, waited)

    def lose(self, member: Member, why: str, now: float, *, waited: bool = False) -> None:
        """Note the loss of an agent; before all have registered, another one may take its place."""
        owned = self.ranks_of(member.index)
        left = owned - self.ended
        if not self._begun:
            self._registry.remove(member)
        elif not owned:
            self.blame(-1, self._describe_loss(member, why), 1, now, LOST)
        elif left and not any(map(self._failures.has, left)):
            self.blame(min(left), why, 1, now, LOST, waited=waited)

    def tick(self, now: float) -> list[Action]:
        """Return what is to be done at this time; an :class:`End` is the last action of a job."""
        if now >= self._failures.settled_at:
            return [End(self._failure())]
        if self.placements:
            return []
        missing = self._registry.missing
        if not missing and not self._begun:
            return self._begin(now)
        if now <= self.until:
            return []
        return [Late()] if self._begun else [End(self._missing_error(missing))]

    def _begin(self, now: float) -> list[Action]:  # noqa: ARG002
        """Return what is to be done after all agents have registered."""
        self._begun = True
        return [Begin(self._registry.groups())]

    def late_error(self, waits_for: str) -> Exception:
        """Return the error of ranks that have not found their places in time, and what they wait for."""
        return StartTimeoutError(
            f"all {self.size} Spark tasks have started, but not all ranks within {self.start_timeout:g} s:"
            f" {waits_for}"
        )

    def _describe_loss(self, member: Member, why: str) -> str:
        return f"Spark task {member.index} on host {member.host} {why}"

    def _failure(self) -> Exception:
        """Return the error of a job that failed."""
        return self._failures.error(self.placements)

    def _missing_error(self, missing: Sequence[int]) -> Exception:
        """Return the error for agents that have not registered in time."""
        size, indices = self.size, list_numbers(missing)
        return StartTimeoutError(
            f"{len(missing)} of {size} Spark tasks have not started within"
            f" {self.start_timeout:g} s: index {indices}. Does the cluster have {size} free slots?"
            " Ask for fewer ranks with num_proc, stop what uses the slots, or wait longer with"
            " start_timeout or PYHVD_SPARK_START_TIMEOUT",
            missing,
        )
