"""Collectives on host arrays over any fabric.

An allreduce has two steps: each rank receives the other ranks' parts of its own slice (all-to-all) and
reduces them by pyhvd's kernels: the ranks of each host in their order, then the hosts' partial results in the
order of the hosts' lowest ranks; then all ranks gather the slices. A rank sends 2 n
(p-1)/p bytes, as in a ring. float16 and bfloat16 accumulate in float32. They are rounded at the end, and
before it once on each host with several ranks, if there are several hosts.

1. An element's bits depend on the ranks' values alone: not on the MPI library, the message size, or the other
   tensors in the buffer. (MPI_Allreduce promises less: its order of summation depends on size and position.)
2. Tensors are cut into windows of ``piece_size`` bytes, which stay in the cache where there is one level.
   Small tensors are packed; large ones move directly from and to the caller's memory.
3. No buffer grows with the tensors, and no count comes near 2**31.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from pyhvd import _fusion
from pyhvd.arrays import Bytes, address
from pyhvd.backends import adasum
from pyhvd.backends.base import Phases, Pieces, Views
from pyhvd.dtypes import ReduceSpec
from pyhvd.transport.fabric import Fabric, PerRank
from pyhvd.transport.link_layout import hosts_in_order

FLAT = 64 * 1024
"""Up to this number of bytes, over all ranks, an allreduce is one step: gather, and reduce on all ranks."""

Window = list[tuple[int, int, int]]
Shapes = Sequence[tuple[int, ...]]
Addresses = np.ndarray[tuple[int], np.dtype[np.int64]]


def batches(counts: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Yield batches of tensors: lists of indices; several tensors have at most ``limit`` elements together.

    Empty tensors are in no batch.
    """
    shared: list[int] = []
    room = limit
    for index, count in enumerate(counts):
        if 2 * count >= limit:
            yield [index]
        elif count:
            if count > room:
                yield shared
                shared, room = [], limit
            shared.append(index)
            room -= count
    if shared:
        yield shared


def windows(counts: Sequence[int], limit: int) -> Iterator[Window]:
    """Yield windows of at most ``limit`` elements: lists of (tensor, first element, count).

    A tensor of half a window or more gets windows of its own, without packing; smaller ones share. Windows
    follow from the counts alone, so they are equal on all ranks.
    """
    for batch in batches(counts, limit):
        if len(batch) > 1:
            yield [(index, 0, counts[index]) for index in batch]
        else:
            (index,) = batch
            for first in range(0, counts[index], limit):
                yield [(index, first, min(limit, counts[index] - first))]


def rows_of(extent: int, size: int) -> list[int]:
    """Return each rank's number of rows of dimension 0; the first ``extent % size`` ranks get one more."""
    base, more = divmod(extent, size)
    return [base + (rank < more) for rank in range(size)]


