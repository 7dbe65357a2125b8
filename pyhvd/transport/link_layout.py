"""Which ranks of different hosts connect; pure.

1. A slice of the data has a rail between each pair of hosts. There are as many slices as ranks on the largest
   host; slice k of R belongs to local rank ``k * L // R`` of a host with L ranks.
2. Agreement connections are those of local ranks 0, between the neighbours of a tree: see :func:`parents_of`.
3. Control connections are those of local ranks 0, between the neighbours of another tree: see
   :mod:`pyhvd.transport.tree`. There, too, local rank 0 is the lowest rank of its host.

Of two hosts the lower one accepts.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from math import isqrt
from typing import NamedTuple

from pyhvd.transport.tree import Tree

FLAT = 8
"""Up to so many hosts all agree with each other directly, without a tree."""


class Kind(IntEnum):
    """Whether a connection carries a slice of the data, the agreement of two hosts, or messages."""

    RAIL = 0
    AGREEMENT = 1
    CONTROL = 2


class LinkRole(NamedTuple):
    """Which connection this is: its kind, slice (0 except for a rail), and hosts; the lower host accepts."""

    kind: Kind
    slice: int
    low: int
    high: int


def hosts_in_order(hosts: Sequence[int]) -> list[list[int]]:
    """Return the set ranks of each host; hosts are in the order of their lowest ranks.

    ``hosts`` has, by set rank, any number that tells the hosts apart.
    """
    by_host: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    return list(by_host.values())


def parents_of(hosts: int) -> list[int]:
    """Return the parent of each host in the tree in which hosts agree; -1: the host is a top.

    The tops are the first hosts, and have connections to each other. Every other host has one to its parent.
    Up to ``FLAT`` hosts all are tops. Of more hosts as many are tops as the square root of their number, and
    each has as many others below it: so 64 hosts have 8 tops, and a message passes 3 connections at most.
    """
    tops = hosts if hosts <= FLAT else isqrt(hosts - 1) + 1
    others = hosts - tops
    return [-1] * tops + [number * tops // others for number in range(others)]


class Layout:
    """One rank's place among the hosts, and the connections that it has.

    Parameters
    ----------
    rank : int
        The rank.
    nodes : sequence of int
        The host of each rank, as any number; hosts are numbered anew in the order of their lowest ranks.
    agreement : bool
        Whether there are agreement and control connections: the ranks are all ranks of the job.

    Attributes
    ----------
    members : list of list of int
        The ranks of each host.
    hosts, host : int
        Number of hosts, and this rank's.
    local_size, local_rank : int
        Number of ranks on this host, and this rank's number among them.
    leader : int
        The rank that is local rank 0 of this host.
    slices : int
        Number of slices.
    neighbours : list of int
        The hosts to which this one has agreement connections.
    peers : dict
        The peer's rank, by the role of each connection.
    accepts : set of LinkRole
        The connections that peers open.
    """

    def __init__(self, rank: int, nodes: Sequence[int], *, agreement: bool) -> None:
        self.members = hosts_in_order(nodes)
        local = next(ranks for ranks in self.members if rank in ranks)
        self.hosts = len(self.members)
        self.host = self.members.index(local)
        self.local_size = len(local)
        self.local_rank = local.index(rank)
        self.leader = local[0]
        self.slices = max(map(len, self.members))
        others = [g for g in range(self.hosts) if g != self.host]
        parents = parents_of(self.hosts)
        self.neighbours = [g for g in others if agreement and self._are_neighbours(parents, g)]
        owned = [(Kind.RAIL, k, others) for k in range(self.slices) if self._owner(k, self.host) == rank]
        if self.local_rank == 0:
            owned.append((Kind.AGREEMENT, 0, self.neighbours))
            owned.append((Kind.CONTROL, 0, self._hosts_beside() if agreement else []))
        self.peers = {
            LinkRole(kind, k, min(g, self.host), max(g, self.host)): self._owner(k, g)
            for kind, k, there in owned
            for g in there
        }
        self.accepts = {role for role in self.peers if role.low == self.host}

    def _are_neighbours(self, parents: Sequence[int], other: int) -> bool:
        here, there = parents[self.host], parents[other]
        return here == there == -1 or here == other or there == self.host

    def _hosts_beside(self) -> list[int]:
        """Return the hosts whose local ranks 0 are beside this host's in the tree of messages."""
        host_of = {rank: g for g, ranks in enumerate(self.members) for rank in ranks}
        leaders = [self.members[host_of[rank]][0] for rank in range(len(host_of))]
        neighbours = Tree.of(self.leader, leaders).neighbours
        return [host_of[rank] for rank in neighbours if host_of[rank] != self.host]

    def _owner(self, k: int, host: int) -> int:
        local = self.members[host]
        return local[k * len(local) // self.slices]
