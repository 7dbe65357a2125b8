"""ControlTransport over mpi4py: messages between rank 0 and the others, and sleep without polling.

Owns a communicator of its own, and this rank's doorbell.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from pyhvd.transport import DELIVERY_SECONDS, Bell, Message


class MpiTransport:
    """Messages over a communicator of its own, with doorbells to wake sleeping ranks of the same host.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Owned, and freed by :meth:`close`.
    bell : Bell
        This rank's bell; owned.
    bells : sequence
        By rank, the address of each bell, None where it is out of reach.
    """

    _YIELDS = 10
    _FIRST_PAUSE = 50e-6
    _LAST_PAUSE = 10e-3
    _LONGEST_SLEEP = 0.25
    _RUNG_FOR = 20e-3

    def __init__(self, comm: MPI.Intracomm, bell: Bell, bells: Sequence[Any]) -> None:
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self._comm = comm
        self._bell = bell
        self._bells = bells
        # Rank 0 hears from everybody, the others from rank 0 only.
        heard = range(self.size) if self.rank == 0 else (0,)
        self._rung_by_all = all(bells[r] is not None for r in heard)
        self._sending: deque[tuple[MPI.Request, bytes, int]] = deque()
        self._rung_until = 0.0

    def send(self, destination: int, payload: bytes) -> None:
        """Send a message; returns at once."""
        request = self._comm.Isend([payload, MPI.BYTE], destination)
        if not request.Test():
            self._sending.append((request, payload, destination))
        self._ring(destination)

    def receive(self) -> list[Message]:
        """Return what has arrived."""
        self._progress()
        arrived: list[Message] = []
        status = MPI.Status()
        while (message := self._comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)) is not None:
            payload = bytearray(status.Get_count(MPI.BYTE))
            message.Recv([payload, MPI.BYTE])
            arrived.append((status.Get_source(), payload))
        if arrived:
            self._rung_until = 0.0
        return arrived

    def wait(self, timeout: float | None) -> None:
        """Sleep; see :class:`ControlTransport`."""
        until = None if timeout is None else time.monotonic() + timeout
        for _ in range(self._YIELDS):
            if self._comm.Iprobe():
                return
            os.sched_yield()
        pause = self._FIRST_PAUSE
        while True:
            self._progress()
            now = time.monotonic()
            left = None if until is None else until - now
            if left is not None and left <= 0:
                return
            if self._sleep(left, self._longest_sleep(now, pause)):
                self._rung_until = time.monotonic() + self._RUNG_FOR
                return
            if self._comm.Iprobe():
                return
            pause = min(pause * 1.5, 1e-3 if self._sending else self._LAST_PAUSE)

    def wake(self) -> None:
        """End the sleep of the thread in :meth:`wait`."""
        self._bell.ring()

    def drain(self, timeout: float = DELIVERY_SECONDS) -> bool:
        """Wait until all that was sent has gone out."""
        until = time.monotonic() + timeout
        while self._sending and time.monotonic() < until:
            self._progress()
            time.sleep(self._FIRST_PAUSE)
        return not self._sending

    def close(self) -> None:
        """Free the communicator and take the bell down; collective."""
        self._comm.Free()
        self._bell.close()

    def _longest_sleep(self, now: float, pause: float) -> float:
        """Return for how long (s) the bell may be trusted."""
        if self._sending or not self._rung_by_all:
            return pause  # MPI's own progress, and other hosts, ring no bell here
        if now < self._rung_until:
            return 1e-3  # a ring may come in before the message that it announces
        # ... and long before it, if MPI had to queue the message and its sender computes or sits in MPI by
        # the time it goes out: the bell alone is never trusted for ever.
        return self._LONGEST_SLEEP

    def _sleep(self, left: float | None, pause: float) -> bool:
        nap = pause if left is None else min(pause, left)
        if nap >= self._bell.shortest:
            return self._bell.wait(nap)
        time.sleep(nap)
        return self._bell.wait(0.0)

    def _progress(self) -> None:
        while self._sending and self._sending[0][0].Test():
            _, _, destination = self._sending.popleft()
            self._ring(destination)  # the ring before may have come too early

    def _ring(self, destination: int) -> None:
        if (address := self._bells[destination]) is not None:
            self._bell.ring(address)
