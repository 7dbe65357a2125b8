"""Collectives on device memory through host memory: for ranks that share a device or cannot use NCCL.

Every collective is cut into pieces, so copies and the host's collective overlap; see
:mod:`pyhvd.devices.staging_pipeline`. The process set's host backend reduces and scales, so a tensor gets the
same bits as from host memory. Pieces follow from what all ranks know, so they are equal on all ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from pyhvd.arrays import Bytes, TensorView
from pyhvd.backends.host import HostBackend, Window, shares_of, windows
from pyhvd.devices.base import DeviceContext, DeviceView, DeviceViews, Span
from pyhvd.devices.pack_plan import Words, lay_out
from pyhvd.devices.staging_pipeline import Pipeline, StagedCopy, TransferPiece
from pyhvd.dtypes import BY_CODE, Code, DtypeInfo, ReduceOp, ReduceSpec
from pyhvd.transport.fabric import PerRank

_BYTE = BY_CODE[Code.UINT8]


class StagedBackend:
    """Runs collectives through the host; see :class:`pyhvd.devices.base.DeviceBackend`.

    Parameters
    ----------
    host : HostBackend
        The process set's backend; not owned. A piece has its piece size, or its staging size.
    context : DeviceContext
        This rank's device; without a packer each tensor is copied by itself.
    """

    name = "STAGED"
    sums_wide = True
    failure = ""

    def __init__(self, host: HostBackend, context: DeviceContext) -> None:
        self.rank, self.size, self.stream = host.rank, host.size, context.stream
        self._host = host
        self._device, self._packer = context.device, context.packer
        self._pipeline, self._room = Pipeline(context.device, context.stream), context.buffer.room

    def check(self) -> None:
        """Do nothing: queued copies wait for no other rank."""

    def abort(self, why: str) -> None:
        """Do nothing: queued copies wait for no other rank."""

    def close(self) -> None:
        """Do nothing: the pipeline's memory is freed with this object."""

    # -- reductions ----------------------------------------------------------------------------------

    def allreduce_room(self, counts: Sequence[int], spec: ReduceSpec, *, joined: bool) -> int:  # noqa: ARG002
        return lay_out(counts, spec.info.itemsize)[1] * spec.info.itemsize if len(counts) > 1 else 0

    def allreduce(
        self, sources: DeviceViews, targets: DeviceViews, counts: Sequence[int], spec: ReduceSpec
    ) -> None:
        """Reduce fused tensors; several share a buffer."""
        froms, tos = _present(sources), _present(targets)
        info = spec.info
        offsets, total = lay_out(counts, info.itemsize)
        if len(counts) == 1:
            total = counts[0]
        fuses = bool(froms) and len(counts) > 1

        def reduce(given: Bytes, result: Bytes) -> None:
            source, target = (TensorView(given, info), TensorView(result, info)) if froms else (None, None)
            count = len(given) // info.itemsize
            self._host.allreduce([source], [target], [count], spec)

        with self._room(total * info.itemsize if fuses else 0) as buffer:
            down, up = (buffer, buffer) if fuses else (froms[0].ptr, tos[0].ptr) if froms else (0, 0)
            if fuses:
                self._gather(buffer, offsets, froms, info)
            self._pipeline.run(
                TransferPiece(reduce, nbytes, nbytes, _whole(down, first, nbytes), _whole(up, first, nbytes))
                for first, nbytes in self._walk(total * info.itemsize, info.itemsize, self._host.piece_size)
            )
            if fuses:
                self._scatter(buffer, offsets, tos, info)

    def reducescatter_room(self, *_: object, **__: object) -> int:
        return 0

    def reducescatter(
        self, sources: DeviceViews, targets: DeviceViews, shapes: Sequence[tuple[int, ...]], spec: ReduceSpec
    ) -> None:
        """Reduce; each rank gets its own rows.

        In a piece all ranks' blocks have one length; bytes beyond a rank's last row are unused.
        """
        froms, tos = _present(sources), _present(targets)
        parts, starts = shares_of(shapes, self.size)
        info, item = spec.info, spec.info.itemsize

        def step(window: Window) -> TransferPiece:
            down, up = [], []
            at = 0
            for i, first, n in window if froms else ():
                for rank in range(self.size):
                    have = max(min(n, parts[i][rank] - first), 0)
                    place = at * self.size + rank * n
                    down.append(_move(place, froms[i].ptr, starts[i][rank] + first, have, item))
                up.append(_move(at, tos[i].ptr, first, max(min(n, parts[i][self.rank] - first), 0), item))
                at += n
            lengths = [n for _, _, n in window]

            def reduce(given: Bytes, result: Bytes) -> None:
                whole, joined = [n * self.size for n in lengths], [None] * len(lengths)
                self._host.reducescatter(
                    _cut(given, [n * item for n in whole], info) if froms else joined,
                    _cut(result, [n * item for n in lengths], info) if froms else joined,
                    [(n,) for n in whole],
                    spec,
                )

            total = sum(lengths) * item
            return TransferPiece(reduce, total * self.size, total, down, up)

        largest = [max(part) for part in parts]
        self._pipeline.run(step(window) for window in windows(largest, self._share(item)))

    # -- the other collectives -----------------------------------------------------------------------

    def allgather(self, sources: DeviceViews, targets: Sequence[Span], counts: Sequence[PerRank]) -> None:
        """Concatenate the ranks' blocks."""
        starts = [list(itertools.accumulate(each, initial=0)) for each in counts]

        def step(window: Window) -> TransferPiece:
            given = [
                [max(min(n, counts[i][r] - first), 0) for r in range(self.size)] for i, first, n in window
            ]
            down, up = [], []
            at = filled = 0
            for (i, first, _), sizes in zip(window, given, strict=True):
                if source := sources[i]:
                    down.append(_move(at, source.ptr, first, sizes[self.rank]))
                at += sizes[self.rank]
                for rank, size in enumerate(sizes):
                    up.append(_move(filled, targets[i].ptr, starts[i][rank] + first, size))
                    filled += size

            def gather(mine: Bytes, everything: Bytes) -> None:
                own = _cut(mine, [sizes[self.rank] for sizes in given], _BYTE)
                outputs = [view.array for view in _cut(everything, [sum(sizes) for sizes in given], _BYTE)]
                self._host.allgather(own, outputs, given)

            return TransferPiece(gather, at, filled, down, up)

        largest = [max(each) for each in counts]
        self._pipeline.run(step(window) for window in windows(largest, self._share(1)))

    def broadcast(self, buffer: Span, root: int) -> None:
        """Copy the root's bytes to all ranks."""
        mine = self.rank == root

        def send(given: Bytes, received: Bytes) -> None:
            self._host.broadcast(given if mine else received, root)

        def step(first: int, nbytes: int) -> TransferPiece:
            copies = _whole(buffer.ptr, first, nbytes)
            if mine:
                return TransferPiece(send, nbytes, 0, down=copies)
            return TransferPiece(send, 0, nbytes, up=copies)

        spans = self._walk(buffer.nbytes, 1, self._host.pieces.staging_size)
        self._pipeline.run(step(first, nbytes) for first, nbytes in spans)

    def alltoall(self, send: Span, send_counts: PerRank, recv: Span, recv_counts: PerRank) -> None:
        """Send the r-th block to rank r; the longest block of all ranks sets the number of pieces."""
        share = self._share(1)
        longest = np.empty(self.size, np.int64)
        mine = np.array([max(*send_counts, *recv_counts)], np.int64)
        self._host.fabric.allgather(mine.view(np.uint8), longest.view(np.uint8))

        def step(first: int) -> TransferPiece:
            out, down = _blocks(send.ptr, send_counts, first, share)
            back, up = _blocks(recv.ptr, recv_counts, first, share)

            def exchange(given: Bytes, received: Bytes) -> None:
                self._host.alltoall(given, out, received, back)

            return TransferPiece(exchange, sum(out), sum(back), down, up)

        self._pipeline.run(step(first) for first in range(0, int(longest.max()), share))

    # -- pieces --------------------------------------------------------------------------------------

    def _walk(self, nbytes: int, item: int, most: int) -> Iterator[tuple[int, int]]:
        """Yield the pieces of contiguous bytes, of at most `most`: (first byte, number of bytes)."""
        piece = max(most // item, 1) * item
        for first in range(0, nbytes, piece):
            yield first, min(piece, nbytes - first)

    def _share(self, item: int) -> int:
        """Return the elements of each rank in a piece that all ranks share."""
        return max(self._host.pieces.staging_size // self.size // item, 1)

    # -- fusion --------------------------------------------------------------------------------------

    def _gather(self, buffer: int, offsets: Words, sources: Sequence[DeviceView], info: DtypeInfo) -> None:
        if self._packer is not None:
            self._packer.pack(buffer, offsets, *_table(sources), info.code, ReduceOp.SUM, 1.0, self.stream)
            return
        for first, view in zip(offsets.tolist(), sources, strict=True):
            self._device.copy(buffer + first * info.itemsize, view.ptr, view.nbytes, self.stream)

    def _scatter(self, buffer: int, offsets: Words, targets: Sequence[DeviceView], info: DtypeInfo) -> None:
        if self._packer is not None:
            self._packer.unpack(buffer, offsets, *_table(targets), info.code, 1.0, self.stream)
            return
        for first, view in zip(offsets.tolist(), targets, strict=True):
            self._device.copy(view.ptr, buffer + first * info.itemsize, view.nbytes, self.stream)


def _present(views: DeviceViews) -> list[DeviceView]:
    """Return all views, or none if this rank has joined."""
    return [view for view in views if view is not None]


def _whole(ptr: int, first: int, nbytes: int) -> list[StagedCopy]:
    """Return the copy of a whole slot from byte ``first`` of memory on, or none if this rank has joined."""
    return [StagedCopy(0, ptr + first, nbytes)] if ptr else []


def _table(views: Sequence[DeviceView]) -> tuple[Words, Words]:
    return np.array([view.ptr for view in views], np.int64), np.array(
        [view.count for view in views], np.int64
    )


def _move(place: int, ptr: int, first: int, count: int, item: int = 1) -> StagedCopy:
    """Return the copy of elements between element ``place`` of a slot and element ``first`` of memory."""
    return StagedCopy(place * item, ptr + first * item, count * item)


def _blocks(ptr: int, counts: Sequence[int], first: int, share: int) -> tuple[list[int], list[StagedCopy]]:
    """Return the bytes of one piece of each rank's block, and their copies; contiguous in the slot."""
    sizes, moves = [], []
    at = start = 0
    for count in counts:
        size = max(min(share, count - first), 0)
        moves.append(_move(at, ptr, start + first, size))
        sizes.append(size)
        at += size
        start += count
    return sizes, moves


def _cut(memory: Bytes, sizes: Sequence[int], info: DtypeInfo) -> list[TensorView]:
    """Cut memory into contiguous views; sizes are bytes."""
    ends = list(itertools.accumulate(sizes))
    return [TensorView(memory[end - size : end], info) for end, size in zip(ends, sizes, strict=True)]
