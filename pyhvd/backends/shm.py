"""One node: every collective over a shared window, by the kernels of :mod:`pyhvd.native.shared_memory`.

Owns: making windows (a file in shared memory, or plain memory where the ranks are threads), and the decision
whether a process set can have one. A set whose ranks lie on several nodes, a node without enough shared
memory, or ``PYHVD_FAST_LANE=0`` leave the set to its other fabric; the cause is told once.

The results have the same bits either way: both reduce in rank order with the same kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from pyhvd.arrays import TensorView
from pyhvd.backends.base import Pieces
from pyhvd.backends.host import HostBackend
from pyhvd.dtypes import DtypeInfo, ReduceOp
from pyhvd.transport.fabric import Fabric
from pyhvd.transport.shm import OpenWindow, Segment, ShmFabric, _starts, area_bytes

_log = logging.getLogger("pyhvd")


class ShmBackend(HostBackend):
    """Host collectives over the window; an allreduce is one call without the GIL, which records stages."""

    name = "SHM"

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
