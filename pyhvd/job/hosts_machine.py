"""The life of a job on hosts, whose agents its driver starts. Pure, as :mod:`pyhvd.job.machine`.

The command of a host's agent waits, starts, or is up. It is started again, until the start timeout, if it
failed for a reason that may pass.

Invariants
----------
1. If any host has a problem, no rank starts. The others have a short time to show theirs; then the error has
   a line for each.
2. After a signal that ends the job no failure counts: the ranks end because of the signal.
3. A job ends only when each rank has ended or failed, or its time is over.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import count
from signal import SIGCONT, SIGTSTP

from pyhvd.common.text import MAX_LISTED, cut_lines
from pyhvd.job.errors import LaunchError
from pyhvd.job.machine import Action, Done, End, JobMachine, PassOn, Pause, Say, StartCommand, Tell
from pyhvd.job.messages import Dialed, Listening, Member
from pyhvd.job.network_choice import NetworkChoice, Sent, Wanted
from pyhvd.job.process.exit_report import EXIT, INTERRUPT, ExitReport, root_cause
from pyhvd.job.process.signals import ENDING, GRACE_S, SAY_WAITING_S, describe_waiting

# How many commands may be starting at the same time.
_AT_ONCE = 64
# A command that failed for a reason that may pass is started again after so long, or up to twice that.
_AGAIN_S = 0.5
# After the first host has a problem, the others have this long to show theirs.
_OTHERS_S = 2.0
# A start that makes no progress for so long names hosts that it waits for, but not more than these.
_SLOW_S = 3.0
_SLOW_NAMED = 3


class RankError(Exception):
    """A rank or a host failed, and ended the job; `code` is the exit code, 1 to 255.

    `exception` is the pickled exception of the rank's function, as far as it could be sent.
    """

    def __init__(self, text: str, code: int, rank: int = -1, host: str = "", traceback: str = "") -> None:
        super().__init__(text)
        self.code = code
        self.rank = rank
        self.host = host
        self.traceback = traceback
        self.exception = b""


class Interrupted(Exception):
    """A signal ended the job; the text says where the ranks were, if one of them did."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.number = number


class State(Enum):
    """Where a host's agent is."""

    WAITING = auto()
    STARTING = auto()
    UP = auto()


@dataclass
class _Host:
    """A host, and what is known of its agent.

    Attributes
    ----------
    start_at : float
        When its command may start.
    last : str
        Why its last command failed.
    problem : str
        Why the job cannot run on it.
    ahead : float
        By how many seconds its wall clock is ahead of the driver's.
    """

    name: str
    state: State = State.WAITING
    start_at: float = -math.inf
    last: str = ""
    problem: str = ""
    ahead: float = 0.0

    @property
    def undecided(self) -> bool:
        """Whether this host may still show a problem."""
        return not self.problem and not self.last and self.state is not State.UP


