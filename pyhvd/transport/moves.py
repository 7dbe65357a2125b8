"""Which bytes of a collective over several hosts go where; pure.

A collective is one or more *moves* (``move_across.c``). A move has lanes. A lane is a sequence of bytes from
the ranks of one host, and goes to one host, to all hosts, or to ranks of the same host. There are three
kinds:

1. In a *gather* each host with bytes has one lane: its ranks' blocks in their order. It goes to all hosts.
2. In a *trade* each pair of hosts has one lane in each direction. A move has the lanes of some distances d:
   host h sends to host h + d and receives from host h - d, modulo the number of hosts.
3. In a *relay* the root's host sends each other host a piece of a segment, and the other hosts send each
   other their pieces of the segment before. So no link carries much more than the bytes of a broadcast.

A slot has room for a few lanes; with more of them, a collective has several moves.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

MOST_BLOCKS = 1024
"""Blocks of a chunk, at most: each has room for 16 bytes, and a chunk for 16 KiB at least."""
ALIGNED = 16
"""Boundaries of slices are multiples of this number of bytes; ``move_across.c`` has the same."""
LEAST = 16384
"""A slice has so much room in each lane of a chunk, if the chunk is large enough."""
RELAYED = 8 << 20
"""A broadcast to several other hosts is relayed from so many bytes on."""
_RAMP = (1 << 18, 1 << 19, 1 << 20, 1 << 21)
_SEGMENT = 1 << 22


class Move(NamedTuple):
    """One rank's part of a move.

    Attributes
    ----------
    sources, targets : int64 arrays of n rows
        Lane, offset in the lane, bytes (not 0), and offset in this rank's source or target, of its parts;
        sorted.
    lanes : int64 array
        Bytes of each lane.
    out, into : int64 arrays
        By host, the lane whose bytes go there, and the lane whose bytes come from there; -1: none.
    single : bool
        Whether each byte that comes from another host has one target among the local ranks.
    relays : bool
        Whether the sources are in the target: bytes that an earlier move has brought.
    direct : bool
        Whether every host has one rank. Then each part is a whole lane, and nothing lies in slots.
    owned : int
        Slices of one rank, at most, on any host.
    longest : int
        Bytes of the longest lane on any host.
    """

    sources: Ints
    targets: Ints
    lanes: Ints
    out: Ints
    into: Ints
    single: bool
    relays: bool
    direct: bool
    owned: int
    longest: int


class Portions(NamedTuple):
    """Which elements of a tensor each rank of a set gets.

    Attributes
    ----------
    starts : int64 array
        By set rank, where its portion begins; and the end.
    own : int
        This set rank.
    longest : int
        Elements of the longest portion.
    by_slice : int64 array, optional
        Over several hosts, by host and slice: the set rank whose portion goes there with the slice; -1: none.
    """

    starts: Ints
    own: int
    longest: int
    by_slice: Ints | None = None

    @classmethod
    def of(cls, counts: Sequence[int], own: int, by_slice: Ints | None) -> Portions:
        """Return the portions of ranks that get ``counts`` elements."""
        starts = np.cumsum([0, *counts], dtype=np.int64)
        return cls(starts, own, max(counts), by_slice)


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
    by_slice : int64 array
        See :class:`Portions`.
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
        self.by_slice: Ints = np.full(self._hosts * self.slices, -1, np.int64)
        for host, members in enumerate(hosts):
            for local, each in enumerate(members):
                self.by_slice[host * self.slices + self._first_slice(local, len(members))] = each

    # -- moves ---------------------------------------------------------------------------------------

    def gather(self, counts: Sequence[int] | Ints, chunk: int) -> Iterator[Move]:
        """Yield the moves that give every rank rank r's ``counts[r]`` bytes; the own ones are in place."""
        by_rank = np.asarray(counts, np.int64)
        sizes = by_rank[self.order]
        offsets, totals = self._within_hosts(sizes), self._per_host(sizes)
        into = before(by_rank)[self.order]
        others = np.where(np.arange(len(sizes)) == self._place, 0, sizes)
        for group in _groups(np.flatnonzero(totals), max(chunk // (LEAST * self._owned), 1)):
            lane_of = np.full(self._hosts, -1)
            lane_of[group] = np.arange(len(group))
            by_place = lane_of[self._host_of]
            mine = lane_of[self.here]
            sources = as_parts(mine, offsets[self._place], sizes[self._place], 0)
            targets = as_parts(by_place, offsets, others, into)
            out = np.full(self._hosts, mine)
            yield self._move(sources, targets, totals[group], out, lane_of, single=False)

    def broadcast(self, nbytes: int, root: int, chunk: int) -> Iterator[Move]:
        """Yield the moves that give every rank a root's bytes; the root's own are in place."""
        source = int(self._host_of[self.order.tolist().index(root)])
        others = np.array([host for host in range(self._hosts) if host != source])
        if len(others) < 2 or nbytes < RELAYED or self._hosts > chunk // (LEAST * self._owned):
            counts = np.where(np.arange(len(self.order)) == root, nbytes, 0)
            yield from self.gather(counts, chunk)
            return
        alone = int(np.bincount(self._host_of)[source]) == 1
        old = np.zeros(len(others) + 1, np.int64)
        for first, end in itertools.pairwise(_edges(nbytes)):
            new = first + (end - first) * np.arange(len(others) + 1) // len(others)
            largest = int(max(np.diff(new).max(), np.diff(old).max(), 0 if alone else end - first))
            if self.here == source:
                yield self._hand_out(new, others, largest, is_root=self.order[self._place] == root)
            else:
                yield self._relay(new, old, others, largest, source)
            old = new

    def _hand_out(self, new: Ints, others: Ints, largest: int, *, is_root: bool) -> Move:
        """Return the root host's move of a segment: a piece for each other host, and all for local ranks."""
        count = len(others)
        lanes = np.append(np.diff(new), 0 if self.ranks == 1 else new[-1] - new[0])
        parts = as_parts(np.arange(count + 1), 0, lanes, np.append(new[:-1], new[0]))
        out, nowhere = np.full(self._hosts, -1), np.full(self._hosts, -1)
        out[others] = np.arange(count)
        out[self.here] = -1 if self.ranks == 1 else count
        sources = parts if is_root else parts[:0]
        targets = parts[:0] if is_root else parts[parts[:, 0] == count]
        return self._move(sources, targets, lanes, out, nowhere, largest, single=False)

    def _relay(self, new: Ints, old: Ints, others: Ints, largest: int, source: int) -> Move:
        """Return another host's move: it gets its piece of a segment, and sends that of the one before."""
        me = others.tolist().index(self.here)
        rest = np.delete(np.arange(len(others)), me)
        piece, sizes = int(old[me + 1] - old[me]), np.diff(old)[rest]
        lanes = np.concatenate([[new[me + 1] - new[me], piece], sizes])
        out, into = np.full(self._hosts, -1), np.full(self._hosts, -1)
        out[others[rest]] = 1
        into[source], into[others[rest]] = 0, 2 + np.arange(len(rest))
        # Each rank sends its slices of the piece.
        edges = np.array([self._first_slice(local, self.ranks) for local in (self.local, self.local + 1)])
        first, end = np.where(edges == self.slices, piece, piece * edges // self.slices & -ALIGNED)
        sources = as_parts(1, first, np.array([end - first]), old[me] + first)
        targets = as_parts(
            np.append(0, 2 + np.arange(len(rest))),
            0,
            np.append(lanes[0], sizes),
            np.append(new[me], old[rest]),
        )
        return self._move(sources, targets, lanes, out, into, largest, single=False, relays=True)

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
            Bytes of the largest lane of any two hosts; 0: unknown, so the ranks must agree on it.
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
            moves.append(self._move(given, taken, lanes, to, back, largest, single=True))
        return moves

    # -- collectives ---------------------------------------------------------------------------------

    def gather_locally(self, nbytes: int) -> Move:
        """Return the move that gives a host's ranks each other's `nbytes` bytes; own ones are in place."""
        ranks = np.arange(self.ranks)
        sizes = np.where(ranks == self.local, 0, nbytes)
        targets = as_parts(0, ranks * nbytes, sizes, ranks * nbytes)
        sources = as_parts(0, self.local * nbytes, np.array([nbytes * (self.ranks > 1)]), 0)
        nowhere = np.full(self._hosts, -1)
        lane = np.where(np.arange(self._hosts) == self.here, 0, -1)
        total = np.array([self.ranks * nbytes])
        return self._move(sources, targets, total, lane, nowhere, self.slices * nbytes, single=False)

    def alltoall(self, table: Ints, chunk: int, largest: int = 0) -> list[Move]:
        """Return the moves of an all-to-all, without the blocks of ranks for themselves.

        Blocks lie in the order of the set ranks.

        Parameters
        ----------
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
        sources = as_parts(self._host_of, offsets, sent[self.local], starts[0])
        per_rank = received.sum(axis=0)
        offsets = self._within_hosts(per_rank) + received[: self.local].sum(axis=0)
        targets = as_parts(self._host_of, offsets, received[self.local], starts[1])
        into = self._per_host(per_rank)
        return self.trade(sources, targets, per_host.sum(axis=0), into, chunk, largest)

    # -- parts ---------------------------------------------------------------------------------------

    @property
    def neighbours(self) -> Ints:
        """The set ranks of this host."""
        return self.order[self._place - self.local :][: self.ranks]

    def largest_trade(self, sizes: Ints) -> int:
        """Return the bytes of the largest lane of an all-to-all of sizes[s, r] bytes from rank s to r."""
        sizes = sizes.copy()
        np.fill_diagonal(sizes, 0)
        by_host = np.add.reduceat(self._per_host(sizes[:, self.order])[self.order], self._firsts, axis=0)
        return int(by_host.max())

    def _first_slice(self, local: int, ranks: int) -> int:
        """Return the first slice that a local rank owns, of a host with so many ranks; as exchange.h does."""
        return -(-local * self.slices // ranks)

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
        largest: int = 0,
        *,
        single: bool,
        relays: bool = False,
    ) -> Move:
        longest = largest or int(lanes.max())
        direct = self.slices == 1
        return Move(sources, targets, lanes, out, into, single, relays, direct, self._owned, longest)


def _groups(numbers: Ints, most: int) -> list[Ints]:
    return [numbers[first : first + most] for first in range(0, len(numbers), most)]


def _edges(nbytes: int) -> list[int]:
    """Return where the segments of a broadcast begin, its end, and the end of an empty one behind it.

    The first and the last ones are short: nothing overlaps with handing out the first, or relaying the last.
    """
    full, rest = divmod(nbytes - 2 * sum(_RAMP), _SEGMENT)
    sizes = [*_RAMP, *[_SEGMENT] * full, rest, *reversed(_RAMP)]
    return [*itertools.accumulate(sizes, initial=0), nbytes]


def _renumbered(parts: Ints, lane_of: Ints) -> Ints:
    """Return the parts of hosts that have lanes, with lanes instead of hosts, sorted."""
    lanes = lane_of[parts[:, 0]]
    chosen = np.concatenate([lanes[:, None], parts[:, 1:]], axis=1)[lanes >= 0]
    return chosen[np.lexsort((chosen[:, 1], chosen[:, 0]))]
