"""Reductions over a shared window, on several hosts also over links: by :mod:`pyhvd.native.shared_memory`.

Owns the decision whether a process set gets windows and links. It gets none with ``PYHVD_FAST_LANE=0``, and
no links if a host has too little shared memory, if its hosts cannot connect, or if there are too many; rank 0
logs the cause once. Without links an allreduce may still have two levels.

Results have the same bits with and without: all ways reduce in the same order by the same kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from pyhvd.arrays import flat_bytes
from pyhvd.backends.base import Pieces, Views
from pyhvd.backends.host import HostBackend, Shapes, shares_of
from pyhvd.backends.two_level import make_two_levels
from pyhvd.dtypes import ReduceSpec
from pyhvd.transport.fabric import Fabric, Unavailable
from pyhvd.transport.hosts import HostsFabric, chunk_across, open_hosts_fabric
from pyhvd.transport.links import LinkOptions
from pyhvd.transport.moves import MOST_BLOCKS, Ints, Portions
from pyhvd.transport.shm import OpenWindow, Segment, ShmFabric, area_bytes, open_fabric

_log = logging.getLogger("pyhvd")


class ShmBackend(HostBackend):
    """Collectives over a window; an allreduce is one call without the GIL."""

    name = "SHM"

    def __init__(self, fabric: ShmFabric, pieces: Pieces, hosts: Sequence[int]) -> None:
        super().__init__(fabric, pieces, hosts)
        self.window = fabric.window
        self._check = fabric.check
        self._by_slice: Ints | None = None

    def resize(self, pieces: Pieces) -> None:
        """Change the size of the window's chunks and of other pieces."""
        super().resize(pieces)
        self.window.resize(pieces.chunk_size)

    def allreduce(self, sources: Views, targets: Views, counts: Sequence[int], spec: ReduceSpec) -> None:
        """Reduce fused tensors, directly from and to the callers' memory."""
        srcs = np.array([0 if view is None else view.ptr for view in sources], np.int64)
        dsts = np.array([0 if view is None else view.ptr for view in targets], np.int64)
        starts, code = np.cumsum([0, *counts], dtype=np.int64), spec.info.code
        done = self.window.allreduce(srcs, dsts, starts, code, spec.op, spec.prescale, spec.postscale)
        self._check(done=done)

    def reducescatter(self, sources: Views, targets: Views, shapes: Shapes, spec: ReduceSpec) -> None:
        """Reduce; each rank gets its own rows of dimension 0."""
        if self._by_slice is not None and len(self._by_slice) > MOST_BLOCKS:
            super().reducescatter(sources, targets, shapes, spec)
            return
        for source, target, counts in zip(sources, targets, shares_of(shapes, self.size)[0], strict=True):
            ptrs = np.array([[0 if view is None else view.ptr] for view in (source, target)], np.int64)
            portions = Portions.of(counts, self.rank, self._by_slice)
            terms = spec.info.code, spec.op, spec.prescale, spec.postscale
            whole = np.array([0, sum(counts)], np.int64)
            self._check(done=self.window.allreduce(ptrs[0], ptrs[1], whole, *terms, portions))


class HostsBackend(ShmBackend):
    """Collectives over a window on each host and links between the hosts."""

    name = "LINKS"

    def __init__(self, fabric: HostsFabric, pieces: Pieces, hosts: Sequence[int]) -> None:
        super().__init__(fabric, pieces, hosts)
        self._moves = fabric
        self._by_slice = fabric.layout.by_slice

    def resize(self, pieces: Pieces) -> None:
        """Change the size of the window's chunks and of other pieces."""
        HostBackend.resize(self, pieces)
        self.window.resize(chunk_across(pieces.chunk_size, len(self._moves.hosts)))

    def exchange_counts(self, counts: Sequence[int]) -> list[int]:
        """Send ``counts[r]`` to rank r; return each rank's count for this rank."""
        sent, received = np.array(counts, np.int64), np.empty(self.size, np.int64)
        self._moves.alltoall(flat_bytes(sent), flat_bytes(received))
        return [int(count) for count in received]


def make_backend(
    fabric: Fabric,
    ranks: Sequence[int],
    hosts: Sequence[int],
    open_window: OpenWindow | None,
    links: LinkOptions | None,
    pieces: Pieces,
    largest_chunk: int,
    *,
    agreement: bool,
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
    opened: HostsFabric | Segment | Unavailable | None = None
    if open_window is not None and several and links is not None:
        chunk = pieces.chunk_size
        opened = open_hosts_fabric(
            fabric, ranks, hosts, open_window, links, chunk, largest_chunk, agreement=agreement
        )
    elif open_window is not None and not several:
        opened = open_window(fabric, area_bytes(largest_chunk))
    if isinstance(opened, HostsFabric):
        return HostsBackend(opened, pieces, hosts)
    if isinstance(opened, Segment):
        return ShmBackend(open_fabric(fabric, opened, pieces.chunk_size, largest_chunk), pieces, hosts)
    if opened is not None and fabric.rank == 0:
        level = logging.DEBUG if opened.expected else logging.WARNING
        what = "links between the hosts of" if several else "shared memory for"
        _log.log(level, "no %s %d ranks, so they use MPI: %s", what, fabric.size, opened.cause)
    two = None
    if open_window is not None and several:
        two = make_two_levels(fabric, pieces, hosts, open_window, largest_chunk)
    return two or HostBackend(fabric, pieces, hosts)
