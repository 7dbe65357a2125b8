"""Which ranks each agent owns. Pure.

Ranks are numbered host by host, so that ranks that share memory have consecutive numbers. The host of agent 0
comes first, so that rank 0 runs there. Ranks of one host follow the indices of their agents.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from pyhvd.job.messages import Member


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """The agent that owns a rank, by its index, and the rank's numbers."""

    rank: int
    index: int
    host: str
    local_rank: int
    local_size: int


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


def assign(owners: Iterable[Member]) -> list[RankPlacement]:
    """Return the placements of ranks whose agents are given in rank order, each as often as it has ranks."""
    ranks = list(owners)
    sizes = Counter(member.host_hash for member in ranks)
    placed: Counter[str] = Counter()
    placements: list[RankPlacement] = []
    for rank, member in enumerate(ranks):
        local_rank = placed[member.host_hash]
        placed[member.host_hash] += 1
        placements.append(RankPlacement(rank, member.index, member.host, local_rank, sizes[member.host_hash]))
    return placements