class HostsMachine(JobMachine):
    """The life of one job on hosts.

    Parameters
    ----------
    size : int
        The number of ranks.
    names : sequence of str
        The hosts' names for messages; the host's position is its agent's index.
    start_timeout, epoch : float
        See :class:`JobMachine`.
    wanted : Wanted
        The network that the user wants.
    """

    def __init__(
        self,
        size: int,
        names: Sequence[str],
        start_timeout: float,
        epoch: float = 0.0,
        wanted: Wanted = Wanted(probe=False),  # noqa: B008
    ) -> None:
        super().__init__(size, len(names), start_timeout, epoch)
        self._wanted = wanted
        self._network: NetworkChoice | None = None
        self._probes = count()
        self._hosts = [_Host(name) for name in names]
        self._problem_at = math.inf
        self._stopped_by = 0
        self._end_at = self._say_waiting_at = math.inf
        self._interrupts: list[ExitReport] = []
        self._over: set[int] = set()  # ranks that have failed since the signal
        self._ready: set[int] = set()  # ranks that have entered MPI_Init, or ended
        self._progress = -1, 0  # hosts that are up, and ranks that are ready
        self._progress_at = 0.0

    def name(self, host: int) -> str:
        """Return a host's name."""
        return self._hosts[host].name

    @property
    def network(self) -> NetworkChoice:
        """The network of the ranks, after all agents have registered."""
        assert self._network is not None
        return self._network

    def hear(self, index: int, message: Listening | Dialed) -> list[Action]:
        """Return what follows from an agent's answer to a probe of the network."""
        return [] if self._network is None else _told(self._network.hear(index, message))

    def enter(self, rank: int) -> None:
        """Note that a rank has entered MPI_Init."""
        self._ready.add(rank)

    def describe_start(self, now: float) -> str:
        """Return how far the start has come, as one line; empty when all ranks are ready."""
        ready = self._ready | self.ended
        if len(ready) == self.size:
            return ""
        up = sum(host.state is State.UP for host in self._hosts)
        if self._progress != (up, len(ready)):
            self._progress, self._progress_at = (up, len(ready)), now
        text = f"pyhvd: {up} of {len(self._hosts)} hosts are up"
        if self.placements:
            text += f", {len(ready)} of {self.size} ranks are ready"
        slow = [
            host.name
            for number, host in enumerate(self._hosts)
            if host.state is not State.UP or self.ranks_of(number) - ready
        ]
        if now < self._progress_at + _SLOW_S or not slow:
            return text
        more = f" and {len(slow) - _SLOW_NAMED} more" if len(slow) > _SLOW_NAMED else ""
        return f"{text}, waiting for {', '.join(slow[:_SLOW_NAMED])}{more}"

    def set_clock(self, host: int, ahead: float) -> None:
        """Note by how much a host's clock is ahead."""
        self._hosts[host].ahead = ahead

    def refuse(self, host: int, problem: str, now: float) -> None:
        """Note why the job cannot run on a host."""
        self._hosts[host].problem = problem
        self._problem_at = min(self._problem_at, now)

    def register(self, member: Member) -> str:
        """See :meth:`JobMachine.register`."""
        refused = super().register(member)
        if not refused:
            self._hosts[member.index].state = State.UP
        return refused

    def fail_command(self, host: int, why: str, may_pass: bool, now: float, jitter: float) -> None:
        """Note that a host's agent ended before all have registered.

        Parameters
        ----------
        host : int
            The host.
        why : str
            The reason.
        may_pass : bool
            Whether to start it again.
        now : float
            The time.
        jitter : float
            0 to 1; the hosts' commands are not started again all at once.
        """
        known = self._hosts[host]
        known.state = State.WAITING
        known.last = why
        known.start_at = now + _AGAIN_S * (1 + jitter)
        if not may_pass and not known.problem:
            self.refuse(host, why, now)

    def start_again(self, host: int) -> None:
        """Note that a host's agent was lost between two jobs: another one shall be started."""
        self._hosts[host].state = State.WAITING

    def lose(self, member: Member, why: str, now: float, *, waited: bool = False) -> None:
        """See :meth:`JobMachine.lose`."""
        if not self._begun:
            self._network = None  # the next agent there probes with the others again
        if self._stopped_by:
            self._over |= self.ranks_of(member.index)
        else:
            super().lose(member, why, now, waited=waited)

    def report(self, report: ExitReport, now: float, *, ended: bool = False) -> None:
        """See :meth:`JobMachine.report`; the report's time is that of its host's clock."""
        host = self._hosts[self._by_rank[report.rank].index]
        if not self._stopped_by:
            super().report(replace(report, when=report.when - host.ahead), now, ended=ended)
            return
        self._over.add(report.rank)
        if report.kind == INTERRUPT:
            self._interrupts.append(report)

    def blame(
        self, rank: int, text: str, code: int, now: float, kind: str = EXIT, *, waited: bool = False
    ) -> None:
        """See :meth:`JobMachine.blame`."""
        if not self._stopped_by:
            super().blame(rank, text, code, now, kind, waited=waited)

    def signal(self, number: int, now: float) -> list[Action]:
        """Return what follows from a signal to the driver."""
        if number == SIGTSTP:
            return [PassOn(number), Pause(), PassOn(SIGCONT)]
        if number in ENDING:
            self._end_at = now if self._stopped_by else now + GRACE_S
            self._say_waiting_at = now + SAY_WAITING_S
            self._stopped_by = self._stopped_by or number
        return [PassOn(number)]

    def tick(self, now: float) -> list[Action]:
        """See :meth:`JobMachine.tick`."""
        if self._stopped_by:
            return self._stop(now)
        if len(self.ended) == self.size:
            return [Done()]
        if not self.placements and self._problem_at < math.inf:
            return self._give_up(now)
        actions = super().tick(now)
        if not actions and not self._begun:
            actions += map(StartCommand, self._startable(now))
        return actions

    def _begin(self, now: float) -> list[Action]:
        """Choose the network of the ranks first."""
        actions: list[Action] = []
        try:
            if self._network is None:
                names = [host.name for host in self._hosts]
                self._network = NetworkChoice(
                    next(self._probes), self._registry.groups(), names, self._wanted, now
                )
                actions = _told(self._network.begin())
            chosen = self._network.decide(now)
        except LaunchError as exc:
            return [End(exc)]
        return [*actions, *super()._begin(now)] if chosen else actions

    def _startable(self, now: float) -> Iterable[int]:
        """Return the hosts whose commands start now, and take them for starting."""
        starting = sum(host.state is State.STARTING for host in self._hosts)
        for number, host in enumerate(self._hosts):
            if host.state is State.WAITING and host.start_at <= now and starting < _AT_ONCE:
                starting += 1
                host.state = State.STARTING
                yield number

    def _give_up(self, now: float) -> list[Action]:
        """End the job as soon as each host is known to have a problem, or to have none."""
        if now <= self._problem_at + _OTHERS_S and any(host.undecided for host in self._hosts):
            return []
        told = (host for host in self._hosts if host.problem or host.last)
        return [End(LaunchError(self._lines(told)))]

    def _stop(self, now: float) -> list[Action]:
        """End the job that a signal has stopped."""
        left = self._running()
        if not left or now >= self._end_at:
            first = root_cause(self._interrupts)
            return [End(Interrupted(self._stopped_by, "" if first is None else first.text))]
        if now < self._say_waiting_at:
            return []
        self._say_waiting_at = math.inf
        return [Say(describe_waiting(left))]

    def _running(self) -> list[int]:
        """Return the ranks that have neither ended nor failed."""
        over = self.ended | self._over
        return [placement.rank for placement in self.placements if placement.rank not in over]

    def _describe_loss(self, member: Member, why: str) -> str:
        return f"host {self.name(member.index)} {why}"

    def _failure(self) -> Exception:
        cause = self._failures.cause(self._by_rank)
        placement = self._by_rank.get(cause.rank)
        host = "" if placement is None else self.name(placement.index)
        text = cause.text
        if not cause.titled:
            who = "" if placement is None else f"rank {cause.rank} of {self.size} on host {host} "
            text = f"pyhvd: {who}{text}"
        # MPI_Abort takes any code; 256 would look like success.
        return RankError(text, cause.code & 0xFF or 1, cause.rank, host, cause.traceback)

    def late_error(self, waits_for: str) -> Exception:
        """See :meth:`JobMachine.late_error`."""
        return LaunchError(
            f"not all ranks have started within {self.start_timeout:g} s (--start-timeout): {waits_for}"
        )

    def _missing_error(self, missing: Sequence[int]) -> LaunchError:
        return LaunchError(self._lines(self._hosts[number] for number in missing))

    def _lines(self, hosts: Iterable[_Host]) -> str:
        timeout = f"its agent has not started within {self.start_timeout:g} s (--start-timeout)"
        lines = cut_lines(
            [*hosts],
            MAX_LISTED,
            "hosts",
            lambda each: f"host {each.name}: {each.problem or each.last or timeout}",
        )
        return "\n".join(lines)


def _told(messages: Sent) -> list[Action]:
    return [Tell(index, message) for index, message in messages]
