"""The fabric of ranks that are threads of one process: for tests, and for trying things out.

A :class:`Meeting` is where the threads of one process set meet: each lays down what it gives, waits for the
others, copies what it is due, and waits again before anybody may change what was laid down. The barrier
orders memory: what a thread wrote before it is visible to all after it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from pyhvd.arrays import Bytes, address
from pyhvd.errors import TransportError
from pyhvd.transport.arena import Arena
from pyhvd.transport.control import Bell, Message, Sending
from pyhvd.transport.fabric import Aborted, Fabric
from pyhvd.transport.shm import LINE, Segment, aligned
from pyhvd.transport.world import Topology, World


class Meeting:
    """Shared by the threads of one process set."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self.timeout = timeout
        self.laid: list[Any] = [None] * size
        self._barrier = threading.Barrier(size)
        self._lock = threading.Lock()
        self._note: bytes | None = None
        self._subsets: dict[tuple[tuple[int, ...], int], list[Meeting]] = {}
        self._asked: dict[tuple[tuple[int, ...], int, int], int] = {}

    def wait(self) -> None:
        """Wait for everybody; an error if one does not come in time, or has given up."""
        try:
            self._barrier.wait(self.timeout)
        except threading.BrokenBarrierError as exc:
            self._check()
            raise TransportError("a rank of this process has left, or has not come in time") from exc

    def abort(self) -> None:
        """Let nobody wait any longer."""
        self._barrier.abort()
        with self._lock:
            subsets = [meeting for meetings in self._subsets.values() for meeting in meetings]
        for meeting in subsets:
            meeting.abort()

    def leave(self, rank: int, note: bytes) -> None:
        """Let nobody wait for a rank any longer, here or in a subset that it is a member of."""
        with self._lock:
            if self._note is None:
                self._note = note
            subsets = [
                (ranks.index(rank), meeting)
                for (ranks, _), meetings in self._subsets.items()
                for meeting in meetings
                if rank in ranks
            ]
        self._barrier.abort()
        for place, meeting in subsets:
            meeting.leave(place, note)

    def _check(self) -> None:
        if self._note is not None:
            raise Aborted(self._note)

    def subset(self, ranks: tuple[int, ...], tag: int, rank: int) -> Meeting:
        """Return the meeting of some ranks; the n-th call of each of them returns the same one."""
        with self._lock:
            self._check()
            turn = self._asked.get((ranks, tag, rank), 0)
            self._asked[ranks, tag, rank] = turn + 1
            meetings = self._subsets.setdefault((ranks, tag), [])
            if turn == len(meetings):
                meetings.append(Meeting(len(ranks), self.timeout))
            return meetings[turn]


class ThreadFabric:
    """One rank's end of a meeting."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank = rank
        self.size = meeting.size
        self._meeting = meeting

    def allgather(self, send: Bytes, recv: Bytes) -> None:
        """Gather blocks of one length."""
        for r, block in enumerate(self._lay(send)):
            recv[r * len(block) : (r + 1) * len(block)] = block
        self._meeting.wait()

    def allgatherv(self, buffer: Bytes, counts: Sequence[int]) -> None:
        """Gather in place."""
        starts = list(itertools.accumulate(counts, initial=0))
        for r, other in enumerate(self._lay(buffer)):
            if r != self.rank:
                buffer[starts[r] : starts[r + 1]] = other[starts[r] : starts[r + 1]]
        self._meeting.wait()

    def alltoallv(
        self, send: Bytes, send_counts: Sequence[int], recv: Bytes, recv_counts: Sequence[int]
    ) -> None:
        """Send block r to rank r."""
        at = 0
        for r, (block, counts) in enumerate(self._lay((send, send_counts))):
            first = sum(counts[: self.rank])
            recv[at : at + recv_counts[r]] = block[first : first + counts[self.rank]]
            at += recv_counts[r]
        self._meeting.wait()

    def exchange(
        self, send: Bytes, send_counts: Sequence[int], recv: Bytes, recv_counts: Sequence[int]
    ) -> None:
        """Send block r to rank r."""
        self.alltoallv(send, send_counts, recv, recv_counts)

    def swap(self, partner: int, send: Bytes, recv: Bytes) -> None:
        """Give each other blocks."""
        recv[:] = self._lay(send)[partner]
        self._meeting.wait()

    def broadcast(self, buffer: Bytes, root: int) -> None:
        """Copy the root's buffer."""
        laid = self._lay(buffer)
        if self.rank != root:
            buffer[:] = laid[root]
        self._meeting.wait()

    def barrier(self) -> None:
        """Wait for everybody."""
        self._meeting.wait()

    def exchange_objects(self, mine: Any) -> list[Any]:
        """Return what every rank gives, in rank order."""
        laid = self._lay(mine)
        self._meeting.wait()
        return laid

    def subset(self, ranks: Sequence[int], tag: int) -> ThreadFabric:
        """Return the fabric of some ranks."""
        meeting = self._meeting.subset(tuple(ranks), tag, self.rank)
        return ThreadFabric(meeting, list(ranks).index(self.rank))

    def abort(self, note: bytes) -> None:
        """Let nobody wait for this rank any longer."""
        self._meeting.leave(self.rank, note)

    def close(self) -> None:
        """Nothing to give up: the meeting goes with its threads."""

    def _lay(self, mine: Any) -> list[Any]:
        self._meeting.laid[self.rank] = mine
        self._meeting.wait()
        return list(self._meeting.laid)


