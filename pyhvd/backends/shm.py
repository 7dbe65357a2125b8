"""One node: every collective over a shared window, by the kernels of :mod:`pyhvd.native.shared_memory`.

Owns: making windows (a file in shared memory, or plain memory where the ranks are threads), and the decision
whether a process set can have one. A set whose ranks lie on several nodes, a node without enough shared
memory, or ``PYHVD_FAST_LANE=0`` leave the set to its other fabric; the cause is told once.

The results have the same bits either way: both reduce in rank order with the same kernels.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pyhvd.arrays import Bytes, TensorView, address
from pyhvd.backends.base import Aborted, Block, Fabric, Pieces
from pyhvd.backends.host import HostBackend
from pyhvd.dtypes import DtypeInfo, ReduceOp
from pyhvd.native import shared_memory

_log = logging.getLogger("pyhvd")

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
        self.check(self.window.swap(partner, address(send), len(send), address(recv), len(recv)))

    def broadcast(self, buffer: Bytes, root: int) -> None:
        """Copy the root's buffer to every rank's."""
        counts = np.zeros(self.size, np.int64)
        counts[root] = len(buffer)
        here = address(buffer)
        self.check(self.window.gather(here, here, counts, np.zeros(self.size, np.int64)))

    def takes_devices(self) -> str:
        """Ask the other fabric: a window is no way for memory on devices."""
        return self.inner.takes_devices()

    def trade(self, send: Sequence[Block], recv: Sequence[Block], patience: float | None = None) -> None:
        """Send blocks by the other fabric."""
        self.inner.trade(send, recv, patience)

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
        """Raise :class:`~pyhvd.backends.base.Aborted` if something in the window was not done to its end."""
        if not done:
            raise Aborted(self.window.note() or b"")

    def _gather(self, send: int, recv: Bytes, counts: Sequence[int]) -> None:
        self.check(self.window.gather(send, address(recv), np.array(counts, np.int64), _starts(counts)))


class ShmBackend(HostBackend):
    """Host collectives over the window; an allreduce is one call without the GIL, which records stages."""

    carrier = "SHM"

    def __init__(self, fabric: ShmFabric, pieces: Pieces) -> None:
        super().__init__(fabric, pieces)
        self.window = fabric.window
        self._check = fabric.check

    def resize(self, pieces: Pieces) -> None:
        """Change the size of the window's chunks, and of what else is walked."""
        super().resize(pieces)
        self.window.resize(pieces.chunk_size)

    def allreduce(
        self,
        sources: Sequence[TensorView | None],
        targets: Sequence[TensorView | None],
        counts: Sequence[int],
        info: DtypeInfo,
        op: ReduceOp,
        prescale: float,
        postscale: float,
    ) -> None:
        """Reduce tensors that ride together, straight from and to the callers' memory."""
        srcs = np.array([0 if view is None else view.ptr for view in sources], np.int64)
        dsts = np.array([0 if view is None else view.ptr for view in targets], np.int64)
        self._check(self.window.allreduce(srcs, dsts, _starts(counts), info.code, op, prescale, postscale))


def make_backend(
    fabric: Fabric, open_window: OpenWindow | None, pieces: Pieces, largest_chunk: int
) -> HostBackend:
    """Return a set's backend: over a window if it can have one. Collective over the set.

    Parameters
    ----------
    fabric : Fabric
        Reaches the set's ranks; owned by the backend from now on.
    open_window : callable, optional
        None where windows are switched off.
    pieces : Pieces
        Into which tensors are cut.
    largest_chunk : int
        Bytes to which the window's chunks may grow later.
    """
    opened = open_window(fabric, area_bytes(largest_chunk)) if open_window is not None else None
    if isinstance(opened, Segment):
        return ShmBackend(ShmFabric(fabric, opened, pieces.chunk_size, largest_chunk), pieces)
    if opened is not None and fabric.rank == 0:
        level = logging.DEBUG if opened.expected else logging.WARNING
        _log.log(level, "no shared memory for %d ranks, who go through MPI: %s", fabric.size, opened.cause)
    return HostBackend(fabric, pieces)


def _starts(counts: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.fromiter(itertools.accumulate(counts, initial=0), np.int64, len(counts) + 1)
