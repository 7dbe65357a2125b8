"""Which hosts take part in an elastic job, and when its ranks are started anew. Pure.

Events are calls, with the time in seconds. :meth:`Membership.tick` returns what is to be done. The driver
calls it after each event, and once a second besides. A *generation* is one set of rank processes. ::

    WAITING -- there are places -------> RUNNING
    RUNNING -- the hosts change -------> LEAVING
    RUNNING -- a host is lost ---------> ENDING
    RUNNING -- all ranks have ended ---> WAITING
    LEAVING -- a host is lost ---------> ENDING
    LEAVING -- ranks do not leave -----> ENDING
    LEAVING -- all ranks have ended ---> WAITING
    ENDING --- all ranks have ended ---> WAITING

Rules
-----
1. The driver reports the end of a generation once, after each reachable agent has reaped its ranks. Before
   that it reports what each host holds. It reports nothing of an agent after :class:`EndAgent`.
2. A failure starts the next generation in the same places, and takes along new hosts that are ready.
3. The first generation starts with `start_np` slots. It starts with fewer, but not below `min_np`, if no
   agent is starting and nothing has changed for 3 s. Later generations start with `min_np` slots.
4. Rank 0 is on the host that has had ranks for the longest time without losing its agent.
5. A result with bad lines adds hosts, and takes none away. A result without a host changes nothing.
6. A host that shall go keeps its agent while no other host holds the newest commit. It then gets one rank in
   the next generation, from which the others get the state. With `max_np` 1 it keeps that rank.
7. The loss of a host counts among the failures in a row only if it was lost since the last commit before. So
   the loss of many hosts does not end the job, but a program that brings down its hosts does.
8. At the reset limit only a failure or a drained host ends a generation; then the job ends.
9. A job that is suspended lets its ranks commit and leave, and ends. A job that can be resumed is suspended
   when all its hosts are drained.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import count

from pyhvd.common.text import list_hosts
from pyhvd.job.errors import LaunchError
from pyhvd.job.machines.agent_pool import AT_ONCE, AgentState
from pyhvd.job.machines.machine import Say
from pyhvd.job.machines.member_host import RANK_FAILURES, WINDOW_S, FoundHost
from pyhvd.job.machines.roster import ElasticLimits, Place, Roster, describe_change, describe_size, size_of
from pyhvd.job.spec import ELASTIC_TIMEOUT, RESET_LIMIT, START_TIMEOUT

_IN_A_ROW = 3
"""The job ends after this many failures without a new commit."""
# The least time between two resizes that no host needs.
_RESIZE_S = 10.0
# Time limit for ranks to leave, after a host has made that necessary.
_LEAVE_S = 60.0
# A start with fewer slots than wanted waits until discovery has told nothing new for this time.
_QUIET_S = 3.0
# The same problem of discovery is told again after this time.
_AGAIN_S = 60.0
# A wait for hosts is told if it is longer than this.
_WAITED_S = 0.1
# The most bad lines of one result that are told.
_PROBLEMS_SHOWN = 3


@dataclass(frozen=True)
class StartAgent:
    """Start the agent of a host; the answer is agent_up or agent_lost."""

    host: str


@dataclass(frozen=True)
class EndAgent:
    """End the agent of a host, or its start."""

    host: str


@dataclass(frozen=True)
class StartGeneration:
    """Start ranks in these places, in the order of ranks."""

    number: int
    places: tuple[Place, ...]


@dataclass(frozen=True)
class AskToLeave:
    """Ask all ranks to make room for the generation of this number; if the job `suspends`, for none."""

    number: int
    suspends: bool = False


@dataclass(frozen=True)
class EndGeneration:
    """Kill all ranks; the answer is that the generation has left, or has failed."""


@dataclass(frozen=True)
class GiveUp:
    """The job has failed: end all agents."""

    error: Exception


@dataclass(frozen=True)
class Finish:
    """All ranks have returned: end all agents."""


@dataclass(frozen=True)
class Suspend:
    """All ranks have left, for a later run of the job: end all agents."""


Action = (
    StartAgent | EndAgent | StartGeneration | AskToLeave | EndGeneration | GiveUp | Finish | Suspend | Say
)


class _Stage(Enum):
    WAITING = auto()
    RUNNING = auto()
    LEAVING = auto()
    ENDING = auto()


_MOVES = {
    (_Stage.WAITING, "there are places"): _Stage.RUNNING,
    (_Stage.RUNNING, "the hosts change"): _Stage.LEAVING,
    (_Stage.RUNNING, "a host is lost"): _Stage.ENDING,
    (_Stage.RUNNING, "all ranks have ended"): _Stage.WAITING,
    (_Stage.LEAVING, "a host is lost"): _Stage.ENDING,
    (_Stage.LEAVING, "ranks do not leave"): _Stage.ENDING,
    (_Stage.LEAVING, "all ranks have ended"): _Stage.WAITING,
    (_Stage.ENDING, "all ranks have ended"): _Stage.WAITING,
}
# As many moves are remembered.
_STORY = 100


class Membership:
    """The hosts of one elastic job.

    Parameters
    ----------
    limits : ElasticLimits
        What the user allows.
    now : float
        The time.
    fixed : sequence of FoundHost, optional
        The hosts of a job without a discovery script.
    """

    def __init__(self, limits: ElasticLimits, now: float, fixed: Sequence[FoundHost] | None = None) -> None:
        self._limits = limits
        self._fixed = fixed is not None
        self._roster = Roster(limits, fixed or ())
        self._discovered = False
        self._stage = _Stage.WAITING
        self._moves = deque[str](maxlen=_STORY)
        self._number = limits.first - 1  # of the last generation
        self._places: tuple[Place, ...] = ()  # of the last generation
        self._since = self._news_at = now  # the wait began; hosts were found, or came up
        self._told = False  # whom the job waits for
        self._reason = ""  # of the last generation's end, if it failed
        self._cause: Exception | None = None
        self._leave_by = math.inf
        self._suspending = self._told_to_suspend = False
        self._down_at = math.inf  # since then the ranks do no work
        self._resized_at = -math.inf
        self._failures: list[Exception] = []  # since the newest commit
        self._lost: set[str] = set()  # hosts, since the newest commit
        self._troubles: dict[str, float] = {}
        self._queue: list[Action] = []
        self._end: GiveUp | Finish | Suspend | None = None
        self._over = False
        self._order = count()

    @property
    def number(self) -> int:
        """The number of the last generation that was started; before, one less than the first one's."""
        return self._number

    @property
    def running(self) -> bool:
        """Whether a generation was started that has not ended."""
        return self._stage is not _Stage.WAITING

    @property
    def hosts(self) -> list[str]:
        """The names of all hosts that were found."""
        return [host.name for host in self._roster]

    def story(self) -> str:
        """Return the last changes of stage, a line for each."""
        return "\n".join(self._moves)

    def _move(self, event: str, now: float) -> None:
        before, self._stage = self._stage, _MOVES[self._stage, event]
        self._moves.append(f"{now:.3f} s: {before.name} -> {self._stage.name}: {event}")

    # ---- events of discovery

    def discover(self, hosts: Sequence[FoundHost], now: float, problems: Sequence[str] = ()) -> None:
        """Note a result of discovery, and what is wrong with its bad lines."""
        self._discovered = True
        for problem in problems[:_PROBLEMS_SHOWN]:
            self._warn(f"{problem}; while lines are bad no host is taken away", now)
        if not hosts and not problems:
            self._warn("no host was found; the last good result holds", now)
        if self._roster.discover(hosts, self._placed, now, good=bool(hosts) and not problems):
            self._news_at = now

    def discovery_failed(self, why: str, now: float) -> None:
        """Note that discovery failed: that ends the job only the first time."""
        if self._discovered:
            self._warn(f"{why}; the last good result holds", now)
        else:
            self._give_up(LaunchError(f"host discovery: {why}"))

    def _warn(self, text: str, now: float) -> None:
        self._troubles = {old: at for old, at in self._troubles.items() if now < at + _AGAIN_S}
        if text not in self._troubles:
            self._troubles[text] = now
            self._queue.append(Say(f"pyhvd: host discovery: {text}"))

    # ---- events of agents

    def agent_up(self, host: str, now: float) -> None:
        """Note that a host's agent is up, and can start ranks."""
        known = self._roster[host]
        if known.agent is AgentState.STARTING:
            known.come_up(now)
            self._news_at = now

    def agent_lost(self, host: str, why: str, now: float, jitter: float) -> None:
        """Note that a host's agent is lost, or did not start; if the host has ranks, the generation fails.

        Parameters
        ----------
        host : str
            The host.
        why : str
            The reason.
        now : float
            The time.
        jitter : float
            0 to 1; the hosts' agents are not started again all at once.
        """
        lost = self._lose(host, why, now, jitter)
        if not lost:
            return
        if self._end is None and self._stage in (_Stage.RUNNING, _Stage.LEAVING) and host in self._placed:
            self._move("a host is lost", now)
            self._down_at = now
            self._queue.append(EndGeneration())
            self._fail_host(LaunchError(lost), host, lost)
        else:
            self._queue.append(Say(f"pyhvd: {lost}"))

    def drain(self, host: str, why: str = "") -> bool:
        """Note that a host shall go, without a loss of steps; it stays out until it is found anew.

        Returns
        -------
        bool
            Whether it is one of the job's hosts.
        """
        known = self._roster.get(host)
        if known is None:
            names = list_hosts(self.hosts) or "none"
            self._queue.append(
                Say(f"pyhvd: cannot drain host {host}: it is none of the job's hosts: {names}")
            )
        elif not known.drained:
            known.drained = True
            self._queue.append(Say(f"pyhvd: host {host} is drained{why and ': ' + why}"))
        return known is not None

    def suspend(self, why: str) -> None:
        """Let the ranks commit and leave; the job ends then."""
        if not self._suspending:
            self._suspending = True
            self._queue.append(Say(f"pyhvd: {why}: the ranks leave at their next commit or check"))

    def _lose(self, host: str, why: str, now: float, jitter: float) -> str:
        """Leave a host out; return a text that says why and for how long, empty if it had no agent."""
        known = self._roster[host]
        if known.agent is AgentState.DOWN:
            return ""
        known.stop()
        text = f"host {host}: {why}"
        if known.drained:
            return text
        known.put_aside(why, self._limits.cooldown, now, jitter)
        return f"{text}; it is left out {known.describe_aside(now)}"

    # ---- events of the generation

    def committed(self, commits: Mapping[str, int], now: float) -> None:
        """Note the number of the newest commit that each host's agent holds."""
        for name, number in commits.items():
            host = self._roster[name]
            if host.seniority is not None:  # else its agent was lost, with what it held
                host.commit = number
        newest = max(commits.values(), default=0)
        if newest > self._roster.newest:
            self._roster.newest = newest
            self._failures.clear()
            self._lost.clear()
            for host in self._roster:
                host.progress(now)

    def rolled_back(self, number: int) -> None:
        """Note that all holders of newer commits are lost, so that the job goes on from this one."""
        self._roster.newest = min(self._roster.newest, number)
        for host in self._roster:
            host.commit = min(host.commit, number)

    def rank_failed(self, cause: Exception, host: str, now: float, jitter: float) -> None:
        """Note that the generation failed, because of a rank on this host; empty if no rank is the cause."""
        if self._stage in (_Stage.RUNNING, _Stage.LEAVING):
            self._fail(cause, _in_one_line(cause))
            known = self._roster.get(host)
            if (
                known is not None
                and known.agent is AgentState.UP
                and self._limits.leaves_out
                and known.fail_rank(now)
                and self._roster.is_dispensable(known, now)
            ):
                why = f"{RANK_FAILURES} ranks failed there within {WINDOW_S / 60:g} min"
                known.put_aside(why, self._limits.cooldown, now, jitter)
                self._reason += f"; host {host} is left out {known.describe_aside(now)}: {why}"
        self._stop(now)

    def host_failed(self, cause: Exception, host: str, why: str, now: float, jitter: float) -> None:
        """Note that the generation failed, because a host was lost; see :meth:`agent_lost`."""
        lost = self._lose(host, why, now, jitter) or f"host {host}: {why}"
        if self._stage in (_Stage.RUNNING, _Stage.LEAVING):
            self._fail_host(cause, host, lost)
        self._stop(now)

    def ranks_parted(self, error: Exception, now: float) -> None:
        """Note that ranks have returned while others went on: the next generation's would do so, too."""
        self._give_up(error)
        self._stop(now)

    def generation_over(self, now: float, *, done: bool) -> None:
        """Note that all ranks have returned; if not `done`, that they have left, as asked, or were killed."""
        if not done:
            self._stop(now)
        elif self.running and self._end is None:
            self._end = Finish()

    def _fail_host(self, cause: Exception, host: str, reason: str) -> None:
        """Note the loss of a host with ranks; see rule 7."""
        self._fail(cause, reason, counts=host in self._lost)
        self._lost.add(host)

    def _fail(self, cause: Exception, reason: str, *, counts: bool = True) -> None:
        self._cause, self._reason = cause, reason
        if counts:
            self._failures.append(cause)
        if len(self._failures) >= _IN_A_ROW:
            self._give_up(self._failures[0])

    def _stop(self, now: float) -> None:
        # It may have ended for the reason for which it was to be ended.
        self._queue = [action for action in self._queue if not isinstance(action, EndGeneration)]
        if self.running:
            self._move("all ranks have ended", now)
            self._since, self._told = now, False
            self._leave_by, self._down_at = math.inf, min(self._down_at, now)

    def _give_up(self, error: Exception) -> None:
        self._end = self._end or GiveUp(error)

    # ---- decisions

    def tick(self, now: float) -> list[Action]:
        """Return what is to be done at this time; the last action is GiveUp, Finish or Suspend."""
        if self._over:
            return []
        actions: list[Action] = []
        if self._end is None:
            actions += self._advance(now) if self.running else self._wait(now)
        if self._end is None:
            actions += [*self._end_agents(now), *self._start_agents(now)]
        else:
            self._over = True
            actions.append(self._end)
        said, self._queue = self._queue, []
        return [*said, *actions]

    def _wait(self, now: float) -> Iterator[Action]:
        """Start the next generation, if there are enough slots and restarts."""
        limits = self._limits
        if self._suspends:
            self._end = Suspend()
            return
        if self._is_at_limit:
            text = f"the ranks were started again {self._number - limits.first} times, as often as"
            text += f" {limits.name_of(RESET_LIMIT)} allows"
            yield Say(f"pyhvd: {text}; last: {self._reason or 'the hosts have changed'}")
            self._give_up(self._cause or LaunchError(f"{text}, and the hosts have changed"))
            return
        patience, option = limits.elastic_timeout, ELASTIC_TIMEOUT
        if self._number < limits.first and limits.start_timeout is not None:
            patience, option = limits.start_timeout, START_TIMEOUT
        late = now >= self._since + patience
        places = self._roster.plan(now, {})
        if places and (late or self._may_start(places, now)):
            yield from self._start(places, now)
        elif late or (self._fixed and self._roster.is_hopeless()):
            waited = f" after {patience:g} s ({limits.name_of(option)})" if late else ""
            self._give_up(LaunchError(f"too few hosts{waited}: {self._roster.describe_missing(now)}"))
        elif not self._told and (self._number >= limits.first or now >= self._since + _QUIET_S):
            self._told = True
            missing = self._roster.describe_missing(now).replace("\n", "; ")
            yield Say(f"pyhvd: waiting up to {patience:g} s for hosts: {missing}")

    def _may_start(self, places: tuple[Place, ...], now: float) -> bool:
        """Return whether the ranks start in these places; see rule 3."""
        if self._number >= self._limits.first or size_of(places) >= self._limits.start_np:
            return True
        starting = any(host.agent is AgentState.STARTING or host.can_start(now) for host in self._roster)
        return not starting and now >= self._news_at + _QUIET_S

    def _start(self, places: tuple[Place, ...], now: float) -> Iterator[Action]:
        self._number += 1
        if self._number > self._limits.first:
            reason = self._reason or describe_change(self._places, places)
            begin = f"commit {self._roster.newest}" if self._roster.newest else "the beginning"
            waited = now - self._down_at
            yield Say(
                f"pyhvd: generation {self._number}: {describe_size(places)}, from {begin}"
                f"{f', after {waited:.1f} s' if waited >= _WAITED_S else ''}: {reason}"
            )
        elif self._number:
            yield Say(f"pyhvd: generation {self._number}: {describe_size(places)}: the job is resumed")
        elif size_of(places) < self._limits.start_np:
            yield Say(f"pyhvd: {describe_size(places)} to begin with, of {self._limits.start_np}")
        self._move("there are places", now)
        self._places, self._down_at = places, math.inf
        self._reason, self._cause = "", None
        for place in places:
            host = self._roster[place.host]
            host.seniority = next(self._order) if host.seniority is None else host.seniority
        yield StartGeneration(self._number, places)

    def _advance(self, now: float) -> Iterator[Action]:
        """Ask the ranks to leave, if the next generation would differ; kill them if they must and do not."""
        if self._stage is _Stage.ENDING:
            return
        needed = self._suspends or self._is_needed(self._roster.plan(now, {}), now)
        may_grow = now >= self._resized_at + _RESIZE_S and not self._is_at_limit
        grows = may_grow and size_of(self._roster.plan(now, self._placed)) > size_of(self._places)
        if self._stage is _Stage.RUNNING and (needed or grows):
            self._move("the hosts change", now)
            self._resized_at = self._resized_at if needed else now
            yield self._ask_to_leave()
        if self._stage is _Stage.LEAVING:
            if self._suspends and not self._told_to_suspend:
                yield self._ask_to_leave()
            self._leave_by = min(self._leave_by, now + _LEAVE_S) if needed else math.inf
            if now >= self._leave_by:
                self._move("ranks do not leave", now)
                self._down_at = now
                yield EndGeneration()

    def _is_needed(self, wanted: Sequence[Place], now: float) -> bool:
        """Return whether a host needs that its ranks leave, for what would be started next; see rule 8."""
        slots = {place.host: place.slots for place in wanted}
        for place in self._places:
            host = self._roster[place.host]
            other = host.leaving(now) or host.slots < place.slots
            if slots.get(host.name, 0) < place.slots and (host.drained or (other and not self._is_at_limit)):
                return True
        return False

    def _ask_to_leave(self) -> AskToLeave:
        self._told_to_suspend = self._suspends
        return AskToLeave(self._number + 1, self._suspends)

    @property
    def _suspends(self) -> bool:
        """Whether no generation follows; see rule 9."""
        hosts = list(self._roster)
        drained = bool(hosts) and all(host.drained for host in hosts)
        return self._suspending or (self._limits.resumable and drained)

    @property
    def _is_at_limit(self) -> bool:
        limit = self._limits.reset_limit
        return limit is not None and self._number - self._limits.first >= limit

    @property
    def _placed(self) -> dict[str, int]:
        """The ranks of each host, if a generation runs."""
        return {place.host: place.slots for place in self._places} if self.running else {}

    def _end_agents(self, now: float) -> Iterator[Action]:
        """End the agents of hosts that shall go, and are not needed."""
        staying = self._roster.staying(now, self._placed)
        used = [*staying, self._roster.last_holder(staying)]
        for host in self._roster:
            needed = host in used or host.name in self._placed
            if host.agent is not AgentState.DOWN and host.leaving(now) and not needed:
                host.stop()
                yield EndAgent(host.name)

    def _start_agents(self, now: float) -> Iterator[Action]:
        starting = sum(host.agent is AgentState.STARTING for host in self._roster)
        for host in self._roster:
            if host.can_start(now) and starting < AT_ONCE:
                starting += 1
                host.start(next(self._order))
                yield StartAgent(host.name)


def _in_one_line(error: Exception) -> str:
    """Return an error's text without the program's name; of a traceback only the exception's first line."""
    first, *more = (str(error) or type(error).__name__).splitlines()
    text = f"{first} {_exception_in(more)}" if more and first.endswith(":") else first
    return text.removeprefix("pyhvd: ")


def _exception_in(lines: Sequence[str]) -> str:
    """Return the line that follows the last traceback; the last line if there is none."""
    begins = max((number for number, line in enumerate(lines) if line.startswith("Traceback")), default=None)
    frames = [] if begins is None else lines[begins + 1 :]
    return next((line for line in frames if not line.startswith(" ")), lines[-1].strip())
