"""The life of one set of ranks: when they start, and which failure ends them. Pure.

The caller reports events by calls, and passes the time to those that need it. :meth:`JobMachine.tick` returns
the actions that are due. :mod:`pyhvd.job.machines.agent_pool` decides which agents are started.

Invariants
----------
1. An agent is accepted only until all have registered. So the ranks of a job never change their agents.
2. The ranks are placed once, when every agent has registered.
3. A job ends once. If it fails, its error is the failure that caused the others, and the job ends only when
   that cause is final.
4. A lost agent is a failure of its lowest rank that has not ended. It is no failure if one of its ranks has
   failed before, or if all have ended.
5. If any host has a problem, no rank starts. The job ends when every other host is known to have a problem or
   none, and at most 2 s later; the error has a line for each host with a problem.
6. After a signal that ends the job no failure counts: the ranks end because of the signal. The job then ends
   when each rank has ended or failed, or when the grace period is over.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from signal import SIGCONT, SIGTSTP
from typing import Protocol

from pyhvd.job.errors import Interrupted, LaunchError, RankError
from pyhvd.job.machines.agent_pool import AgentPool
from pyhvd.job.machines.failure import FailureAnalysis
from pyhvd.job.messages import Dialed, FromDriver, Listening, Member
from pyhvd.job.mpi.rendezvous import RankPlacement
from pyhvd.job.network.network_choice import NetworkChoice, Wanted
from pyhvd.job.process.exit_report import ENDED, EXIT, INTERRUPT, LOST, PARTED, ExitReport, root_cause
from pyhvd.job.process.rank_line import GOES_ON, Entrance
from pyhvd.job.process.signals import ENDING, GRACE_S, SAY_WAITING_S, describe_waiting
from pyhvd.job.spec import START_TIMEOUT, NameOf, flag_of

NEWER_ATTEMPT = "a newer attempt of this task has registered"
_COMPLETE = "all tasks of the job have registered already, and none can be replaced"
# After this time without progress the status line names hosts that it waits for: at most this many.
_SLOW_S = 3.0
_SLOW_NAMED = 3


@dataclass(frozen=True)
class Begin:
    """All agents have registered: begin the rendezvous of their ranks."""

    groups: Sequence[Sequence[Member]]


@dataclass(frozen=True)
class Late:
    """The rendezvous has not placed the ranks in time: end the job with :meth:`JobTexts.late_error`."""


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
    """Send all queued messages, then suspend this process, as Ctrl-Z does."""


@dataclass(frozen=True)
class Say:
    """Show the user a line."""

    text: str


@dataclass(frozen=True)
class Done:
    """All ranks have ended without error."""


Action = Begin | Late | End | Done | Tell | StartCommand | PassOn | Pause | Say


class JobTexts(Protocol):
    """The error texts of a job; each kind of launcher has its own."""

    def name(self, placement: RankPlacement) -> str:
        """Return the name of a rank's host."""

    def describe_loss(self, member: Member, why: str) -> str:
        """Return the text for an agent that was lost after all had registered, before its ranks started."""

    def late_error(self, waits_for: str) -> Exception:
        """Return the error for ranks that were not placed in time, with what the rendezvous waits for."""

    def missing_error(self, pool: AgentPool) -> Exception:
        """Return the error for agents that have not registered in time."""

    def failure(self, cause: ExitReport, placement: RankPlacement | None) -> Exception:
        """Return the error of a failed job; the placement is that of the failed rank, None without one."""


@dataclass(frozen=True)
class HostTexts:
    """The errors of a job on hosts.

    Attributes
    ----------
    size : int
        The number of ranks.
    names : sequence of str
        The hosts' names, by the index of their agents.
    start_timeout : float
        Seconds.
    name_of : NameOf
        Returns the name of an option as the user writes it.
    """

    size: int
    names: Sequence[str]
    start_timeout: float
    name_of: NameOf = flag_of

    def name(self, placement: RankPlacement) -> str:
        """See :meth:`JobTexts.name`."""
        return self.names[placement.index]

    def describe_loss(self, member: Member, why: str) -> str:
        """See :meth:`JobTexts.describe_loss`."""
        return f"host {self.names[member.index]} {why}"

    def late_error(self, waits_for: str) -> Exception:
        """See :meth:`JobTexts.late_error`."""
        option = self.name_of(START_TIMEOUT)
        return LaunchError(
            f"not all ranks have started within {self.start_timeout:g} s ({option}): {waits_for}"
        )

    def missing_error(self, pool: AgentPool) -> Exception:
        """See :meth:`JobTexts.missing_error`."""
        return pool.missing_error(
            f"its agent has not started within {self.start_timeout:g} s ({self.name_of(START_TIMEOUT)})"
        )

    def failure(self, cause: ExitReport, placement: RankPlacement | None) -> Exception:
        """See :meth:`JobTexts.failure`."""
        host = "" if placement is None else self.name(placement)
        text = cause.text
        if not cause.titled:
            who = "" if placement is None else f"rank {cause.rank} of {self.size} on host {host} "
            text = f"pyhvd: {who}{text}"
        # MPI_Abort takes any code; 256 would look like success.
        return RankError(text, cause.code & 0xFF or 1, cause.rank, host, cause.traceback)


