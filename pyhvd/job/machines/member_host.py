"""What an elastic job knows of one host, and how long a host that failed is left out. Pure.

Time is an argument, in seconds.

Invariants
----------
1. A host is gone after two good results of the discovery script in a row without it. It is settled after two
   with it.
2. A host that has lost its agent keeps neither its seniority nor the commit that its agent held.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pyhvd.job.machines.agent_pool import AgentState

IN_A_ROW = 2
"""The number of good results in a row that decides whether a host is gone, is settled, or has other slots."""
RANK_FAILURES = 3
"""A host with this many failures of ranks within `WINDOW_S` is left out."""
WINDOW_S = 600.0
"""The window of rank failures. After progress for as long, a host's failures are forgotten."""
# Powers beyond this exceed every upper limit.
_MOST_DOUBLINGS = 20


@dataclass(frozen=True, slots=True)
class FoundHost:
    """A host that the discovery script has printed, or that the user has given."""

    name: str
    slots: int


@dataclass(slots=True, eq=False)
class MemberHost:
    """One host.

    Attributes
    ----------
    slots : int
        The largest number of ranks on it.
    present, absent : int
        In how many good results in a row it was, or was not.
    agent : AgentState
        Its agent.
    drained : bool
        Whether it shall go.
    aside_until : float
        No rank and no agent starts there before.
    why : str
        Why it is left out, or was last.
    found : int
        The order in which agents were started.
    seniority : int or None
        The order in which hosts got their first ranks; None if it had none.
    commit : int
        The newest commit that its agent holds; 0 if it holds none.
    """

    name: str
    slots: int
    present: int = 1
    absent: int = 0
    agent: AgentState = AgentState.DOWN
    drained: bool = False
    aside_until: float = -math.inf
    why: str = ""
    found: int = 0
    seniority: int | None = None
    commit: int = 0
    _printed: int = 0  # other slots, as last printed
    _times_aside: int = 0
    _up_at: float = math.inf
    _rank_failures: list[float] = field(default_factory=list)

    @property
    def gone(self) -> bool:
        """Whether the discovery script no longer prints it."""
        return self.absent >= IN_A_ROW

    @property
    def settled(self) -> bool:
        """Whether the discovery script prints it each time."""
        return self.present >= IN_A_ROW

    @property
    def age(self) -> tuple[float, int]:
        """The key by which hosts are sorted: the oldest comes first."""
        return (math.inf if self.seniority is None else self.seniority, self.found)

    def leaving(self, now: float) -> bool:
        """Return whether it gets no ranks."""
        return self.drained or self.gone or now < self.aside_until

    def leaves_by_script_alone(self, now: float) -> bool:
        """Return whether it gets no ranks only because the discovery script no longer prints it."""
        return self.gone and not self.drained and now >= self.aside_until

    def can_start(self, now: float) -> bool:
        """Return whether its agent is to be started."""
        return self.agent is AgentState.DOWN and not self.leaving(now)

    def find(self, slots: int) -> int:
        """Note that a result has it; return the slots that it is to have."""
        if self.gone and self.agent is AgentState.DOWN:
            self.drained = False  # it was taken away, and is back
        self.present, self.absent = (1 if self.gone else self.present + 1), 0
        before, self._printed = self._printed, slots
        return slots if before == slots or self.agent is AgentState.DOWN else self.slots

    def miss(self) -> None:
        """Note that a good result does not have it."""
        self.present, self.absent = 0, self.absent + 1
        self._printed = 0

    def start(self, found: int) -> None:
        """Note that its agent is being started."""
        self.agent, self.found = AgentState.STARTING, found

    def come_up(self, now: float) -> None:
        """Note that its agent is up."""
        self.agent, self._up_at = AgentState.UP, now

    def stop(self) -> None:
        """Note that its agent is down, or is being ended."""
        self.agent, self.seniority, self.commit, self._up_at = AgentState.DOWN, None, 0, math.inf

    def put_aside(self, why: str, cooldown: tuple[float, float] | None, now: float, jitter: float) -> None:
        """Leave it out for a time that doubles with each failure; None: for ever."""
        self.why = why
        self._rank_failures.clear()
        if cooldown is None:
            self.aside_until = math.inf
            return
        lower, upper = cooldown
        wait = lower * 2.0 ** min(self._times_aside, _MOST_DOUBLINGS) + jitter * lower
        self._times_aside += 1
        self.aside_until = now + min(wait, upper)

    def fail_rank(self, now: float) -> bool:
        """Note that one of its ranks failed; return whether too many have."""
        self._rank_failures = [at for at in self._rank_failures if now < at + WINDOW_S] + [now]
        return len(self._rank_failures) >= RANK_FAILURES

    def progress(self, now: float) -> None:
        """Note that the job goes forward: after long enough, earlier failures of this host are forgotten."""
        if now >= self._up_at + WINDOW_S:
            self._times_aside = 0

    def describe(self, now: float) -> str:
        """Return why this host has no ranks, for messages."""
        if self.drained:
            return "drained"
        if self.gone:
            return "no longer found by host discovery"
        if now < self.aside_until:
            return f"left out {self.describe_aside(now)}: {self.why}"
        if self.agent is AgentState.UP:
            return f"up, {self.slots} {'slot' if self.slots == 1 else 'slots'}"
        return f"its agent is starting{f', after: {self.why}' if self.why else ''}"

    def describe_aside(self, now: float) -> str:
        """Return for how long this host is left out."""
        return "for ever" if self.aside_until == math.inf else f"for {self.aside_until - now:.0f} s"
