"""Reductions over a shared window, on several hosts also over links: by :mod:`pyhvd.native.shared_memory`.

Owns the decision whether a process set gets windows and links. It gets none if a host has too little shared
memory, if its hosts cannot connect, or with ``PYHVD_FAST_LANE=0``; rank 0 logs the cause once.

Results have the same bits with and without: all ways reduce in the same order by the same kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from pyhvd.backends.base import Pieces, Views
from pyhvd.backends.host import HostBackend
from pyhvd.dtypes import ReduceSpec
from pyhvd.native.shared_memory import Window
from pyhvd.transport.fabric import Fabric
from pyhvd.transport.hosts import HostsFabric, open_hosts_fabric
from pyhvd.transport.links import LinkOptions, NoLinks
from pyhvd.transport.shm import NoWindow, OpenWindow, Segment, ShmFabric, area_bytes

_log = logging.getLogger("pyhvd")


class ShmBackend(HostBackend):
    """Collectives over a window; an allreduce is one call without the GIL."""

    name = "SHM"

    def __init__(self, fabric: ShmFabric, pieces: Pieces, hosts: Sequence[int]) -> None:
        super().__init__(fabric, pieces, hosts)
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


class HostsBackend(ShmBackend):
    """Reduces through a window on each host and links between the hosts."""

    name = "LINKS"


def make_backend(
    fabric: Fabric,
    ranks: Sequence[int],
    hosts: Sequence[int],
    open_window: OpenWindow | None,
    links: LinkOptions | None,
    agreement: bool,
    pieces: Pieces,
    largest_chunk: int,
) -> HostBackend:
    """Return a process set's backend, over windows and links if possible; collective over the set.

    Parameters
    ----------
    fabric : Fabric
        The set's fabric; the backend owns it.
    ranks : sequence of int
        The global ranks of the set.
    hosts : sequence of int
        By set rank, a number that tells the hosts apart.
    open_window : callable or None
        Makes shared memory; None: no windows.
    links : LinkOptions or None
        How to make links between hosts; None: none.
    agreement : bool
        Whether the hosts shall be able to agree over the links.
    pieces : Pieces
        The sizes of pieces.
    largest_chunk : int
        No chunk will have more bytes.
    """
    several = len(set(hosts)) > 1
    opened: HostsFabric | NoLinks | Segment | NoWindow | None = None
    if open_window is not None and several and links is not None:
        chunk = pieces.chunk_size
        opened = open_hosts_fabric(fabric, ranks, hosts, open_window, links, agreement, chunk, largest_chunk)
    elif open_window is not None and not several:
        opened = open_window(fabric, area_bytes(largest_chunk))
    if isinstance(opened, HostsFabric):
        return HostsBackend(opened, pieces, hosts)
    if isinstance(opened, Segment):
        window = Window(fabric.rank, opened.areas, pieces.chunk_size, largest_chunk)
        return ShmBackend(ShmFabric(fabric, opened, window), pieces, hosts)
    if opened is not None and fabric.rank == 0:
        level = logging.DEBUG if opened.expected else logging.WARNING
        what = "links between the hosts of" if several else "shared memory for"
        _log.log(level, "no %s %d ranks, so they use MPI: %s", what, fabric.size, opened.cause)
    return HostBackend(fabric, pieces, hosts)