@dataclass(eq=False)
class JobMachine:
    """The life of one set of ranks.

    Attributes
    ----------
    size : int
        The number of ranks.
    pool : AgentPool
        Their agents.
    texts : JobTexts
        The errors.
    start_timeout : float
        How long ranks may wait in MPI_Init for others, in seconds.
    epoch : float
        The wall-clock time when the caller's time was 0: reports of failures have wall-clock times.
    wanted : Wanted, optional
        The network that the user wants; None if nothing is to be chosen.
    ends_late : bool
        Whether a rank that is late in MPI_Init ends the job.
    until : float
        The time by which the ranks must have started.
    placements : list of RankPlacement
        Where the ranks are; empty before they start.
    ended : set of int
        The ranks that have ended without error.
    all_registered : bool
        Whether all agents have registered; from then on a lost agent is a failure.
    network : NetworkChoice or None
        The network of the ranks, after all agents have registered; None if none is chosen.
    stopped_by : int
        The signal that ends the job; 0 without one.
    """

    size: int
    pool: AgentPool
    texts: JobTexts
    start_timeout: float
    epoch: float = 0.0
    wanted: Wanted | None = None
    ends_late: bool = False
    until: float = math.inf
    placements: list[RankPlacement] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    all_registered: bool = False
    network: NetworkChoice | None = None
    stopped_by: int = 0
    _failures: FailureAnalysis = field(default_factory=FailureAnalysis)
    _owned: dict[int, frozenset[int]] = field(default_factory=dict)
    _by_rank: dict[int, RankPlacement] = field(default_factory=dict)
    _probes: Iterator[int] = field(default_factory=count)
    _end_at: float = math.inf
    _say_waiting_at: float = math.inf
    _interrupts: list[ExitReport] = field(default_factory=list)
    _failed_after_signal: set[int] = field(default_factory=set)
    _progress: tuple[int, int] = -1, 0  # hosts that are up, and ranks that are ready
    _progress_at: float = 0.0

    def __post_init__(self) -> None:
        self._entrance = Entrance(self.size, self.start_timeout)

    @property
    def failing(self) -> bool:
        """Whether the job will end with a failure."""
        return self._failures.settled_at < math.inf

    def ranks_of(self, index: int) -> frozenset[int]:
        """Return the ranks of an agent; none before they start."""
        return self._owned.get(index, frozenset())

    def leave_out(self, seconds: float) -> None:
        """Do not count the seconds for which the driver stood still as time of the start."""
        self.until += seconds
        self._entrance.late_at += seconds

    # ---- events of agents

    def register(self, member: Member) -> str:
        """Accept an agent, in place of an older attempt of the same index; else return why not."""
        if self.all_registered:
            return _COMPLETE
        return "" if self.pool.register(member) else NEWER_ATTEMPT

    def lose(self, member: Member, why: str, now: float, *, waited: bool = False) -> None:
        """Note the loss of an agent; before all have registered, another one may take its place."""
        owned = self.ranks_of(member.index)
        left = owned - self.ended
        if not self.all_registered:
            self.network = None  # the next agent there probes with the others again
        if self.stopped_by:
            self._failed_after_signal |= owned
        elif not self.all_registered:
            self.pool.remove(member)
        elif not owned:
            self.blame(-1, self.texts.describe_loss(member, why), 1, now, LOST)
        elif left and not any(map(self._failures.has, left)):
            self.blame(min(left), why, 1, now, LOST, waited=waited)

    def hear(self, index: int, message: Listening | Dialed) -> list[Action]:
        """Take an agent's answer to a probe of the network; return the actions that follow."""
        return [] if self.network is None else _told(self.network.hear(index, message))

    # ---- events of ranks

    def place(self, placements: Sequence[RankPlacement]) -> None:
        """Note where the ranks are, as they start."""
        self.placements = list(placements)
        self._by_rank = {placement.rank: placement for placement in placements}
        owned: dict[int, set[int]] = {}
        for placement in placements:
            owned.setdefault(placement.index, set()).add(placement.rank)
        self._owned = {index: frozenset(ranks) for index, ranks in owned.items()}

    def enter(self, rank: int, now: float) -> None:
        """Note that a rank calls MPI_Init."""
        self._entrance.enter(rank, now)
        self._check_entrance(now)

    def end(self, rank: int, now: float) -> None:
        """Note that a rank ended without error."""
        self.ended.add(rank)
        self._entrance.end(rank)
        self._check_entrance(now)

    def _check_entrance(self, now: float) -> None:
        """Fail if ranks wait in MPI_Init for a rank that has ended."""
        absent = self._entrance.absent()
        if absent is not None and not self._failures.has(absent[0]):
            self.blame(*absent, 1, now)

    def report(self, report: ExitReport, now: float, *, ended: bool = False) -> None:
        """Note a failure that a rank's agent reports; the report's time is that of its host's clock.

        `ended` says that MPI may have ended the rank because another one was lost. Such a failure gets the
        driver's time, because the earliest of them counts as the cause.
        """
        if self.stopped_by:
            self._failed_after_signal.add(report.rank)
            if report.kind == INTERRUPT:
                self._interrupts.append(report)
            return
        when = report.when - self.pool.ahead[self._by_rank[report.rank].index]
        report = replace(report, when=when)
        if ended:
            report = replace(report, kind=ENDED, when=self.epoch + now)
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
        if not self.stopped_by:
            self._failures.add(ExitReport(rank, kind, code, text, self.epoch + now), now, waited=waited)

    def signal(self, number: int, now: float) -> list[Action]:
        """Take a signal to the driver; return the actions that follow."""
        if number == SIGTSTP:
            return [PassOn(number), Pause(), PassOn(SIGCONT)]
        if number in ENDING:
            self._end_at = now if self.stopped_by else now + GRACE_S
            self._say_waiting_at = now + SAY_WAITING_S
            self.stopped_by = self.stopped_by or number
        return [PassOn(number)]

    # ---- decisions

    def tick(self, now: float) -> list[Action]:
        """Return what is to be done at this time; an :class:`End` is the last action of a job."""
        if self.stopped_by:
            return self._stop(now)
        # On hosts, where a network is wanted, only the ranks' ends count. In Spark an earlier failure of
        # mpiexec counts too.
        if len(self.ended) == self.size and (self.wanted is not None or not self.failing):
            return [Done()]
        if not self.placements and self.pool.has_problem:
            error = self.pool.problem_error(now)
            return [] if error is None else [End(error)]
        late = self._entrance.late(now)
        if late is not None and self.ends_late:
            self.blame(*late, 1, now)
        if now >= self._failures.settled_at:
            cause = self._failures.cause(self._by_rank)
            failure = self.texts.failure(cause, self._by_rank.get(cause.rank))
            if isinstance(failure, RankError):
                failure.parted = cause.kind == PARTED
            return [End(failure)]
        if self.placements:
            return [] if late is None else [Say(f"pyhvd: {self._title(late[0])} {late[1]}{GOES_ON}")]
        if not self.all_registered and not self.pool.missing:
            return self._begin(now)
        if now > self.until:
            return [Late()] if self.all_registered else [End(self.texts.missing_error(self.pool))]
        return [] if self.all_registered else [StartCommand(index) for index in self.pool.start(now)]

    def _begin(self, now: float) -> list[Action]:
        """Choose the network of the ranks; return what is to be done after all agents have registered."""
        actions: list[Action] = []
        if self.wanted is not None:
            try:
                if self.network is None:
                    self.network = NetworkChoice(
                        next(self._probes), self.pool.groups(), self.pool.names, self.wanted, now
                    )
                    actions = _told(self.network.begin())
                if not self.network.decide(now):
                    return actions
            except LaunchError as exc:
                return [End(exc)]
        self.all_registered = True
        return [*actions, Begin(self.pool.groups())]

    def _stop(self, now: float) -> list[Action]:
        """End the job that a signal has stopped."""
        over = self.ended | self._failed_after_signal
        left = [placement.rank for placement in self.placements if placement.rank not in over]
        if not left or now >= self._end_at:
            first = root_cause(self._interrupts)
            return [End(Interrupted(self.stopped_by, "" if first is None else first.text))]
        if now < self._say_waiting_at:
            return []
        self._say_waiting_at = math.inf
        return [Say(describe_waiting(left))]

    def _title(self, rank: int) -> str:
        return f"rank {rank} of {self.size} on host {self.texts.name(self._by_rank[rank])}"

    def describe_start(self, now: float) -> str:
        """Return how far the start has come, as one line; empty when all ranks are ready."""
        ready = self._entrance.entered | self.ended
        if len(ready) == self.size:
            return ""
        is_up, names = self.pool.up, self.pool.names
        if self._progress != (sum(is_up), len(ready)):
            self._progress, self._progress_at = (sum(is_up), len(ready)), now
        text = f"pyhvd: {sum(is_up)} of {len(names)} hosts are up"
        if self.placements:
            text += f", {len(ready)} of {self.size} ranks are ready"
        slow = [name for index, name in enumerate(names) if not is_up[index] or self.ranks_of(index) - ready]
        if now < self._progress_at + _SLOW_S or not slow:
            return text
        more = f" and {len(slow) - _SLOW_NAMED} more" if len(slow) > _SLOW_NAMED else ""
        return f"{text}, waiting for {', '.join(slow[:_SLOW_NAMED])}{more}"


def _told(messages: Iterable[tuple[int, FromDriver]]) -> list[Action]:
    return [Tell(index, message) for index, message in messages]
