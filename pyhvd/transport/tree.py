"""The tree in which control messages travel: requests up to rank 0, response lists down from it. Pure.

1. The lowest rank of a host is its leader. The host's other ranks are the leader's children.
2. Leaders are numbered in rank order, so rank 0 is leader 0. The children of leader n are also the leaders
   ``FAN_OUT`` n + 1 to ``FAN_OUT`` n + ``FAN_OUT``.

So up to ``FAN_OUT`` + 1 hosts all leaders send to rank 0, and on one host all ranks do. A rank receives lists
and requests from its parent and its children only. Out-of-band messages do not use the tree: they pass
between rank 0 and any rank directly, also while a leader is stuck.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FAN_OUT = 16
"""Most leaders below a leader.

With 8 the leaders on the longest path of 500 hosts would work 29 instead of 43 ms in the first step of 161
tensors, and 0.5 instead of 0.8 ms in a cached one. But with 10 to 17 hosts a message would pass one leader
more.
"""


@dataclass(frozen=True, slots=True)
class Tree:
    """A rank's place in the tree.

    Attributes
    ----------
    rank : int
        This rank.
    parent : int
        The rank above it; -1 on rank 0.
    children : dict of int to int
        By rank directly below it, that rank and all ranks below that, as a bit vector.
    leaders : frozenset of int
        The children with ranks below them: they merge requests, and pass lists on.
    """

    rank: int
    parent: int
    children: dict[int, int]
    leaders: frozenset[int] = frozenset()

    @classmethod
    def of(cls, rank: int, hosts: Sequence[int], fan_out: int = FAN_OUT) -> Tree:
        """Return the place of a rank; ``hosts`` has, by rank, the lowest rank of its host."""
        if hosts[rank] != rank:
            return cls(rank, hosts[rank], {})
        here: dict[int, int] = {}
        for each, leader in enumerate(hosts):
            here[leader] = here.get(leader, 0) | 1 << each
        leaders = list(here)
        number = leaders.index(rank)
        children = {each: 1 << each for each, leader in enumerate(hosts) if leader == rank != each}
        for child in range(fan_out * number + 1, min(fan_out * (number + 1) + 1, len(leaders))):
            first, last, below = child, child, 0  # one level of the branch after the other
            while first < len(leaders):
                for each in leaders[first : last + 1]:
                    below |= here[each]
                first, last = fan_out * first + 1, fan_out * (last + 1)
            children[leaders[child]] = below
        merging = frozenset(child for child, ranks in children.items() if ranks != 1 << child)
        return cls(rank, leaders[(number - 1) // fan_out] if number else -1, children, merging)

    @property
    def branch(self) -> int:
        """This rank and all ranks below it, as a bit vector."""
        return sum(self.children.values(), 1 << self.rank)

    @property
    def neighbours(self) -> list[int]:
        """The ranks directly below and above."""
        return [*self.children, *([self.parent] if self.parent >= 0 else [])]

    @property
    def merges(self) -> bool:
        """Whether this rank merges the requests of several ranks for the rank above it."""
        return self.parent >= 0 and bool(self.children)
