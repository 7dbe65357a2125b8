"""Collectives of one node over a shared window, by the kernels of :mod:`pyhvd.native.shared_memory`.

Owns the decision whether a process set gets a window. It gets none if its ranks are on several nodes, if the
node has too little shared memory, or with ``PYHVD_FAST_LANE=0``; rank 0 logs the cause once.

Results have the same bits with and without a window: both ways reduce in rank order by the same kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from pyhvd.backends.base import Pieces, Views
from pyhvd.backends.host import HostBackend
from pyhvd.dtypes import ReduceSpec
from pyhvd.transport.fabric import Fabric
from pyhvd.transport.shm import OpenWindow, Segment, ShmFabric, area_bytes

_log = logging.getLogger("pyhvd")


class ShmBackend(HostBackend):
    """Collectives over a window; an allreduce is one call without the GIL."""

    name = "SHM"

    def __init__(self, fabric: ShmFabric, pieces: Pieces) -> None:
        super().__init__(fabric, pieces)
        self.window = fabric.window
        self._check = fabric.check

    def resize(self, pieces: Pieces) -> None:
        """Change the size of the window's chunks and of other pieces."""
        super().resize(pieces)
        self.window.resize(pieces.chunk_size)

    def allreduce(self, sources: Views, targets: Views, counts: Sequence[int], spec: ReduceSpec) -> None:
        """Reduce fused tensors, directly from and to the callers' memory."""
        srcs = np.array([0 if view is None else view.ptr for view in sources], np.int64)
        dsts = np.array([0 if view is None else view.ptr for view in targets], np.int64)
        starts, code = np.cumsum([0, *counts], dtype=np.int64), spec.info.code
        self._check(self.window.allreduce(srcs, dsts, starts, code, spec.op, spec.prescale, spec.postscale))


def make_backend(
    fabric: Fabric, open_window: OpenWindow | None, pieces: Pieces, largest_chunk: int
) -> HostBackend:
    """Return a process set's backend, over a window if possible; collective over the set.

    The backend owns the fabric. Without ``open_window`` there is no window. No chunk will be larger than
    ``largest_chunk``.
    """
    opened = open_window(fabric, area_bytes(largest_chunk)) if open_window is not None else None
    if isinstance(opened, Segment):
        return ShmBackend(ShmFabric(fabric, opened, pieces.chunk_size, largest_chunk), pieces)
    if opened is not None and fabric.rank == 0:
        level = logging.DEBUG if opened.expected else logging.WARNING
        _log.log(level, "no shared memory for %d ranks, so they use MPI: %s", fabric.size, opened.cause)
    return HostBackend(fabric, pieces)
