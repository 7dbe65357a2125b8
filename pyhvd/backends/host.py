"""Host arrays over a fabric: every collective, for MPI and for ranks as threads alike.

Reductions are direct: each rank receives the others' parts of its own slice (all-to-all), reduces them with
pyhvd's kernels in rank order 0 .. p-1, and the slices are gathered. Per rank 2 n (p-1)/p bytes travel, as in
a ring, in 2 steps. An element's bits therefore depend on nothing but the ranks' values: not on the MPI
library, nor on the size of the message, nor on what else lies in the buffer, nor on where. (An MPI_Allreduce
of a fused buffer gives no such promise: its order of summation changes with message size and with position.)
float16 and bfloat16 accumulate in float32 and are rounded once.

Tensors are walked in windows of ``staging_size`` bytes, which stay in the cache: small ones are packed
together, large ones go straight from and to the caller's memory. No buffer grows with the tensors, and no
count comes near 2**31.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from pyhvd import _fusion
from pyhvd.arrays import Bytes, TensorView, address
from pyhvd.backends import adasum
from pyhvd.backends.base import PhaseHook, Pieces, no_phase
from pyhvd.dtypes import DtypeInfo, ReduceOp
from pyhvd.transport.fabric import Fabric

FLAT = 64 * 1024
"""At most so many bytes, over all ranks, are gathered and reduced everywhere, in one step instead of two."""

Window = list[tuple[int, int, int]]


def windows(counts: Sequence[int], limit: int) -> Iterator[Window]:
    """Cut tensors into windows of at most ``limit`` elements: lists of (tensor, first element, count).

    A tensor of half a window or more rides alone, so that it needs no packing; smaller ones share. Where a
    window begins and ends is the same on every rank, as it follows from the counts alone.
    """
    shared: Window = []
    room = limit
    for index, count in enumerate(counts):
        if 2 * count >= limit:
            for first in range(0, count, limit):
                yield [(index, first, min(limit, count - first))]
        elif count:
            if count > room:
                yield shared
                shared, room = [], limit
            shared.append((index, 0, count))
            room -= count
    if shared:
        yield shared


def rows_of(extent: int, size: int) -> list[int]:
    """Return how many rows of dimension 0 each rank gets: the first ``extent % size`` ranks get one more."""
    base, more = divmod(extent, size)
    return [base + (rank < more) for rank in range(size)]


class HostBackend:
    """Runs agreed collectives on host arrays; see the module's docstring.

    Parameters
    ----------
    fabric : Fabric
        Moves the bytes; owned.
    pieces : Pieces
        Its staging size is that of a window (1-4 MiB are best for MPI on one node).
    """

    name = "MPI"

    def __init__(self, fabric: Fabric, pieces: Pieces) -> None:
        self.phase: PhaseHook = no_phase
        self.rank = fabric.rank
        self.size = fabric.size
        self.fabric = fabric
        self.pieces = pieces
        self._buffers: dict[str, Bytes] = {}

    # -- reductions ----------------------------------------------------------------------------------

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
        """Reduce tensors that ride together; see :class:`~pyhvd.backends.base.Backend`."""
        item = info.itemsize
        for window in windows(counts, max(self.pieces.staging_size // item, 1)):
            nbytes = item * sum(count for _, _, count in window)
            tensor, first, _ = window[0]
            source, target = sources[tensor], targets[tensor]
            span = slice(first * item, first * item + nbytes)
            alone = len(window) == 1
            if alone and source is not None and prescale == 1.0:
                send = source.bytes[span]
            else:
                send = self._buffer("send", nbytes)
                with self.phase("MEMCPY_IN_FUSION_BUFFER"):
                    self._pack(send, sources, window, info, op, prescale)
            direct = alone and target is not None
            out = target.bytes[span] if direct and target is not None else self._buffer("out", nbytes)
            with self.phase(f"{self.name}_ALLREDUCE"):
                self._reduce_everywhere(send, out, info, op, postscale)
            if not direct:
                ptrs, numbers = self._pieces(targets, window, item)
                with self.phase("MEMCPY_OUT_FUSION_BUFFER"):
                    _fusion.unpack(address(out), ptrs, numbers, info.code)

    def adasum(
        self,
        sources: Sequence[TensorView | None],
        targets: Sequence[TensorView | None],
        counts: Sequence[int],
        info: DtypeInfo,
        prescale: float,
        postscale: float,
    ) -> None:
        """Reduce tensors by Adasum, each by itself; see :mod:`pyhvd.backends.adasum`."""
        for ride in adasum.rides(counts, max(adasum.RIDE // info.itemsize, 1)):
            adasum.Ride(self.fabric, self._buffer, [counts[i] for i in ride], info).run(
                [sources[i] for i in ride], [targets[i] for i in ride], prescale, postscale
            )

    def reducescatter(
        self,
        sources: Sequence[TensorView | None],
        targets: Sequence[TensorView | None],
        shapes: Sequence[tuple[int, ...]],
        info: DtypeInfo,
        op: ReduceOp,
        prescale: float,
        postscale: float,
    ) -> None:
        """Reduce, and leave each rank its own rows; see :class:`~pyhvd.backends.base.Backend`."""
        item = info.itemsize
        row = [math.prod(shape[1:]) for shape in shapes]
        parts = [[n * row[i] for n in rows_of(shape[0], self.size)] for i, shape in enumerate(shapes)]
        starts = [list(itertools.accumulate(part, initial=0)) for part in parts]
        largest = [max(part) for part in parts]
        for window in windows(largest, max(self.pieces.staging_size // item // self.size, 1)):
            for_rank: list[Window] = [
                [(i, starts[i][r] + k, max(min(n, parts[i][r] - k), 0)) for i, k, n in window]
                for r in range(self.size)
            ]
            send_counts = [item * sum(n for _, _, n in pieces) for pieces in for_rank]
            send = self._buffer("send", sum(send_counts))
            self._pack(send, sources, [p for pieces in for_rank for p in pieces], info, op, prescale)
            mine = send_counts[self.rank]
            box = self._buffer("box", mine * self.size)
            self.fabric.alltoallv(send, send_counts, box, [mine] * self.size)
            out = self._buffer("out", mine)
            blocks = address(box) + mine * np.arange(self.size, dtype=np.int64)
            _fusion.reduce(address(out), blocks, mine // item, info.code, op, postscale)
            own = [(i, first - starts[i][self.rank], n) for i, first, n in for_rank[self.rank]]
            ptrs, numbers = self._pieces(targets, own, item)
            _fusion.unpack(address(out), ptrs, numbers, info.code)

    def _reduce_everywhere(
        self, send: Bytes, out: Bytes, info: DtypeInfo, op: ReduceOp, factor: float
    ) -> None:
        """Reduce one window of every rank; ``out`` may be ``send`` itself."""
        nbytes, item, size = len(send), info.itemsize, self.size
        if nbytes * size <= FLAT:
            box = self._buffer("box", nbytes * size)
            self.fabric.allgather(send, box)
            blocks = address(box) + nbytes * np.arange(size, dtype=np.int64)
            _fusion.reduce(address(out), blocks, nbytes // item, info.code, op, factor)
            return
        counts = [n * item for n in rows_of(nbytes // item, size)]
        first = sum(counts[: self.rank])
        mine = counts[self.rank]
        box = self._buffer("box", mine * size)
        self.fabric.alltoallv(send, counts, box, [mine] * size)
        blocks = address(box) + mine * np.arange(size, dtype=np.int64)
        _fusion.reduce(address(out) + first, blocks, mine // item, info.code, op, factor)
        self.fabric.allgatherv(out, counts)

    # -- the other collectives -----------------------------------------------------------------------

    def allgather(
        self, sources: Sequence[TensorView | None], targets: Sequence[Bytes], counts: Sequence[Sequence[int]]
    ) -> None:
        """Concatenate; see :class:`~pyhvd.backends.base.Backend`."""
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
        self,
        sources: Sequence[TensorView | None],
        targets: Sequence[Bytes],
        counts: Sequence[Sequence[int]],
        small: Sequence[int],
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
        """Copy the root's bytes to every rank."""
        if self.size > 1 and len(buffer):
            self.fabric.broadcast(buffer, root)

    def swap_counts(self, counts: Sequence[int]) -> list[int]:
        """Tell rank r ``counts[r]``; return what each rank tells this one."""
        told = np.array(counts, np.int64)
        heard = np.empty(self.size, np.int64)
        words = [8] * self.size
        self.fabric.alltoallv(told.view(np.uint8), words, heard.view(np.uint8), words)
        return [int(count) for count in heard]

    def alltoall(
        self, send: Bytes, send_counts: Sequence[int], recv: Bytes, recv_counts: Sequence[int]
    ) -> None:
        """Exchange blocks of uneven size; counts in bytes."""
        self.fabric.exchange(send, send_counts, recv, recv_counts)

    def resize(self, pieces: Pieces) -> None:
        """Walk what comes next in windows of another size."""
        self.pieces = pieces

    def agree(self, ok: bool) -> list[int]:
        """Return the ranks on which ``ok`` is false."""
        flags = np.empty(self.size, np.uint8)
        self.fabric.allgather(np.array([ok], np.uint8), flags)
        return [r for r in range(self.size) if not flags[r]]

    def abort(self, note: bytes) -> None:
        """Let no rank wait any longer; not collective; from any thread."""
        self.fabric.abort(note)

    def close(self) -> None:
        """Give up buffers and fabric; collective."""
        self._buffers.clear()
        self.fabric.close()

    # -- staging -------------------------------------------------------------------------------------

    def _buffer(self, use: str, nbytes: int) -> Bytes:
        """Return warm memory for one use; fresh pages would cost more than the copy itself."""
        buffer = self._buffers.get(use)
        if buffer is None or len(buffer) < nbytes:
            buffer = self._buffers[use] = np.empty(max(nbytes, 4096), np.uint8)
        return buffer[:nbytes]

    def _pieces(
        self, tensors: Sequence[TensorView | None], window: Window, item: int
    ) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], np.ndarray[tuple[int], np.dtype[np.int64]]]:
        """Return addresses (0 where a rank has joined) and element counts of a window's pieces."""
        bases = {i: view.ptr if (view := tensors[i]) is not None else 0 for i, _, _ in window}
        ptrs = np.array([base and base + k * item for i, k, _ in window for base in (bases[i],)], np.int64)
        return ptrs, np.array([n for _, _, n in window], np.int64)

    def _pack(
        self,
        send: Bytes,
        sources: Sequence[TensorView | None],
        window: Window,
        info: DtypeInfo,
        op: ReduceOp,
        factor: float,
    ) -> None:
        ptrs, numbers = self._pieces(sources, window, info.itemsize)
        _fusion.pack(address(send), ptrs, numbers, info.code, op, factor)
