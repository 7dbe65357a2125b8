"""A fabric over memory that the ranks of one node share."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pyhvd.arrays import Bytes, address
from pyhvd.native import shared_memory
from pyhvd.transport.fabric import Aborted, Fabric

LINE = 128


@dataclass(slots=True)
class Segment:
    """Memory that all ranks of a set can reach.

    Attributes
    ----------
    areas : list of int
        Address of each rank's part, in this process.
    memory : object
        Keeps it alive.
    """

    areas: list[int]
    memory: object


@dataclass(frozen=True, slots=True)
class NoWindow:
    """Why a set gets no window; ``expected`` if nothing is amiss."""

    cause: str
    expected: bool = False


OpenWindow = Callable[[Fabric, int], Segment | NoWindow]
"""Makes shared memory of so many bytes per rank; collective, with the same outcome on every rank."""


def area_bytes(largest_chunk: int) -> int:
    """Return the bytes of shared memory that each rank of a set needs."""
    return shared_memory.area_bytes(largest_chunk) + LINE


def aligned(start: int) -> int:
    """Return the first address on a line of its own."""
    return -(-start // LINE) * LINE


class ShmFabric:
    """Moves bytes through the window; a fabric like any other.

    Parameters
    ----------
    inner : Fabric
        The set's other fabric: for making subsets, and to meet while windows are opened and closed. Owned.
    segment : Segment
        The window's memory; owned.
    chunk_size : int
        Bytes of a chunk: each rank has three slots, so that packing, reducing and unpacking overlap.
    largest_chunk : int
        Bytes of a slot: chunks may grow to this.
    """

    def __init__(self, inner: Fabric, segment: Segment, chunk_size: int, largest_chunk: int) -> None:
        self.rank = inner.rank
        self.size = inner.size
        self.inner = inner
        self._segment = segment
        self._ending = threading.Lock()  # the watch's thread may abort what the runtime's gives up
        self.window = shared_memory.Window(inner.rank, segment.areas, chunk_size, largest_chunk)
        self.window.clear()
        inner.barrier()

    def allgather(self, send: Bytes, recv: Bytes) -> None:
        """Gather blocks of one length."""
        self._gather(address(send), recv, [len(send)] * self.size)

    def allgatherv(self, buffer: Bytes, counts: Sequence[int]) -> None:
        """Gather in place."""
        self._gather(address(buffer) + sum(counts[: self.rank]), buffer, counts)

    def alltoallv(
        self, send: Bytes, send_counts: Sequence[int], recv: Bytes, recv_counts: Sequence[int]
    ) -> None:
        """Send block r to rank r."""
        sizes = [np.array(counts, np.int64) for counts in (send_counts, recv_counts)]
        starts = [_starts(counts) for counts in (send_counts, recv_counts)]
        self.check(
            self.window.alltoall(address(send), sizes[0], starts[0], address(recv), sizes[1], starts[1])
        )

    def exchange(
        self, send: Bytes, send_counts: Sequence[int], recv: Bytes, recv_counts: Sequence[int]
    ) -> None:
        """Send block r to rank r."""
        self.alltoallv(send, send_counts, recv, recv_counts)

    def swap(self, partner: int, send: Bytes, recv: Bytes) -> None:
        """Give each other blocks; what other pairs do holds up nobody."""
        self.check(self.window.pairwise_exchange(partner, address(send), len(send), address(recv), len(recv)))

    def broadcast(self, buffer: Bytes, root: int) -> None:
        """Copy the root's buffer to every rank's."""
        counts = np.zeros(self.size, np.int64)
        counts[root] = len(buffer)
        here = address(buffer)
        self.check(self.window.gather(here, here, counts, np.zeros(self.size, np.int64)))

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self.check(self.window.barrier())

    def subset(self, ranks: Sequence[int], tag: int) -> Fabric:
        """Return the other fabric's subset: whether it gets a window is decided anew."""
        return self.inner.subset(ranks, tag)

    def abort(self, note: bytes) -> None:
        """Let no rank wait any longer, neither in the window nor on the way to another one."""
        with self._ending:
            if self._segment.memory is not None:
                self.window.abort(note)
        self.inner.abort(note)

    def close(self) -> None:
        """Give up window and fabric; collective."""
        with self._ending:
            self._segment.memory = None
        self.inner.close()

    def check(self, done: bool) -> None:
        """Raise :class:`~pyhvd.transport.fabric.Aborted` if something in the window was not done to its end."""
        if not done:
            raise Aborted(self.window.note() or b"")

    def _gather(self, send: int, recv: Bytes, counts: Sequence[int]) -> None:
        self.check(self.window.gather(send, address(recv), np.array(counts, np.int64), _starts(counts)))


def _starts(counts: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.fromiter(itertools.accumulate(counts, initial=0), np.int64, len(counts) + 1)
