"""Which bytes of a collective over several hosts go where; pure.

A collective is one or more *moves* (``move_across.c``). A move has lanes. A lane is a sequence of bytes from
the ranks of one host, and goes to one host, to all hosts, or to ranks of the same host. There are two kinds:

1. In a *gather* each host with bytes has one lane: its ranks' blocks in their order. It goes to all hosts.
2. In a *trade* each pair of hosts has one lane in each direction. A move has the lanes of some distances d:
   host h sends to host h + d and receives from host h - d, modulo the number of hosts.

A slot has room for a few lanes; with more of them, a collective has several moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

ALIGNED = 16
"""Boundaries of slices are multiples of this number of bytes; ``move_across.c`` has the same."""
LEAST = 16384
"""A slice has so much room in each lane of a chunk, if the chunk is large enough."""


class Move(NamedTuple):
    """The arguments of :meth:`pyhvd.native.shared_memory.Window.move`."""

    sources: Ints
    targets: Ints
    lanes: Ints
    out: Ints
    into: Ints
    single: bool
    room: int
    chunks: int


class Portions(NamedTuple):
    """What one rank reduces of each host's block, for its host.

    Attributes
    ----------
    first, size : int64 arrays
        By host: the first byte within the block, and the number of bytes.
    """

    first: Ints
    size: Ints


def as_parts(lane: Ints | int, offset: Ints | int, size: Ints, address: Ints | int) -> Ints:
    """Return the rows of parts, without the empty ones and those of no lane (-1)."""
    columns = np.broadcast_arrays(lane, offset, size, address)
    rows = np.stack([np.asarray(each, np.int64).reshape(-1) for each in columns], axis=1)
    return rows[(rows[:, 2] > 0) & (rows[:, 0] >= 0)]


def before(sizes: Ints) -> Ints:
    """Return where blocks begin that lie one behind the other, along the last axis."""
    starts: Ints = np.cumsum(sizes, axis=-1) - sizes
    return starts


class MoveLayout:
    """Lays out the collectives of a process set, as one of its ranks sees them.

    Parameters
    ----------
    hosts : sequence of sequence of int
        The set ranks of each host.
    rank : int
        This rank.

    Attributes
    ----------
    order : int64 array
        The set ranks, host by host.
    here, local, ranks : int
        This rank's host, its number there, and the number of ranks there.
    slices : int
        Number of slices of a chunk.
    """

    def __init__(self, hosts: Sequence[Sequence[int]], rank: int) -> None:
        sizes = np.array([len(each) for each in hosts], np.int64)
        self.order = np.array([each for ranks in hosts for each in ranks], np.int64)
        self._hosts = len(hosts)
        self._firsts = before(sizes)
        self._host_of = np.repeat(np.arange(self._hosts), sizes)
        self.slices = int(sizes.max())
        self._owned = -(-self.slices // int(sizes.min()))  # slices of one rank, at most
        self._place = int(np.flatnonzero(self.order == rank)[0])
        self.here = int(self._host_of[self._place])
        self.local = self._place - int(self._firsts[self.here])
        self.ranks = int(sizes[self.here])

    # -- moves ---------------------------------------------------------------------------------------

    def gather(self, send: int, recv: int, counts: Sequence[int] | Ints, chunk: int) -> Iterator[Move]:
        """Yield the moves that give every rank rank r's ``counts[r]`` bytes; the own ones are in place."""
        by_rank = np.asarray(counts, np.int64)
        sizes = by_rank[self.order]
        offsets, totals = self._within_hosts(sizes), self._per_host(sizes)
        into = recv + before(by_rank)[self.order]
        others = np.where(np.arange(len(sizes)) == self._place, 0, sizes)
        for group in _groups(np.flatnonzero(totals), max(chunk // (LEAST * self._owned), 1)):
            lane_of = np.full(self._hosts, -1)
            lane_of[group] = np.arange(len(group))
            by_place = lane_of[self._host_of]
            mine = lane_of[self.here]
            sources = as_parts(mine, offsets[self._place], sizes[self._place], send)
            targets = as_parts(by_place, offsets, others, into)
            out = np.full(self._hosts, mine)
            yield self._move(sources, targets, totals[group], out, lane_of, chunk, single=False)

    def trade(
        self, sources: Ints, targets: Ints, out: Ints, into: Ints, chunk: int, largest: int = 0
    ) -> list[Move]:
        """Return the moves of lanes between pairs of hosts.

        Parameters
        ----------
        sources, targets : int64 arrays
            Parts with hosts instead of lanes: the host where the bytes go, or whence they come.
        out, into : int64 arrays
            By host: bytes for it, and from it; for the own host both are the bytes that local ranks exchange.
        chunk : int
            Bytes of a chunk.
        largest : int
            Bytes of the largest lane of any two hosts; 0: unknown, so the ranks must agree on the number of
            chunks.
        """
        distances = np.arange(1, self._hosts + 1) % self._hosts
        moves = []
        for group in _groups(distances, max(chunk // (LEAST * self._owned) // 2, 1)):
            numbers = 2 * np.arange(len(group))
            to, back = np.full(self._hosts, -1), np.full(self._hosts, -1)
            to[(self.here + group) % self._hosts] = numbers
            back[(self.here - group) % self._hosts] = numbers + (group > 0)
            lanes = np.zeros(2 * len(group) - int(0 in group), np.int64)
            lanes[to[to >= 0]] = out[to >= 0]
            lanes[back[back >= 0]] = into[back >= 0]
            given, taken = (_renumbered(parts, lane) for parts, lane in ((sources, to), (targets, back)))
            moves.append(self._move(given, taken, lanes, to, back, chunk, largest, single=True))
        return moves

    def among_local(self, sources: Ints, targets: Ints, total: int, chunk: int, largest: int) -> Move:
        """Return the move of one lane among the ranks of each host; ``largest``: of any host, in bytes."""
        nowhere = np.full(self._hosts, -1)
        lane = np.where(np.arange(self._hosts) == self.here, 0, -1)
        return self._move(sources, targets, np.array([total]), lane, nowhere, chunk, largest, single=False)

    # -- collectives ---------------------------------------------------------------------------------

    def gather_locally(self, mine: int, table: int, nbytes: int, chunk: int) -> Move:
        """Return the move that gives a host's ranks each other's `nbytes` bytes; own ones are in place."""
        ranks = np.arange(self.ranks)
        sizes = np.where(ranks == self.local, 0, nbytes)
        targets = as_parts(0, ranks * nbytes, sizes, table + ranks * nbytes)
        sources = as_parts(0, self.local * nbytes, np.array([nbytes * (self.ranks > 1)]), mine)
        return self.among_local(sources, targets, self.ranks * nbytes, chunk, self.slices * nbytes)

    def alltoall(self, send: int, recv: int, table: Ints, chunk: int, largest: int = 0) -> list[Move]:
        """Return the moves of an all-to-all, without the blocks of ranks for themselves.

        Parameters
        ----------
        send, recv : int
            Addresses of the blocks, which lie in the order of the set ranks.
        table : int64 array
            By local rank: the bytes for each set rank, and those from each set rank.
        chunk, largest : int
            As for :meth:`trade`.
        """
        starts = before(table[self.local])[:, self.order]
        sizes = table[:, :, self.order]
        own = np.arange(self.ranks)
        sizes[own, :, self._firsts[self.here] + own] = 0
        sent, received = sizes[:, 0], sizes[:, 1]
        # A lane has the blocks in the order of their senders, and of each sender by receiver.
        per_host = self._per_host(sent)
        offsets = per_host[: self.local].sum(axis=0)[self._host_of] + self._within_hosts(sent[self.local])
        sources = as_parts(self._host_of, offsets, sent[self.local], send + starts[0])
        per_rank = received.sum(axis=0)
        offsets = self._within_hosts(per_rank) + received[: self.local].sum(axis=0)
        targets = as_parts(self._host_of, offsets, received[self.local], recv + starts[1])
        into = self._per_host(per_rank)
        return self.trade(sources, targets, per_host.sum(axis=0), into, chunk, largest)

    def portions(self, totals: Ints, local: int) -> Portions:
        """Return what a local rank reduces of hosts' blocks of these sizes: the slices that it owns."""
        first, end = (-(-rank * self.slices // self.ranks) for rank in (local, local + 1))
        edges = [totals if k == self.slices else totals * k // self.slices & -ALIGNED for k in (first, end)]
        return Portions(edges[0], edges[1] - edges[0])

    def per_host(self, counts: Sequence[int]) -> Ints:
        """Return the bytes of each host's ranks together."""
        return self._per_host(np.asarray(counts, np.int64)[self.order])

    def collect_portions(self, send: int, box: int, totals: Ints, chunk: int) -> Move:
        """Return the move by which each local rank gets the others' bytes of what it reduces.

        Parameters
        ----------
        send : int
            Address of the hosts' blocks, one behind the other.
        box : int
            Address of a row for each local rank, with room for this rank's portions, one behind the other.
        totals : int64 array
            Bytes of each host's block.
        chunk : int
            Bytes of a chunk.
        """
        portions = [self.portions(totals, q) for q in range(self.ranks)]
        # By sender and receiver; a lane has the bytes in this order, and then host by host.
        sizes = np.tile([each.size.sum() for each in portions], (self.ranks, 1))
        np.fill_diagonal(sizes, 0)
        at = before(sizes.reshape(-1)).reshape(sizes.shape)
        blocks, mine = before(totals), portions[self.local]
        sources = [
            as_parts(0, at[self.local, q] + before(each.size), each.size, send + blocks + each.first)
            for q, each in enumerate(portions)
            if q != self.local
        ]
        row = int(mine.size.sum())
        targets = [
            as_parts(0, at[q, self.local] + before(mine.size), mine.size, box + q * row + before(mine.size))
            for q in range(self.ranks)
            if q != self.local
        ]
        largest = (self.slices - 1) * int(totals.sum())
        return self.among_local(_joined(sources), _joined(targets), int(sizes.sum()), chunk, largest)

    def trade_partials(self, send: int, box: int, counts: Sequence[int], chunk: int) -> list[Move]:
        """Return the moves that bring the hosts' partial results of this rank's bytes into rows of a box.

        `send` is as in :meth:`collect_portions`, reduced where this rank's portions are. On a host with one
        rank the own row stays empty.
        """
        sizes = np.asarray(counts, np.int64)[self.order]
        totals, mine = self._per_host(sizes), int(sizes[self._place])
        hosts, away = np.arange(self._hosts), np.arange(self._hosts) != self.here
        needed = away | (self.ranks > 1)
        portions = self.portions(totals, self.local)
        address = send + before(totals) + portions.first
        sources = as_parts(hosts, portions.first, np.where(needed, portions.size, 0), address)
        at = self._within_hosts(sizes)[self._place]
        targets = as_parts(hosts, at, np.where(needed, mine, 0), box + hosts * mine)
        into = np.where(needed, totals[self.here], 0)
        return self.trade(
            sources, targets, np.where(needed, totals, 0), into, chunk, max(int(totals.max()), 1)
        )

    # -- parts ---------------------------------------------------------------------------------------

    def _per_host(self, sizes: Ints) -> Ints:
        totals: Ints = np.add.reduceat(sizes, self._firsts, axis=-1)
        return totals

    def _within_hosts(self, sizes: Ints) -> Ints:
        """Return where the ranks' blocks begin, if those of each host lie one behind the other."""
        starts = before(sizes)
        offsets: Ints = starts - starts[self._firsts][self._host_of]
        return offsets

    def _move(
        self,
        sources: Ints,
        targets: Ints,
        lanes: Ints,
        out: Ints,
        into: Ints,
        chunk: int,
        largest: int = 0,
        *,
        single: bool,
    ) -> Move:
        room = chunk // (len(lanes) * self._owned) // ALIGNED * ALIGNED
        longest = largest or int(lanes.max())
        # A slice may be longer than others, by less than ALIGNED.
        chunks = -(-(longest // self.slices + ALIGNED) // room) if longest else 0
        return Move(sources, targets, lanes, out, into, single, room, chunks)


def _groups(numbers: Ints, most: int) -> list[Ints]:
    return [numbers[first : first + most] for first in range(0, len(numbers), most)]


def _joined(parts: list[Ints]) -> Ints:
    return np.concatenate(parts) if parts else np.empty((0, 4), np.int64)


def _renumbered(parts: Ints, lane_of: Ints) -> Ints:
    """Return the parts of hosts that have lanes, with lanes instead of hosts, sorted."""
    lanes = lane_of[parts[:, 0]]
    chosen = np.concatenate([lanes[:, None], parts[:, 1:]], axis=1)[lanes >= 0]
    return chosen[np.lexsort((chosen[:, 1], chosen[:, 0]))]
