"""A fabric over the shared window of the ranks of one node; collectives run in :mod:`pyhvd.native`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pyhvd.arrays import Bytes, address
from pyhvd.native import shared_memory
from pyhvd.transport.fabric import Aborted, Fabric, Pause, PerRank, Unavailable

LINE = 128


@dataclass(slots=True)
class Segment:
    """Memory that all ranks of a set map.

    Attributes
    ----------
    areas : list of int
        Address of each rank's area, in this process.
    memory : object
        Keeps the mapping alive.
    """

    areas: list[int]
    memory: object


OpenWindow = Callable[[Fabric, int], Segment | Unavailable]
"""``open_window(fabric, nbytes)`` shares nbytes per rank; collective, with the same outcome on all ranks."""


def area_bytes(largest_chunk: int, slots: int = shared_memory.SLOTS) -> int:
    """Return the bytes of shared memory that each rank of a set needs."""
    return shared_memory.area_bytes(largest_chunk, slots) + LINE


def aligned(start: int) -> int:
    """Return the first multiple of :data:`LINE` from an address on."""
    return -(-start // LINE) * LINE


class ShmFabric:
    """Moves bytes through the window; see :class:`pyhvd.transport.fabric.Fabric`.

    Parameters
    ----------
    inner : Fabric
        The set's other fabric, by which ranks make subsets, and open and close windows. Owned.
    segment : Segment
        The window's memory; owned.
    window : Window
        This rank's end of the window.
    """

    def __init__(self, inner: Fabric, segment: Segment, window: shared_memory.Window) -> None:
        self.rank = inner.rank
        self.size = inner.size
        self.inner = inner
        self._segment = segment
        self._ending = threading.Lock()  # the watchdog's thread may abort while the runtime's thread closes
        self.window = window
        window.clear()
        inner.barrier()

    def allgather(self, send: Bytes, recv: Bytes) -> None:
        """Gather blocks of one length."""
        self._gather(address(send), recv, [len(send)] * self.size)

    def allgatherv(self, buffer: Bytes, counts: PerRank) -> None:
        """Gather in place."""
        self._gather(address(buffer) + sum(counts[: self.rank]), buffer, counts)

    def alltoallv(self, send: Bytes, send_counts: PerRank, recv: Bytes, recv_counts: PerRank) -> None:
        """Send block r to rank r."""
        out, into = np.array(send_counts, np.int64), np.array(recv_counts, np.int64)
        self.check(done=self.window.alltoall(address(send), out, address(recv), into))

    exchange = alltoallv

    def pairwise_exchange(self, partner: int, send: Bytes, recv: Bytes) -> None:
        """Exchange blocks with a partner; no pair waits for another."""
        self.check(
            done=self.window.pairwise_exchange(partner, address(send), len(send), address(recv), len(recv))
        )

    def broadcast(self, buffer: Bytes, root: int) -> None:
        """Copy the root's buffer to every rank's."""
        self._gather(address(buffer), buffer, [len(buffer) if r == root else 0 for r in range(self.size)])

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self.check(done=self.window.barrier())

    def subset(self, ranks: Sequence[int], tag: int) -> Fabric:
        """Return the other fabric's subset, which may get a window of its own."""
        return self.inner.subset(ranks, tag)

    def pause_by(self, pause: Pause) -> None:
        """Call ``pause`` while the other fabric waits for ranks; :meth:`abort` ends the window's waits."""
        self.inner.pause_by(pause)

    def abort(self, note: bytes) -> None:
        """Interrupt the ranks that wait in the window, or while they open another one."""
        with self._ending:
            if self._segment.memory is not None:
                self.window.abort(note)
        self.inner.abort(note)

    def close(self) -> None:
        """Free window and fabric; collective."""
        with self._ending:
            self._segment.memory = None
        self.inner.close()

    def check(self, *, done: bool) -> None:
        """Raise :class:`~pyhvd.transport.fabric.Aborted` if a window operation was interrupted."""
        if not done:
            raise Aborted(self.window.note() or b"")

    def _gather(self, send: int, recv: Bytes, counts: PerRank) -> None:
        self.check(done=self.window.gather(send, address(recv), np.array(counts, np.int64)))


def open_fabric(inner: Fabric, segment: Segment, chunk_size: int, largest_chunk: int) -> ShmFabric:
    """Return the fabric of a host's ranks through a window in their memory; it owns both; collective."""
    window = shared_memory.Window(inner.rank, segment.areas, chunk_size, largest_chunk)
    _let_read(inner, window)
    return ShmFabric(inner, segment, window)


def _let_read(inner: Fabric, window: shared_memory.Window) -> None:
    """Let moves read the ranks' memory where it is, if the system lets every rank read every other one's."""
    table = np.empty((inner.size, 3), np.uint64)
    inner.allgather(_bytes(np.array(window.own_memory(), np.uint64)), _bytes(table))
    able, every = np.array([all(window.can_read(*row) for row in table.tolist())]), np.empty(inner.size, bool)
    inner.allgather(_bytes(able), _bytes(every))
    if every.all():
        window.read_peers(table[:, 0].tolist())


def _bytes(array: np.ndarray[Any, Any]) -> Bytes:
    return array.reshape(-1).view(np.uint8)