def open_thread_window(fabric: Fabric, nbytes: int) -> Segment:
    """Return memory that the threads of a fabric share, as they share all memory."""
    assert isinstance(fabric, ThreadFabric)
    stride = aligned(nbytes)
    memory = fabric.exchange_objects(np.empty(fabric.size * stride + LINE, np.uint8))[0]
    start = aligned(address(memory))
    return Segment([start + rank * stride for rank in range(fabric.size)], memory)


ARENA = 1 << 26
"""Bytes of the arena of a rank that is a thread; it takes memory as it is written to."""


def open_thread_arena(fabric: Fabric) -> Arena:
    """Return memory for arrays; threads share all memory, but ranks reduce in place only in an arena."""
    opened = open_thread_window(fabric, ARENA)
    return Arena(fabric.rank, opened.areas, ARENA, _hold_on, _hold_on, opened.memory)


def _hold_on(offset: int, nbytes: int) -> None:
    """The memory is there, and stays."""


class Mailbox:
    """One in-process rank's inbox."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._messages: list[Message] = []
        self._rung = False

    def put(self, message: Message | None) -> None:
        """Lay down a message (or just ring), from any thread."""
        with self._changed:
            if message is not None:
                self._messages.append(message)
            self._rung = True
            self._changed.notify()

    def take(self) -> list[Message]:
        """Return the messages."""
        with self._changed:
            messages, self._messages = self._messages, []
            return messages

    def wait(self, timeout: float | None) -> None:
        """Sleep until something was put."""
        with self._changed:
            if not self._rung:
                self._changed.wait(timeout and min(timeout, threading.TIMEOUT_MAX))
            self._rung = False


class _Delivered:
    """What is put has arrived."""

    def gone(self) -> bool:
        """Return True."""
        return True


_DELIVERED = _Delivered()


class InProcessTransport:
    """Messages between ranks that are threads of one process.

    With a bell, whose addresses are the ranks, the thread sleeps on that; else on its mailbox.
    """

    def __init__(self, rank: int, boxes: Sequence[Mailbox], bell: Bell | None = None) -> None:
        self.rank = rank
        self.size = len(boxes)
        self._boxes = boxes
        self._bell = bell

    def send(self, destination: int, payload: bytes) -> Sending:
        """Send a message."""
        self._boxes[destination].put((self.rank, payload))
        if self._bell is not None:
            self._bell.ring(destination)
        return _DELIVERED

    def receive(self) -> list[Message]:
        """Return what has arrived."""
        return self._boxes[self.rank].take()

    def wait(self, timeout: float | None) -> None:
        """Sleep; see :class:`ControlTransport`."""
        if self._bell is not None:
            self._bell.wait(timeout)
        else:
            self._boxes[self.rank].wait(timeout)

    def wake(self) -> None:
        """End the sleep of the thread in :meth:`wait`."""
        if self._bell is not None:
            self._bell.ring()
        else:
            self._boxes[self.rank].put(None)

    def drain(self, timeout: float) -> bool:  # noqa: ARG002 - what is put has arrived
        """Return True: what is put has arrived."""
        return True

    def close(self) -> None:
        """Nothing to give up."""


class ThreadWorlds:
    """The shared part of ``size`` ranks that are threads of one process.

    Parameters
    ----------
    size : int
        Number of ranks.
    timeout : float
        Seconds after which a rank that waits for another one gives up.
    """

    def __init__(self, size: int, timeout: float) -> None:
        self._size = size
        self._timeout = timeout
        self._lock = threading.Lock()
        self._meetings: list[Meeting] = []
        self._boxes: list[list[Mailbox]] = []
        self._turns = [0] * size

    def world(self, rank: int) -> World:
        """Return one rank's next world: the n-th calls of all ranks belong together."""
        with self._lock:
            turn = self._turns[rank]
            self._turns[rank] += 1
            if turn == len(self._meetings):
                self._meetings.append(Meeting(self._size, self._timeout))
                self._boxes.append([Mailbox() for _ in range(self._size)])
            meeting, boxes = self._meetings[turn], self._boxes[turn]
        fabric = ThreadFabric(meeting, rank)
        return World(
            topology=Topology(rank, self._size, rank, self._size, 0, 1, True),
            fabric=fabric,
            exchange=fabric.exchange_objects,
            connect=lambda bell: InProcessTransport(rank, boxes, bell),
            members=_no_communicators,
            abort=meeting.abort,
            threads=True,
            open_window=open_thread_window,
            open_arena=open_thread_arena,
        )

    def abort(self) -> None:
        """Let no rank wait for another any longer."""
        with self._lock:
            meetings = list(self._meetings)
        for meeting in meetings:
            meeting.abort()


def _no_communicators(comm: object) -> tuple[int, ...]:
    raise ValueError(f"ranks that are threads have no MPI communicators, so {comm!r} means nothing to them")
