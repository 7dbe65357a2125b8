"""The control transport over mpi4py: messages between rank 0 and the others, and sleep without polling.

Owns a communicator and this rank's doorbell.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mpi4py import MPI

from pyhvd.transport.control import Bell, Message
from pyhvd.transport.tree import Tree


@dataclass(slots=True, eq=False)
class _MpiSending:
    """A message that MPI is sending; calls ``ring`` once when MPI has sent it."""

    request: MPI.Request
    payload: bytes  # MPI reads it until it is sent
    ring: Callable[[], None]
    is_gone: bool = False

    def gone(self) -> bool:
        """Return whether MPI has sent the message.

        The call that finds it sent rings the receiver, as this rank may leave MPI right after it.
        """
        if not self.is_gone and self.request.Test():
            self.is_gone = True
            self.ring()
        return self.is_gone


class MpiTransport:
    """Messages over a communicator, and bells that wake sleeping ranks.

    A rank rings the receiver's bell after it has given a message to MPI. MPI may queue that message, and send
    it only during later calls. So neither rank relies on the bell alone: a sleep is at most as long as the
    time since the last event. A message is therefore at most twice as late as MPI made it, and a rank without
    work wakes ever more rarely.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Owned, and freed by :meth:`close`.
    bell : Bell
        This rank's bell; owned.
    bells : sequence
        By rank, the address of each bell; None if this rank cannot reach it.
    tree : Tree
        This rank's place in the tree of messages.
    """

    _PROBES = 10
    _FIRST_PAUSE = 50e-6
    _LAST_PAUSE = 10e-3
    _SHORTEST_SLEEP = 1e-3
    _LONGEST_SLEEP = 5.0
    _LONGEST_SLEEP_UNRUNG = 0.25

    def __init__(self, comm: MPI.Intracomm, bell: Bell, bells: Sequence[Any], tree: Tree) -> None:
        self.tree = tree
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self._comm = comm
        self._bell = bell
        self._bells = bells
        self._rung_by_neighbours = all(bells[r] is not None for r in tree.neighbours)
        # Out-of-band messages come from any rank, maybe without a ring.
        self._longest = self._LONGEST_SLEEP_UNRUNG if None in bells else self._LONGEST_SLEEP
        self._sending: list[_MpiSending] = []
        # By source, in the order of sending.
        self._receiving: dict[int, deque[tuple[MPI.Request, bytearray]]] = {}
        self._last_event = time.monotonic()  # a ring, or a message sent or received

    def send(self, destination: int, payload: bytes) -> _MpiSending:
        """Start sending a message; do not block."""
        self._last_event = time.monotonic()
        request = self._comm.Isend([payload, MPI.BYTE], destination)
        sending = _MpiSending(request, payload, partial(self._ring, destination))
        if not sending.gone():
            self._sending.append(sending)
            self._ring(destination)  # maybe early: a message that MPI queues arrives later
        return sending

    def receive(self) -> list[Message]:
        """Return the messages that have arrived completely.

        Never waits for the rest of a message: its sender may wait for this rank in shared memory, and MPI
        then does not progress.
        """
        self._progress()
        status = MPI.Status()
        while (message := self._comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)) is not None:
            payload = bytearray(status.Get_count(MPI.BYTE))
            request = message.Irecv([payload, MPI.BYTE])
            self._receiving.setdefault(status.Get_source(), deque()).append((request, payload))
        arrived: list[Message] = []
        for source, line in list(self._receiving.items()):
            while line and line[0][0].Test():  # in order: a later message waits for an earlier one
                arrived.append((source, line.popleft()[1]))
            if not line:
                del self._receiving[source]
        if arrived:
            self._last_event = time.monotonic()
        return arrived

    def wait(self, timeout: float | None) -> None:
        """Sleep; see :class:`pyhvd.transport.control.ControlTransport`."""
        until = None if timeout is None else time.monotonic() + timeout
        for _ in range(self._PROBES):
            if self._progress() or self._comm.Iprobe():
                return
            os.sched_yield()
        pause = self._FIRST_PAUSE
        while not self._progress():
            now = time.monotonic()
            left = None if until is None else until - now
            if left is not None and left <= 0:
                return
            if self._sleep(left, self._longest_sleep(now, pause)):
                self._last_event = time.monotonic()
                return
            if any(self._comm.Iprobe() for _ in range(self._PROBES)):
                return
            pause = min(pause * 1.5, 1e-3 if self._under_way() else self._LAST_PAUSE)

    def wake(self) -> None:
        """Wake the thread that sleeps in :meth:`wait`."""
        self._bell.ring()

    def drain(self, timeout: float) -> bool:
        """Wait at most ``timeout`` s until MPI has sent all messages; return whether it has."""
        until = time.monotonic() + timeout
        while self._sending and time.monotonic() < until:
            self._progress()
            time.sleep(self._FIRST_PAUSE)
        return not self._sending

    def close(self) -> None:
        """Free communicator and bell; collective."""
        self._comm.Free()
        self._bell.close()

    def _longest_sleep(self, now: float, pause: float) -> float:
        """Return the longest next sleep, in seconds."""
        if self._under_way() or not self._rung_by_neighbours:
            return pause  # neither MPI's progress nor these ranks ring this bell
        return min(max(now - self._last_event, self._SHORTEST_SLEEP), self._longest)

    def _sleep(self, left: float | None, pause: float) -> bool:
        nap = pause if left is None else min(pause, left)
        if nap >= self._bell.shortest:
            return self._bell.wait(nap)
        time.sleep(nap)
        return self._bell.wait(0.0)

    def _under_way(self) -> bool:
        return bool(self._sending or self._receiving)

    def _progress(self) -> bool:
        """Let MPI progress; return whether it has sent a message, or one can be received."""
        waiting = [sending for sending in self._sending if not sending.gone()]
        moved = len(waiting) < len(self._sending)
        self._sending = waiting
        return moved or any(line[0][0].Test() for line in self._receiving.values())

    def _ring(self, destination: int) -> None:
        if (address := self._bells[destination]) is not None:
            self._bell.ring(address)
