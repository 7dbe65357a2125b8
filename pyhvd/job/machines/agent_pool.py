"""The agents of a job: which of them are up, which are to be started, and why hosts cannot have ranks. Pure.

An agent is started by a command, or comes by itself, as a task of Spark does. ::

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
"""As many agents may be starting at the same time."""
# A command that failed for a reason that may pass is started again after so long, or up to twice that.
_AGAIN_S = 0.5
# After the first host has a problem, the others have this long to show theirs.
_OTHERS_S = 2.0


class AgentState(Enum):
    """Where an agent is."""

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
    agent: AgentState = AgentState.DOWN
    start_at: float = -math.inf
    last: str = ""
    problem: str = ""
    ahead: float = 0.0

    def move(self, event: str) -> None:
        """Change the agent's state."""
        self.agent = _MOVES[self.agent, event]

    @property
    def undecided(self) -> bool:
        """Whether this host may still show a problem."""
        return not self.problem and not self.last and self.agent is not AgentState.UP


class Registry:
    """The agents that have registered, of `size` that will."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._members: dict[int, Member] = {}

    def add(self, member: Member) -> bool:
        """Add an agent; return False if a newer attempt has registered, or its index is out of range."""
        known = self._members.get(member.index)
        if not 0 <= member.index < self.size or (known is not None and known.attempt > member.attempt):
            return False
        self._members[member.index] = member
        return True

    def remove(self, member: Member) -> None:
        """Remove an agent that was lost before the ranks started, unless a newer attempt has registered."""
        if self._members.get(member.index) == member:
            del self._members[member.index]

    @property
    def missing(self) -> list[int]:
        """The indices that have not registered."""
        return [index for index in range(self.size) if index not in self._members]

    def groups(self) -> list[list[Member]]:
        """Return the agents of each host, by index; hosts are ordered by their lowest index."""
        groups: dict[str, list[Member]] = {}
        for index in sorted(self._members):
            member = self._members[index]
            groups.setdefault(member.host_hash, []).append(member)
        return list(groups.values())


class AgentPool:
    """The agents of one job, each by its index.

    Parameters
    ----------
    names : sequence of str
        The hosts' names for messages; an agent's host has the agent's index.
    starts : bool
        Whether the agents are started by commands.
    """

    def __init__(self, names: Sequence[str], *, starts: bool) -> None:
        self._hosts = [_PoolHost(name) for name in names]
        self._starts = starts
        self._registry = Registry(len(names))
        self._problem_at = math.inf

    @property
    def names(self) -> list[str]:
        """The hosts' names."""
        return [host.name for host in self._hosts]

    @property
    def missing(self) -> list[int]:
        """The agents that have not registered."""
        return self._registry.missing

    @property
    def up(self) -> list[bool]:
        """Whether each agent is up."""
        return [host.agent is AgentState.UP for host in self._hosts]

    def ahead(self, index: int) -> float:
        """Return by how many seconds a host's clock is ahead."""
        return self._hosts[index].ahead

    def groups(self) -> list[list[Member]]:
        """Return the agents of each host; see :meth:`Registry.groups`."""
        return self._registry.groups()

    def register(self, member: Member) -> bool:
        """Accept an agent, in place of an older attempt of the same index; return False for an older one."""
        accepted = self._registry.add(member)
        if accepted:
            self._hosts[member.index].move("register")
        return accepted

    def remove(self, member: Member) -> None:
        """Note that an agent was lost before the ranks started."""
        self._registry.remove(member)

    def set_clock(self, index: int, ahead: float) -> None:
        """Note by how much a host's clock is ahead."""
        self._hosts[index].ahead = ahead

    def refuse(self, index: int, problem: str, now: float) -> None:
        """Note why the job cannot run on a host."""
        self._hosts[index].problem = problem
        self._problem_at = min(self._problem_at, now)

    def fail(self, index: int, why: str, now: float, jitter: float, *, may_pass: bool) -> None:
        """Note that an agent ended before all have registered.

        Parameters
        ----------
        index : int
            The agent.
        why : str
            The reason.
        now : float
            The time.
        jitter : float
            0 to 1; the hosts' commands are not started again all at once.
        may_pass : bool
            Whether to start it again.
        """
        host = self._hosts[index]
        host.move("fail")
        host.last = why
        host.start_at = now + _AGAIN_S * (1 + jitter)
        if not may_pass and not host.problem:
            self.refuse(index, why, now)

    def start_again(self, index: int) -> None:
        """Note that an agent was lost between two jobs: another one shall be started."""
        self._hosts[index].move("fail")

    def start(self, now: float) -> Iterator[int]:
        """Yield the agents whose commands start now."""
        starting = sum(host.agent is AgentState.STARTING for host in self._hosts) if self._starts else AT_ONCE
        for index, host in enumerate(self._hosts):
            if host.agent is AgentState.DOWN and host.start_at <= now and starting < AT_ONCE:
                starting += 1
                host.move("start")
                yield index

    def problems(self, now: float) -> LaunchError | None:
        """Return the error of hosts with problems, once each host is known to have one or none."""
        undecided = any(host.undecided for host in self._hosts)
        if self._problem_at == math.inf or (now <= self._problem_at + _OTHERS_S and undecided):
            return None
        return LaunchError(_lines(host for host in self._hosts if host.problem or host.last))

    def has_problem(self) -> bool:
        """Return whether the job cannot run on some host."""
        return self._problem_at < math.inf

    def missing_error(self, late: str) -> LaunchError:
        """Return the error of agents that have not registered; `late` is said of those without a reason."""
        return LaunchError(_lines((self._hosts[index] for index in self.missing), late))


def _lines(hosts: Iterable[_PoolHost], otherwise: str = "") -> str:
    lines = cut_lines(
        [*hosts],
        MAX_LISTED,
        "hosts",
        lambda each: f"host {each.name}: {each.problem or each.last or otherwise}",
    )
    return "\n".join(lines)