def shares_of(shapes: Shapes, size: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return, by tensor, each rank's number of elements in a reducescatter, and where they begin."""
    rows = [math.prod(shape[1:]) for shape in shapes]
    parts = [[n * row for n in rows_of(shape[0], size)] for shape, row in zip(shapes, rows, strict=True)]
    return parts, [list(itertools.accumulate(part, initial=0)) for part in parts]


class HostBackend:
    """Runs agreed collectives on host arrays, for one process set.

    Ranks are set ranks: 0 .. size-1. All of them call the same methods in the same order.

    Parameters
    ----------
    fabric : Fabric
        Moves the bytes; owned.
    pieces : Pieces
        The staging size is a window's size (1-4 MiB are best for MPI on one node).
    hosts : sequence of int
        By set rank, a number that tells the hosts apart.
    """

    name = "MPI"  # its phases' names start with it

    def __init__(self, fabric: Fabric, pieces: Pieces, hosts: Sequence[int]) -> None:
        self.phases: Phases = Phases()
        self.rank = fabric.rank
        self.size = fabric.size
        self.fabric = fabric
        self.pieces = pieces
        self._hosts = hosts_in_order(hosts)
        self._buffers: dict[str, Bytes] = {}

    @property
    def piece_size(self) -> int:
        """Most bytes that an allreduce reduces at once."""
        return self.pieces.staging_size

    # -- reductions ----------------------------------------------------------------------------------

    def allreduce(self, sources: Views, targets: Views, counts: Sequence[int], spec: ReduceSpec) -> None:
        """Reduce fused tensors."""
        item = spec.info.itemsize
        for window in windows(counts, max(self.piece_size // item, 1)):
            nbytes = item * sum(count for _, _, count in window)
            tensor, first, _ = window[0]
            source, target = sources[tensor], targets[tensor]
            span = slice(first * item, first * item + nbytes)
            alone = len(window) == 1
            if alone and source is not None and spec.prescale == 1.0:
                send = source.bytes[span]
            else:
                send = self._buffer("send", nbytes)
                with self.phases.phase("MEMCPY_IN_FUSION_BUFFER"):
                    self._pack(send, sources, window, spec)
            direct = alone and target is not None
            out = target.bytes[span] if direct and target is not None else self._buffer("out", nbytes)
            with self.phases.phase(f"{self.name}_ALLREDUCE"):
                self.reduce_everywhere(send, out, spec)
            if not direct:
                ptrs, numbers = self._pieces(targets, window, item)
                with self.phases.phase("MEMCPY_OUT_FUSION_BUFFER"):
                    _fusion.unpack(address(out), ptrs, numbers, spec.info.code)

    def adasum(self, sources: Views, targets: Views, counts: Sequence[int], spec: ReduceSpec) -> None:
        """Reduce tensors by Adasum; see :mod:`pyhvd.backends.adasum`."""
        for batch in batches(counts, max(adasum.BATCH // spec.info.itemsize, 1)):
            adasum.AdasumBatch(self.fabric, self._buffer, [counts[i] for i in batch], spec).run(
                [sources[i] for i in batch], [targets[i] for i in batch]
            )

    def reducescatter(self, sources: Views, targets: Views, shapes: Shapes, spec: ReduceSpec) -> None:
        """Reduce; each rank gets its own rows of dimension 0."""
        item = spec.info.itemsize
        parts, starts = shares_of(shapes, self.size)
        largest = [max(part) for part in parts]
        for window in windows(largest, max(self.pieces.staging_size // item // self.size, 1)):
            for_rank: list[Window] = [
                [(i, starts[i][r] + k, max(min(n, parts[i][r] - k), 0)) for i, k, n in window]
                for r in range(self.size)
            ]
            send_counts = [item * sum(n for _, _, n in pieces) for pieces in for_rank]
            send = self._buffer("send", sum(send_counts))
            self._pack(send, sources, [p for pieces in for_rank for p in pieces], spec)
            out = self._buffer("out", send_counts[self.rank])
            self._reduce_blocks(send, send_counts, out, spec)
            own = [(i, first - starts[i][self.rank], n) for i, first, n in for_rank[self.rank]]
            ptrs, numbers = self._pieces(targets, own, item)
            _fusion.unpack(address(out), ptrs, numbers, spec.info.code)

    def _reduce_blocks(self, send: Bytes, counts: Sequence[int], out: Bytes, spec: ReduceSpec) -> None:
        """Reduce to rank r its ``counts[r]`` bytes; `send` has the blocks in the order of the ranks."""
        mine = counts[self.rank]
        box = self._buffer("box", mine * self.size)
        self.fabric.alltoallv(send, counts, box, [mine] * self.size)
        blocks = address(box) + mine * np.arange(self.size, dtype=np.int64)
        self._sum(address(out), blocks, mine // spec.info.itemsize, spec)

    def reduce_everywhere(self, send: Bytes, out: Bytes, spec: ReduceSpec) -> None:
        """Reduce a piece to all ranks; ``out`` may be ``send``."""
        nbytes, item, size = len(send), spec.info.itemsize, self.size
        if nbytes * size <= FLAT:
            box = self._buffer("box", nbytes * size)
            self.fabric.allgather(send, box)
            blocks = address(box) + nbytes * np.arange(size, dtype=np.int64)
            self._sum(address(out), blocks, nbytes // item, spec)
            return
        counts = [n * item for n in rows_of(nbytes // item, size)]
        first = sum(counts[: self.rank])
        self._reduce_blocks(send, counts, out[first : first + counts[self.rank]], spec)
        self.fabric.allgatherv(out, counts)

    def _sum(self, out: int, blocks: Addresses, count: int, spec: ReduceSpec) -> None:
        """Reduce the ranks' blocks: those of each host, then the hosts' results."""
        code, op, nbytes = spec.info.code, spec.op, count * spec.info.itemsize
        if len(self._hosts) > 1:
            first = address(self._buffer("partials", nbytes * len(self._hosts)))
            partials = first + nbytes * np.arange(len(self._hosts), dtype=np.int64)
            for index, ranks in enumerate(self._hosts):
                if len(ranks) == 1:
                    partials[index] = blocks[ranks[0]]
                else:
                    _fusion.reduce(int(partials[index]), blocks[ranks], count, code, op, 1.0)
            blocks = partials
        _fusion.reduce(out, blocks, count, code, op, spec.postscale)

    # -- the other collectives -----------------------------------------------------------------------

    def allgather(self, sources: Views, targets: Sequence[Bytes], counts: Sequence[PerRank]) -> None:
        """Concatenate the ranks' blocks; rank r's block of tensor i has ``counts[i][r]`` bytes.

        Small tensors share a buffer.
        """
        small = [i for i, each in enumerate(counts) if sum(each) * 2 < self.pieces.staging_size]
        if len(small) > 1:
            self._allgather_packed(sources, targets, counts, small)
        else:
            small = []
        for i in sorted(set(range(len(counts))).difference(small)):
            source = sources[i]
            if source is not None and counts[i][self.rank]:
                first = sum(counts[i][: self.rank])
                targets[i][first : first + counts[i][self.rank]] = source.bytes
            self.fabric.allgatherv(targets[i], counts[i])

    def _allgather_packed(
        self, sources: Views, targets: Sequence[Bytes], counts: Sequence[PerRank], small: Sequence[int]
    ) -> None:
        per_rank = [sum(counts[i][r] for i in small) for r in range(self.size)]
        box = self._buffer("box", sum(per_rank))
        at = sum(per_rank[: self.rank])
        for i in small:
            if source := sources[i]:
                box[at : at + counts[i][self.rank]] = source.bytes
            at += counts[i][self.rank]
        self.fabric.allgatherv(box, per_rank)
        ptrs, numbers = [], []
        filled = {i: address(targets[i]) for i in small}
        for r in range(self.size):
            for i in small:
                ptrs.append(filled[i])
                numbers.append(counts[i][r])
                filled[i] += counts[i][r]
        as_bytes = 0
        _fusion.unpack(address(box), np.array(ptrs, np.int64), np.array(numbers, np.int64), as_bytes)

    def broadcast(self, buffer: Bytes, root: int) -> None:
        """Copy the root's bytes to all ranks."""
        if self.size > 1 and len(buffer):
            self.fabric.broadcast(buffer, root)

    def exchange_counts(self, counts: Sequence[int]) -> list[int]:
        """Send ``counts[r]`` to rank r; return each rank's count for this rank."""
        sent = np.array(counts, np.int64)
        received = np.empty(self.size, np.int64)
        words = [8] * self.size
        self.fabric.alltoallv(sent.view(np.uint8), words, received.view(np.uint8), words)
        return [int(count) for count in received]

    def gather_counts(self, counts: Sequence[int]) -> NDArray[np.int64]:
        """Return, in row r, the counts of rank r."""
        table = np.empty((self.size, self.size), np.int64)
        self.fabric.allgather(np.array(counts, np.int64).view(np.uint8), table.reshape(-1).view(np.uint8))
        return table

    def alltoall(self, send: Bytes, send_counts: PerRank, recv: Bytes, recv_counts: PerRank) -> None:
        """Send the r-th block of ``send`` to rank r; counts are bytes, and may differ."""
        self.fabric.exchange(send, send_counts, recv, recv_counts)

    def resize(self, pieces: Pieces) -> None:
        """Change the size of pieces, between the same two collectives on all ranks."""
        self.pieces = pieces

    def agree(self, *, ok: bool) -> list[int]:
        """Return the ranks on which ``ok`` is false; collective."""
        flags = np.empty(self.size, np.uint8)
        self.fabric.allgather(np.array([ok], np.uint8), flags)
        return [r for r in range(self.size) if not flags[r]]

    def abort(self, note: bytes) -> None:
        """Make the ranks that wait for this one fail; see :meth:`Fabric.abort`."""
        self.fabric.abort(note)

    def close(self) -> None:
        """Free buffers and fabric; collective."""
        self._buffers.clear()
        self.fabric.close()

    # -- staging -------------------------------------------------------------------------------------

    def _buffer(self, use: str, nbytes: int) -> Bytes:
        """Return memory that is kept for one use: fresh pages would cost more than the copy itself."""
        buffer = self._buffers.get(use)
        if buffer is None or len(buffer) < nbytes:
            buffer = self._buffers[use] = np.empty(max(nbytes, 4096), np.uint8)
        return buffer[:nbytes]

    def _pieces(self, tensors: Views, window: Window, item: int) -> tuple[Addresses, Addresses]:
        """Return address, 0 if this rank has joined, and element count of each piece of a window."""
        bases = {i: view.ptr if (view := tensors[i]) is not None else 0 for i, _, _ in window}
        ptrs = np.array([base and base + k * item for i, k, _ in window for base in (bases[i],)], np.int64)
        return ptrs, np.array([n for _, _, n in window], np.int64)

    def _pack(self, send: Bytes, sources: Views, window: Window, spec: ReduceSpec) -> None:
        ptrs, numbers = self._pieces(sources, window, spec.info.itemsize)
        _fusion.pack(address(send), ptrs, numbers, spec.info.code, spec.op, spec.prescale)
