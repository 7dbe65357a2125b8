"""Ranks that are threads of one process: their fabric, control transport and world, for tests and trials.

Owns everything that such ranks share. A collective has four steps:

1. Each thread publishes its buffer.
2. All threads wait at a barrier.
3. Each thread copies its part of the others' buffers.
4. All threads wait again, so that no buffer changes before every thread has copied its part.

The barrier orders memory: after it, every thread sees what any thread wrote before it.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from pyhvd.arrays import Bytes, address
from pyhvd.errors import TransportError
from pyhvd.transport.arena import Arena
from pyhvd.transport.control import Bell, Delivered, Message, Sending
from pyhvd.transport.fabric import Aborted, Fabric, Pause, PerRank, Unavailable
from pyhvd.transport.shm import LINE, Segment, aligned
from pyhvd.transport.tree import Tree
from pyhvd.transport.world import Topology, World


class ThreadGroup:
    """The state that the threads of one process set share.

    Parameters
    ----------
    size : int
        Number of threads.
    timeout : float
        Longest wait for another thread, in seconds.
    hosts : sequence of int, optional
        Each thread's host; by default all are on one.

    Attributes
    ----------
    boxes, rung : list
        By thread, the messages for it, and its bell.
    """

    def __init__(self, size: int, timeout: float, hosts: Sequence[int] | None = None) -> None:
        self.size = size
        self.timeout = timeout
        self.hosts = [0] * size if hosts is None else hosts
        self.published: list[Any] = [None] * size
        self.boxes: list[deque[Message]] = [deque() for _ in range(size)]
        self.rung = [threading.Event() for _ in range(size)]
        self._barrier = threading.Barrier(size)
        self._lock = threading.Lock()
        self._note: bytes | None = None
        self._subsets: dict[tuple[tuple[int, ...], int], list[ThreadGroup]] = {}
        self._calls: dict[tuple[tuple[int, ...], int, int], int] = {}

    def wait(self) -> None:
        """Wait until all threads have called it; raise TransportError or Aborted if one is late or aborts."""
        try:
            self._barrier.wait(self.timeout)
        except threading.BrokenBarrierError as exc:
            self._check()
            raise TransportError(
                f"a rank of this process has ended, or has not reached this call within {self.timeout:g} s"
            ) from exc

    def abort(self, note: bytes | None = None, rank: int | None = None) -> None:
        """Make all waits fail, here and in all subsets, or in those of a rank; the first note counts."""
        with self._lock:
            if self._note is None:
                self._note = note
            note = self._note
            below = [
                (group, None if rank is None else ranks.index(rank))
                for (ranks, _), groups in self._subsets.items()
                for group in groups
                if rank is None or rank in ranks
            ]
        self._barrier.abort()
        for group, index in below:
            group.abort(note, index)

    def _check(self) -> None:
        if self._note is not None:
            raise Aborted(self._note)

    def subset(self, ranks: tuple[int, ...], tag: int, rank: int) -> ThreadGroup:
        """Return the group of some ranks; with the same tag, each one's n-th call returns the same group."""
        with self._lock:
            self._check()
            number = self._calls.get((ranks, tag, rank), 0)
            self._calls[ranks, tag, rank] = number + 1
            groups = self._subsets.setdefault((ranks, tag), [])
            if number == len(groups):
                hosts = [self.hosts[each] for each in ranks]
                groups.append(ThreadGroup(len(ranks), self.timeout, hosts))
            return groups[number]


class ThreadFabric:
    """One thread's fabric; see :class:`pyhvd.transport.fabric.Fabric`."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.rank = rank
        self.size = group.size
        self.group = group

    def allgather(self, send: Bytes, recv: Bytes) -> None:
        """Gather every rank's block; all blocks have one length."""
        for r, block in enumerate(self._publish(send)):
            recv[r * len(block) : (r + 1) * len(block)] = block
        self.group.wait()

    def allgatherv(self, buffer: Bytes, counts: PerRank) -> None:
        """Gather blocks in place: rank r's block has the same offset in every rank's buffer."""
        starts = list(itertools.accumulate(counts, initial=0))
        for r, other in enumerate(self._publish(buffer)):
            if r != self.rank:
                buffer[starts[r] : starts[r + 1]] = other[starts[r] : starts[r + 1]]
        self.group.wait()

    def alltoallv(self, send: Bytes, send_counts: PerRank, recv: Bytes, recv_counts: PerRank) -> None:
        """Send block r to rank r."""
        at = 0
        for r, (block, counts) in enumerate(self._publish((send, send_counts))):
            first = sum(counts[: self.rank])
            recv[at : at + recv_counts[r]] = block[first : first + counts[self.rank]]
            at += recv_counts[r]
        self.group.wait()

    exchange = alltoallv

    def pairwise_exchange(self, partner: int, send: Bytes, recv: Bytes) -> None:
        """Exchange blocks with a partner; all ranks call it, in pairs."""
        recv[:] = self._publish(send)[partner]
        self.group.wait()

    def broadcast(self, buffer: Bytes, root: int) -> None:
        """Copy the root's buffer to every rank's."""
        published = self._publish(buffer)
        if self.rank != root:
            buffer[:] = published[root]
        self.group.wait()

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.group.wait()

    def exchange_objects(self, mine: Any) -> list[Any]:
        """Return every rank's object, in rank order."""
        published = self._publish(mine)
        self.group.wait()
        return published

    def subset(self, ranks: Sequence[int], tag: int) -> ThreadFabric:
        """Return the fabric of some of the ranks."""
        group = self.group.subset(tuple(ranks), tag, self.rank)
        return ThreadFabric(group, list(ranks).index(self.rank))

    def pause_by(self, pause: Pause) -> None:
        """Do nothing: :meth:`abort` ends all waits."""

    def abort(self, note: bytes) -> None:
        """Make the other ranks' waits fail with this rank's note."""
        self.group.abort(note, self.rank)

    def close(self) -> None:
        """Do nothing: the group ends with its threads."""

    def _publish(self, mine: Any) -> list[Any]:
        self.group.published[self.rank] = mine
        self.group.wait()
        return list(self.group.published)


