"""The agents of a job: which are up, which must be started, and which hosts cannot have ranks. Pure.

A command starts an agent, or the agent connects by itself, as a task of Spark does. UP is an agent that has
registered. ::

    DOWN ------ start -------> STARTING
    DOWN ------ register ----> UP
    STARTING -- register ----> UP
    STARTING -- fail --------> DOWN
    UP -------- register ----> UP
    UP -------- fail --------> DOWN
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from pyhvd.common.text import MAX_LISTED, cut_lines
from pyhvd.job.errors import LaunchError
from pyhvd.job.messages import Member

AT_ONCE = 64
"""The most agents that are in the state STARTING at the same time."""
# After a failure that may pass, a command starts again between this time later and twice this time.
_AGAIN_S = 0.5
# From the first problem to the job's error: in this time other hosts can add theirs.
_OTHERS_S = 2.0


class AgentState(Enum):
    """Whether an agent runs; see the diagram above."""

    DOWN = auto()
    STARTING = auto()
    UP = auto()


_MOVES = {
    (AgentState.DOWN, "start"): AgentState.STARTING,
    (AgentState.DOWN, "register"): AgentState.UP,
    (AgentState.STARTING, "register"): AgentState.UP,
    (AgentState.STARTING, "fail"): AgentState.DOWN,
    (AgentState.UP, "register"): AgentState.UP,
    (AgentState.UP, "fail"): AgentState.DOWN,
}


@dataclass
class _PoolHost:
    """A host, and what is known of its agent.

    Attributes
    ----------
    member : Member or None
        The agent's registration, in the state UP.
    start_at : float
        The earliest time at which its command starts.
    failure : str
        Why its last command failed; empty after the agent has registered.
    problem : str
        Why the job cannot run on it.
    """

    name: str
    agent: AgentState = AgentState.DOWN
    member: Member | None = None
    start_at: float = -math.inf
    failure: str = ""
    problem: str = ""

    def move(self, event: str) -> None:
        """Change the agent's state."""
        self.agent = _MOVES[self.agent, event]

    @property
    def undecided(self) -> bool:
        """Whether it is not known yet if the job can run here."""
        return not self.problem and not self.failure and self.agent is not AgentState.UP


class AgentPool:
    """The agents of one job, each by its index.

    Parameters
    ----------
    names : sequence of str
        The names of the agents' hosts, for messages.
    starts : bool
        Whether commands start the agents; False if the agents connect by themselves.

    Attributes
    ----------
    ahead : list of float
        By how many seconds the wall clock of each agent's host is ahead of the driver's.
    """

    def __init__(self, names: Sequence[str], *, starts: bool) -> None:
        self.names = list(names)
        self.ahead = [0.0] * len(self.names)
        self._hosts = [_PoolHost(name) for name in names]
        self._starts = starts
        self._problem_at = math.inf

    @property
    def missing(self) -> list[int]:
        """The indices of the agents that have not registered."""
        return [index for index, host in enumerate(self._hosts) if host.member is None]

    @property
    def up(self) -> list[bool]:
        """Whether each agent is up."""
        return [host.agent is AgentState.UP for host in self._hosts]

    def groups(self) -> list[list[Member]]:
        """Return the agents that have registered, host by host and by index; host of the lowest index first.

        Agents with the same host id are on one host.
        """
        groups: dict[str, list[Member]] = {}
        for host in self._hosts:
            if host.member is not None:
                groups.setdefault(host.member.host_hash, []).append(host.member)
        return list(groups.values())

    def register(self, member: Member) -> bool:
        """Accept an agent, in place of an older attempt of the same index.

        Return False if a newer attempt has registered, or if the index is out of range.
        """
        if not 0 <= member.index < len(self._hosts):
            return False
        host = self._hosts[member.index]
        if host.member is not None and host.member.attempt > member.attempt:
            return False
        host.move("register")
        host.member, host.failure = member, ""
        return True

    def remove(self, member: Member) -> None:
        """Note that an agent was lost before the ranks started, unless another attempt has registered."""
        host = self._hosts[member.index]
        if host.member == member:
            host.move("fail")
            host.member = None

    def refuse(self, index: int, problem: str, now: float) -> None:
        """Note why the job cannot run on a host."""
        self._hosts[index].problem = problem
        self._problem_at = min(self._problem_at, now)

    def fail(self, index: int, why: str, now: float, jitter: float, *, may_pass: bool) -> None:
        """Note that an agent could not be started, or ended before the ranks started.

        Parameters
        ----------
        index : int
            The agent.
        why : str
            The reason.
        now : float
            The time.
        jitter : float
            A random number from 0 to 1: commands that failed together start again at different times.
        may_pass : bool
            Whether to start it again; if not, the job cannot run.
        """
        host = self._hosts[index]
        host.move("fail")
        host.member, host.failure = None, why
        host.start_at = now + _AGAIN_S * (1 + jitter)
        if not may_pass and not host.problem:
            self.refuse(index, why, now)

    def start_again(self, index: int) -> None:
        """Note that the agent of an earlier job was lost before it spoke: start another now."""
        self._hosts[index].move("fail")

    def start(self, now: float) -> Iterator[int]:
        """Yield the agents whose commands start now; none if agents connect by themselves."""
        if not self._starts:
            return
        starting = sum(host.agent is AgentState.STARTING for host in self._hosts)
        for index, host in enumerate(self._hosts):
            if host.agent is AgentState.DOWN and host.start_at <= now and starting < AT_ONCE:
                starting += 1
                host.move("start")
                yield index

    @property
    def has_problem(self) -> bool:
        """Whether the job cannot run on some host."""
        return self._problem_at < math.inf

    def problem_error(self, now: float) -> LaunchError | None:
        """Return the error of the hosts with problems; None while other hosts have time to show theirs."""
        undecided = any(host.undecided for host in self._hosts)
        if not self.has_problem or (now <= self._problem_at + _OTHERS_S and undecided):
            return None
        return LaunchError(_lines(host for host in self._hosts if host.problem or host.failure))

    def missing_error(self, late: str) -> LaunchError:
        """Return the error of the agents that have not registered; `late` stands for an unknown reason."""
        return LaunchError(_lines((self._hosts[index] for index in self.missing), late))


def _lines(hosts: Iterable[_PoolHost], otherwise: str = "") -> str:
    lines = cut_lines(
        [*hosts],
        MAX_LISTED,
        "hosts",
        lambda each: f"host {each.name}: {each.problem or each.failure or otherwise}",
    )
    return "\n".join(lines)
