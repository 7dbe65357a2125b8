"""The hosts of an elastic job, and the places that the next generation of ranks gets. Pure.

Rules
-----
1. A running generation grows only by hosts that are settled, see :mod:`pyhvd.job.machines.member_host`.
2. Hosts that the discovery script no longer prints keep their ranks if there are too few slots without them.
3. A host that shall go, and alone holds the newest commit, is the *last holder*: it gets one rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pyhvd.common.text import MAX_LISTED, cut_lines, describe_hosts
from pyhvd.job.machines.agent_pool import AgentState
from pyhvd.job.machines.member_host import IN_A_ROW, FoundHost, MemberHost
from pyhvd.job.spec import ELASTIC_TIMEOUT, NameOf, flag_of


@dataclass(frozen=True)
class ElasticLimits:
    """What the user allows.

    Attributes
    ----------
    min_np, max_np : int, int or None
        The fewest and the most ranks.
    start_np : int
        The number of ranks wanted to begin.
    reset_limit : int or None
        How often the ranks may be started again.
    elastic_timeout : float
        How long the job waits for `min_np` slots, in seconds.
    cooldown : (float, float) or None
        For how long a host that failed is left out: the first time, and at most. None: for ever.
    leaves_out : bool
        Whether a host is left out whose ranks fail again and again.
    start_timeout : float or None
        How long the first generation waits for `min_np` slots; None: `elastic_timeout`.
    first : int
        The number of the first generation: more than 0 if an earlier run of the job had some.
    resumable : bool
        Whether the job is suspended, for a later run, when all its hosts are drained.
    name_of : NameOf
        The names of options in errors.
    """

    min_np: int
    max_np: int | None
    start_np: int
    reset_limit: int | None = None
    elastic_timeout: float = ELASTIC_TIMEOUT.default
    cooldown: tuple[float, float] | None = (10.0, 300.0)
    leaves_out: bool = True
    start_timeout: float | None = None
    first: int = 0
    resumable: bool = False
    name_of: NameOf = flag_of

    def __post_init__(self) -> None:
        """Check the order of the numbers."""
        most = self.start_np if self.max_np is None else self.max_np
        if not 1 <= self.min_np <= self.start_np <= most:
            raise ValueError(
                f"min_np {self.min_np}, start_np {self.start_np}, max_np {self.max_np}: expected"
                " 1 <= min_np <= start_np <= max_np"
            )


@dataclass(frozen=True, slots=True)
class Place:
    """The ranks of one host in one generation."""

    host: str
    slots: int


class Roster:
    """All hosts that were found, also those that are gone; in the order in which they were first found.

    Parameters
    ----------
    limits : ElasticLimits
        What the user allows.
    hosts : sequence of FoundHost
        The hosts that the user gave.
    """

    def __init__(self, limits: ElasticLimits, hosts: Sequence[FoundHost]) -> None:
        self._limits = limits
        self._hosts = {host.name: MemberHost(host.name, host.slots, present=IN_A_ROW) for host in hosts}
        self.newest = 0
        """The number of the newest commit; 0 if there is none."""

    def __iter__(self) -> Iterator[MemberHost]:
        return iter(self._hosts.values())

    def __getitem__(self, name: str) -> MemberHost:
        return self._hosts[name]

    def get(self, name: str) -> MemberHost | None:
        """Return a host; None if it was never found."""
        return self._hosts.get(name)

    def discover(
        self, hosts: Sequence[FoundHost], placed: Mapping[str, int], now: float, *, good: bool
    ) -> bool:
        """Note a result of the discovery script; return whether it has a new host.

        Parameters
        ----------
        hosts : sequence of FoundHost
            The hosts; of a name that is given twice the last one counts.
        placed : mapping of str to int
            The ranks of each host, as :meth:`staying` takes them.
        now : float
            The time.
        good : bool
            Whether hosts that are not in the result are missing.
        """
        new = False
        slots = {host.name: host.slots for host in hosts}
        for name in slots:
            known = self._hosts.get(name)
            new = new or known is None or known.gone
            if known is None:
                self._hosts[name] = MemberHost(name, slots[name])
            else:
                self._resize(known, known.find(slots[name]), placed, now)
        for host in self:
            if good and host.name not in slots:
                host.miss()
        return new

    def _resize(self, host: MemberHost, slots: int, placed: Mapping[str, int], now: float) -> None:
        """Give a host other slots, unless that alone would leave too few."""
        others = sum(each.slots for each in self.staying(now, placed) if each is not host)
        if slots > host.slots or host.name not in placed or others + slots >= self._limits.min_np:
            host.slots = slots

    def staying(self, now: float, placed: Mapping[str, int]) -> list[MemberHost]:
        """Return the hosts that the next generation may use, the oldest first.

        Parameters
        ----------
        now : float
            The time.
        placed : mapping of str to int
            The ranks of each host, if a generation runs; else empty.
        """
        up = [host for host in self._up() if not placed or host.settled or host.name in placed or host.gone]
        stay = [host for host in up if not host.leaving(now)]
        if sum(host.slots for host in stay) < self._limits.min_np:
            return [
                host
                for host in up
                if not host.leaving(now) or (host.seniority is not None and host.leaves_by_script_alone(now))
            ]
        return stay

    def last_holder(self, staying: Sequence[MemberHost]) -> MemberHost | None:
        """Return the host that shall go but is needed for its state; None if there is none."""
        newest = max((host.commit for host in self._up()), default=0)  # holders of a newer one may be lost
        if not newest or any(host.commit == newest for host in staying):
            return None
        return next(host for host in self._up() if host.commit == newest)

    def plan(self, now: float, placed: Mapping[str, int]) -> tuple[Place, ...]:
        """Return the places of the next generation, in the order of ranks; empty if there are too few slots.

        The parameters are those of :meth:`staying`.
        """
        staying = self.staying(now, placed)
        if sum(host.slots for host in staying) < self._limits.min_np:
            return ()
        holder = self.last_holder(staying)
        left = math.inf if self._limits.max_np is None else self._limits.max_np
        left -= holder is not None
        places = []
        for host in self._up():
            if host is holder:
                places.append(Place(host.name, 1))
            elif host in staying and left > 0:
                taken = int(min(host.slots, left))
                left -= taken
                places.append(Place(host.name, taken))
        return tuple(places)

    def is_dispensable(self, host: MemberHost, now: float) -> bool:
        """Return whether there are enough slots without a host."""
        others = (each for each in self._up() if each is not host and not each.leaving(now))
        return sum(each.slots for each in others) >= self._limits.min_np

    def is_hopeless(self) -> bool:
        """Return whether there will be too few slots, if no further host is found."""
        able = (host for host in self if not host.drained and host.aside_until < math.inf)
        return sum(host.slots for host in able) < self._limits.min_np

    def describe_missing(self, now: float) -> str:
        """Return how many slots are up, and a line for each host without ranks."""
        up = [host for host in self._up() if not host.leaving(now)]
        slots = sum(host.slots for host in up)
        head = f"{slots} of at least {self._limits.min_np} slots are up"
        others = [host for host in self if host not in up]
        lines = cut_lines(others, MAX_LISTED, "hosts", lambda host: f"host {host.name}: {host.describe(now)}")
        return "\n".join([head, *lines] if lines else [f"{head}; no other host was found"])

    def _up(self) -> list[MemberHost]:
        return sorted((host for host in self if host.agent is AgentState.UP), key=lambda host: host.age)


def size_of(places: Sequence[Place]) -> int:
    """Return the number of ranks."""
    return sum(place.slots for place in places)


def describe_size(places: Sequence[Place]) -> str:
    """Return ``"4 ranks on 2 hosts"``."""
    ranks, hosts = size_of(places), len(places)
    return f"{ranks} {'rank' if ranks == 1 else 'ranks'} on {hosts} {'host' if hosts == 1 else 'hosts'}"


def describe_change(before: Sequence[Place], after: Sequence[Place]) -> str:
    """Return which hosts are new, and which have left."""
    old, new = {place.host for place in before}, {place.host for place in after}
    added = [place.host for place in after if place.host not in old]
    left = [place.host for place in before if place.host not in new]
    texts = [f"{describe_hosts(left)} left"] if left else []
    texts += [f"{describe_hosts(added)} joined"] if added else []
    return ", ".join(texts) or ("the hosts have other slots" if before != after else "the hosts are the same")