def open_thread_window(fabric: Fabric, nbytes: int) -> Segment | Unavailable:
    """Return memory, with one part per rank, that the ranks of a fabric share if they are on one host.

    Collective.
    """
    assert isinstance(fabric, ThreadFabric)
    if len(set(fabric.group.hosts)) > 1:
        return Unavailable("they are on several nodes", expected=True)
    return _share(fabric, nbytes)


def _share(fabric: ThreadFabric, nbytes: int) -> Segment:
    stride = aligned(nbytes)
    memory = fabric.exchange_objects(np.empty(fabric.size * stride + LINE, np.uint8))[0]
    start = aligned(address(memory))
    return Segment([start + rank * stride for rank in range(fabric.size)], memory)


ARENA = 1 << 26
"""Bytes of one thread's arena; pages take memory when they are first written."""


def open_thread_arena(fabric: Fabric) -> Arena:
    """Return this rank's arena; collective. Without arenas, ranks copy arrays through the window."""
    assert isinstance(fabric, ThreadFabric)
    opened = _share(fabric, ARENA)
    return Arena(fabric.rank, opened.areas, ARENA, _do_nothing, _do_nothing, opened.memory)


def _do_nothing(offset: int, nbytes: int) -> None:
    """Keep the memory as it is: it stays allocated."""


class ThreadBell:
    """Wakes the ranks of one world; the address of a rank's bell is the rank's number."""

    shortest = 0.0

    def __init__(self, rank: int, rung: Sequence[threading.Event]) -> None:
        self._rank = rank
        self._rung = rung

    def ring(self, address: int | None = None) -> None:
        """Ring a rank's bell, by default this rank's own; any thread may call it."""
        self._rung[self._rank if address is None else address].set()

    def wait(self, timeout: float | None) -> bool:
        """Sleep until rung, at most ``timeout`` s; return whether the bell was rung."""
        mine = self._rung[self._rank]
        rung = mine.wait(timeout and min(timeout, threading.TIMEOUT_MAX))
        mine.clear()
        return rung

    def close(self) -> None:
        """Do nothing."""


class InProcessTransport:
    """The control transport of one thread.

    To send a message, append it to the receiver's box, and ring the receiver's bell. Boxes and bells are
    numbered by rank.
    """

    def __init__(self, tree: Tree, boxes: Sequence[deque[Message]], bell: Bell) -> None:
        self.tree = tree
        self.rank = tree.rank
        self.size = len(boxes)
        self._boxes = boxes
        self._bell = bell

    def send(self, destination: int, payload: bytes) -> Sending:
        """Deliver a message."""
        self._boxes[destination].append((self.rank, payload))
        self._bell.ring(destination)
        return Delivered()

    def receive(self) -> list[Message]:
        """Return the messages that have arrived."""
        box = self._boxes[self.rank]
        return [box.popleft() for _ in range(len(box))]

    def wait(self, timeout: float | None) -> None:
        """Sleep; see :class:`pyhvd.transport.control.ControlTransport`."""
        self._bell.wait(timeout)

    def wake(self) -> None:
        """Wake the thread that sleeps in :meth:`wait`."""
        self._bell.ring()

    def drain(self, timeout: float) -> bool:  # noqa: ARG002 - messages arrive at once
        """Return True: messages arrive at once."""
        return True

    def close(self) -> None:
        """Do nothing."""


class ThreadWorlds:
    """Makes the worlds of ``size`` ranks that are threads of one process.

    Parameters
    ----------
    size : int
        Number of ranks.
    timeout : float
        Longest wait for another rank, in seconds.
    hosts : sequence of int, optional
        By rank, the number of its simulated host. By default all ranks are on one host.
    """

    def __init__(self, size: int, timeout: float, hosts: Sequence[int] | None = None) -> None:
        if hosts is not None and len(hosts) != size:
            raise ValueError(f"hosts has {len(hosts)} numbers, but needs one for each of {size} ranks")
        self.size = size
        self.timeout = timeout
        self._group = ThreadGroup(size, timeout, hosts)  # its subsets of all ranks are the worlds

    def world(self, rank: int) -> World:
        """Return one rank's part of its next world; the n-th calls of all ranks share one world."""
        group = self._group.subset(tuple(range(self.size)), 0, rank)
        topology = Topology.of(rank, group.hosts)
        tree = Tree.of(rank, topology.hosts)
        return World(
            topology=topology,
            fabric=ThreadFabric(group, rank),
            connect=lambda bell: InProcessTransport(tree, group.boxes, bell or ThreadBell(rank, group.rung)),
            members=_no_communicators,
            abort=group.abort,
            threads=True,
            open_window=open_thread_window,
            open_arena=open_thread_arena,
        )

    def abort(self) -> None:
        """Make every rank's wait for another rank fail, in all worlds."""
        self._group.abort()


def _no_communicators(comm: object) -> tuple[int, ...]:
    raise ValueError(f"{comm!r} is not a process set: ranks that are threads have no MPI communicators")
