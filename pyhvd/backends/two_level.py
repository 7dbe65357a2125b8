"""Allreduces on several hosts that have no links: in two levels, over MPI.

The ranks of a host reduce a piece among themselves; each then owns a slice of it. The owners of a slice on
all hosts, its rail, reduce their partial results over MPI. Then the ranks of each host gather the slices. So
a rank exchanges messages with one rank of each other host, and a host sends 2 n (H-1)/H bytes, as with links.
The order of additions is that of :class:`~pyhvd.backends.host.HostBackend`, and so are the bits.

The algorithm is the torus of Mikami et al., "Massively Distributed SGD: ImageNet/ResNet-50 Training in a
Flash", 2018, with pyhvd's allreduce on a rail.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from pyhvd import _fusion
from pyhvd.arrays import Bytes, address
from pyhvd.backends.base import Pieces
from pyhvd.backends.host import HostBackend, rows_of
from pyhvd.dtypes import ReduceSpec
from pyhvd.native.shared_memory import MAX_LOCAL
from pyhvd.transport.fabric import Fabric, Unavailable, allgather_bytes
from pyhvd.transport.link_layout import hosts_in_order
from pyhvd.transport.shm import OpenWindow, Segment, ShmFabric, area_bytes, open_fabric

PIECE_MOST = 16 << 20
"""Bytes up to which a piece grows with the ranks of a host: each rank has three buffers of that size."""
_LOCAL, _RAIL = 0, 1  # tags of the subsets
_log = logging.getLogger("pyhvd")


def piece_across(staging_size: int, local_ranks: int) -> int:
    """Return the bytes of a piece of an allreduce in two levels: for each rail a staging size, if it may."""
    return max(staging_size, min(staging_size * local_ranks, PIECE_MOST))


class TwoLevelBackend(HostBackend):
    """Collectives on hosts of equally many ranks; an allreduce has two levels, the others have one.

    Parameters
    ----------
    fabric, pieces, hosts
        See :class:`~pyhvd.backends.host.HostBackend`.
    local : Fabric
        Of this host's ranks; owned.
    rail : Fabric
        Of the ranks with this one's place on all hosts, in the order of the hosts' lowest ranks; owned.
    """

    def __init__(
        self, fabric: Fabric, pieces: Pieces, hosts: Sequence[int], local: Fabric, rail: Fabric
    ) -> None:
        super().__init__(fabric, pieces, hosts)
        self._local = local
        self._rail = HostBackend(rail, pieces, range(rail.size))

    @property
    def piece_size(self) -> int:
        """Most bytes that an allreduce reduces at once."""
        return piece_across(self.pieces.staging_size, self._local.size)

    def reduce_everywhere(self, send: Bytes, out: Bytes, spec: ReduceSpec) -> None:
        """Reduce a piece to all ranks, first among those of each host; ``out`` may be ``send``."""
        item = spec.info.itemsize
        counts = [n * item for n in rows_of(len(send) // item, self._local.size)]
        first, mine = sum(counts[: self._local.rank]), counts[self._local.rank]
        box = self._buffer("box", mine * self._local.size)
        self._local.alltoallv(send, counts, box, [mine] * self._local.size)
        partial = self._buffer("partial", mine)
        blocks = address(box) + mine * np.arange(self._local.size, dtype=np.int64)
        _fusion.reduce(address(partial), blocks, mine // item, spec.info.code, spec.op, 1.0)
        self._rail.reduce_everywhere(partial, out[first : first + mine], spec)
        self._local.allgatherv(out, counts)

    def resize(self, pieces: Pieces) -> None:
        """Change the size of pieces on both levels."""
        super().resize(pieces)
        self._rail.resize(pieces)
        if isinstance(self._local, ShmFabric):
            self._local.window.resize(pieces.chunk_size)

    def abort(self, note: bytes) -> None:
        """Make the ranks that wait for this one fail, on both levels."""
        for fabric in (self._local, self._rail.fabric):
            fabric.abort(note)
        super().abort(note)

    def close(self) -> None:
        """Free buffers and fabrics; collective."""
        self._rail.close()
        self._local.close()
        super().close()


def make_two_levels(
    fabric: Fabric, pieces: Pieces, hosts: Sequence[int], open_window: OpenWindow, largest_chunk: int
) -> TwoLevelBackend | None:
    """Return a backend with a window on each host that has the memory for it; collective.

    None: the hosts have different numbers of ranks, or one each, or more than a window can have.
    """
    by_host = hosts_in_order(hosts)
    ranks = len(by_host[0])
    if not 1 < ranks <= MAX_LOCAL or any(len(each) != ranks for each in by_host):
        return None
    here = next(each for each in by_host if fabric.rank in each)
    local = fabric.subset(here, _LOCAL)
    opened = open_window(local, area_bytes(largest_chunk))
    cause = opened.cause if isinstance(opened, Unavailable) and not opened.expected else ""
    causes = [text.decode() for text in allgather_bytes(fabric, cause.encode()) if text]
    if causes and fabric.rank == 0:
        _log.warning("no shared memory on a host, so its ranks reduce by MPI among themselves: %s", causes[0])
    if isinstance(opened, Segment):
        local = open_fabric(local, opened, pieces.chunk_size, largest_chunk)
    rail = fabric.subset([each[local.rank] for each in by_host], _RAIL)
    return TwoLevelBackend(fabric, pieces, hosts, local, rail)
