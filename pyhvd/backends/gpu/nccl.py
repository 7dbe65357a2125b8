"""Collectives on device memory by NCCL, through CuPy: one communicator per process set.

Owns the communicator, once :mod:`pyhvd.backends.gpu.nccl_init` has connected it. Every call queues work on the
communication stream and returns; what fails there is found by :meth:`NcclBackend.check`. NCCL sums in an
order of its own, so that bits may differ from the host's, and its minimum and maximum leave open what becomes
of a NaN.

Which calls of NCCL a collective is made of, and with which counts, follows from what all ranks know: never
from where a tensor lies, nor from whether this rank has joined.

Blocks of uneven size go by grouped sends and receives, or reductions, as ``ncclAllGather`` and
``ncclReduceScatter`` know one size alone; a tensor that rides alone goes straight from and to the caller's
memory.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from pyhvd.backends.gpu.nccl_bindings import Library, reduction
from pyhvd.backends.host import rows_of
from pyhvd.devices.base import (
    Device,
    DeviceBackend,
    DeviceView,
    DeviceViews,
    Memory,
    Packer,
    Span,
    Stream,
)
from pyhvd.devices.pack_plan import ALIGNMENT, Words, lay_out
from pyhvd.dtypes import Code, DtypeInfo, ReduceOp
from pyhvd.errors import TransportError

KEPT = 128 * 1024 * 1024
"""Bytes; a larger buffer goes back to the device's pool after use."""


class NcclBackend:
    """Runs agreed collectives by NCCL; implements :class:`pyhvd.devices.base.DeviceBackend`.

    Every failure aborts the communicator, which ends what is queued on the device, here and, over a network,
    with the peers; what comes after it fails at once.

    Parameters
    ----------
    communicator : cupy.cuda.nccl.NcclCommunicator
        Owned.
    rank, size : int
        This set rank, and how many there are.
    device : Device
        This rank's own.
    stream : Stream
        The communication stream.
    packer : Packer
        Moves many tensors at once.
    library : Library
        NCCL.
    by_host : callable
        Returns what carries out, by the host, the few reductions that NCCL has not; made when first needed.
    """

    name = "NCCL"

    def __init__(
        self,
        communicator: Any,
        rank: int,
        size: int,
        device: Device,
        stream: Stream,
        packer: Packer,
        library: Library,
        by_host: Callable[[], DeviceBackend],
    ) -> None:
        self.rank, self.size, self.stream = rank, size, stream
        self._comm = communicator
        self._device = device
        self._packer = packer
        self._library = library
        self._buffer: Memory | None = None
        self._broken = ""
        self._ending = threading.Lock()  # the watch's thread may abort what the runtime's gives up
        self._by_host = functools.cache(by_host)

    def _reduces(self, info: DtypeInfo, op: ReduceOp) -> bool:
        """Return whether NCCL has this reduction: the same on every rank."""
        return reduction(self._library, info.code, op) is not None

    # -- reductions ----------------------------------------------------------------------------------

    def allreduce(
        self,
        sources: DeviceViews,
        targets: DeviceViews,
        counts: Sequence[int],
        info: DtypeInfo,
        op: ReduceOp,
        prescale: float,
        postscale: float,
    ) -> None:
        """Reduce tensors that ride together: in one buffer, or, if there is but one, where it is."""
        if not self._reduces(info, op):
            self._by_host().allreduce(sources, targets, counts, info, op, prescale, postscale)
            return
        with self._guarded():
            if self._is_direct(sources, targets, prescale, postscale):
                (source,), (target,), (count,) = sources, targets, counts
                assert source is not None
                assert target is not None
                given = self._prescaled(source, target.ptr, count, prescale)
                self._reduce(given, target.ptr, count, info.code, op)
                self._scale(target.ptr, target.ptr, count, info.code, postscale)
                return
            offsets, total = lay_out(counts, info.itemsize)
            if len(counts) == 1:
                total = counts[0]  # as on a rank that takes the direct way
            with self._room(total * info.itemsize) as buffer:
                self._pack(buffer, offsets, sources, counts, info, op, prescale)
                self._reduce(buffer, buffer, total, info.code, op)
                self._unpack(buffer, offsets, targets, counts, info, postscale)

    def reducescatter(
        self,
        sources: DeviceViews,
        targets: DeviceViews,
        shapes: Sequence[tuple[int, ...]],
        info: DtypeInfo,
        op: ReduceOp,
        prescale: float,
        postscale: float,
    ) -> None:
        """Reduce, and leave each rank its own rows of dimension 0.

        What rides together is packed into one block per rank, all as long as the longest.
        """
        if not self._reduces(info, op):
            self._by_host().reducescatter(sources, targets, shapes, info, op, prescale, postscale)
            return
        rows = [math.prod(shape[1:]) for shape in shapes]
        sizes = [rows_of(shape[0], self.size) for shape in shapes]
        parts = [[n * row for n in each] for each, row in zip(sizes, rows, strict=True)]
        with self._guarded():
            if len(shapes) == 1:
                self._scatter_one(sources[0], targets[0], parts[0], info, op, prescale, postscale)
                return
            offsets, block = lay_out([max(part) for part in parts], info.itemsize)
            ptrs = _addresses(sources)
            starts = [[0, *itertools.accumulate(part)][: self.size] for part in parts]
            firsts = np.array(starts, np.int64).T * info.itemsize
            counts = np.array(parts, np.int64).T.reshape(-1)
            where = (offsets + block * np.arange(self.size)[:, None]).reshape(-1)
            froms = np.where(ptrs, ptrs + firsts, 0).reshape(-1)
            with self._room(block * self.size * info.itemsize) as buffer:
                out = buffer + block * self.rank * info.itemsize
                self._packer.pack(
                    buffer, where, froms, counts, info.code, info.code, op, prescale, self.stream
                )
                self._reduce_blocks(buffer, out, block, info.code, op)
                mine = [part[self.rank] for part in parts]
                self._unpack(out, offsets, targets, mine, info, postscale)

    def _scatter_one(
        self,
        source: DeviceView | None,
        target: DeviceView | None,
        parts: Sequence[int],
        info: DtypeInfo,
        op: ReduceOp,
        prescale: float,
        postscale: float,
    ) -> None:
        """Reduce one tensor's rows from where they are to where they belong, or by way of a buffer."""
        mine, code = parts[self.rank], info.code
        packs = source is None or prescale != 1.0
        aside = target is None or (postscale != 1.0 and target.ptr % ALIGNMENT != 0)
        first = -(-sum(parts) * info.itemsize // ALIGNMENT) * ALIGNMENT if packs else 0
        with self._room(first + mine * info.itemsize if packs or aside else 0) as buffer:
            begin = np.zeros(1, np.int64)
            if packs:
                self._pack(buffer, begin, [source], [sum(parts)], info, op, prescale)
            send = source.ptr if source is not None and not packs else buffer
            recv = target.ptr if target is not None and not aside else buffer + first
            self._reduce_rows(send, recv, parts, info, op)
            if aside:
                self._unpack(recv, begin, [target], [mine], info, postscale)
            else:
                self._scale(recv, recv, mine, code, postscale)

    def _reduce(self, send: int, recv: int, count: int, code: Code, op: ReduceOp) -> None:
        kind, how, numbers = self._terms(code, op)
        if count:
            self._comm.allReduce(send, recv, count * numbers, kind, how, self.stream)

    def _reduce_blocks(self, send: int, recv: int, count: int, code: Code, op: ReduceOp) -> None:
        kind, how, numbers = self._terms(code, op)
        if count:
            self._comm.reduceScatter(send, recv, count * numbers, kind, how, self.stream)

    def _reduce_rows(self, send: int, recv: int, parts: Sequence[int], info: DtypeInfo, op: ReduceOp) -> None:
        """Reduce one tensor's rows, each rank's to that rank, straight from memory to memory."""
        if len(set(parts)) == 1:
            self._reduce_blocks(send, recv, parts[0], info.code, op)
            return
        kind, how, numbers = self._terms(info.code, op)
        with self._group():
            for root, count in enumerate(parts):
                if count:
                    self._comm.reduce(send, recv, count * numbers, kind, how, root, self.stream)
                send += count * info.itemsize

    def _terms(self, code: Code, op: ReduceOp) -> tuple[int, int, int]:
        found = reduction(self._library, code, op)
        if found is None:
            raise ValueError(f"NCCL has no {op.name} of {code.name}")
        return found

    # -- the other collectives -----------------------------------------------------------------------

    def allgather(
        self, sources: DeviceViews, targets: Sequence[Span], counts: Sequence[Sequence[int]]
    ) -> None:
        """Concatenate; ``counts[i][r]`` is the number of bytes that rank r gives to tensor i."""
        uneven = [i for i, each in enumerate(counts) if len(set(each)) > 1]
        even = [i for i, each in enumerate(counts) if len(set(each)) == 1 and each[0]]
        byte = self._library_type("NCCL_UINT8")
        with self._guarded():
            with self._group():
                for i in even:
                    source, nbytes = sources[i], counts[i][0]
                    assert source is not None  # who has joined gives nothing, and the others give something
                    self._comm.allGather(source.ptr, targets[i].ptr, nbytes, byte, self.stream)
            for i in uneven:
                source, nbytes = sources[i], counts[i][self.rank]
                if source is not None and nbytes:
                    first = targets[i].ptr + sum(counts[i][: self.rank])
                    self._device.copy(first, source.ptr, nbytes, self.stream)
            with self._group():
                for i in uneven:
                    source = sources[i]
                    given = source.ptr if source is not None else 0
                    mine = [counts[i][self.rank]] * self.size
                    self._exchange([given] * self.size, mine, _places(targets[i].ptr, counts[i]), counts[i])

    def broadcast(self, buffer: Span, root: int) -> None:
        """Copy the root's bytes to every rank."""
        byte = self._library_type("NCCL_UINT8")
        with self._guarded():
            if buffer.nbytes:
                self._comm.broadcast(buffer.ptr, buffer.ptr, buffer.nbytes, byte, root, self.stream)

    def alltoall(
        self, send: Span, send_counts: Sequence[int], recv: Span, recv_counts: Sequence[int]
    ) -> None:
        """Exchange blocks of uneven size, which lie one behind the other; counts in bytes."""
        out, into = _places(send.ptr, send_counts), _places(recv.ptr, recv_counts)
        me = self.rank
        with self._guarded():
            if send_counts[me]:
                self._device.copy(into[me], out[me], send_counts[me], self.stream)
            with self._group():
                self._exchange(out, send_counts, into, recv_counts)

    def _exchange(
        self, out: Sequence[int], given: Sequence[int], into: Sequence[int], taken: Sequence[int]
    ) -> None:
        """Send to and receive from every other rank, inside a group."""
        byte = self._library_type("NCCL_UINT8")
        for step in range(1, self.size):
            to, source = (self.rank + step) % self.size, (self.rank - step) % self.size
            if given[to]:
                self._comm.send(out[to], given[to], byte, to, self.stream)
            if taken[source]:
                self._comm.recv(into[source], taken[source], byte, source, self.stream)

    # -- failure, and the end ------------------------------------------------------------------------

    def check(self) -> None:
        """Ask NCCL whether anything that is queued has failed.

        Raises
        ------
        TransportError
            It has; the communicator has been aborted, here or by an earlier failure.
        """
        with self._guarded():
            self._comm.check_async_error()

    def abort(self, why: str) -> None:
        """End what is queued on the device, and let everything that comes fail; not collective.

        Any thread may call it, also while another is inside NCCL.
        """
        if self._is_first_to_end(why):
            with suppress(Exception):  # a communicator that has failed may say so again
                self._comm.abort()

    def close(self) -> None:
        """Give up the communicator and the buffer; collective. What was queued has to have passed."""
        self._buffer = None
        if self._by_host.cache_info().currsize:
            self._by_host().close()
        if self._is_first_to_end("it has been closed"):
            self._comm.destroy()

    def _is_first_to_end(self, why: str) -> bool:
        """Return whether the communicator still has to be given up, by whoever asks first."""
        with self._ending:
            first = not self._broken
            if first:
                self._broken = why
        return first

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        if self._broken:
            raise TransportError(f"NCCL's communicator is gone: {self._broken}")
        try:
            with self._device.acting():
                yield
        except Exception as exc:
            text = f"NCCL failed on {self._device.name}: {type(exc).__name__}: {exc}"
            self.abort(text)
            raise TransportError(text) from exc

    @contextmanager
    def _group(self) -> Iterator[None]:
        """Let calls be carried out as one; a group that was begun is always ended."""
        self._library.groupStart()
        try:
            yield
        except BaseException:
            with suppress(Exception):
                self._library.groupEnd()
            raise
        self._library.groupEnd()

    # -- memory ----------------------------------------------------------------------------------------

    @contextmanager
    def _room(self, nbytes: int) -> Iterator[int]:
        """Lend memory on the device for work of the communication stream; for nothing, address 0."""
        memory = self._buffer
        if not nbytes:
            yield 0
            return
        if memory is None or memory.nbytes < nbytes:
            self._buffer = None  # it goes back first
            memory = self._device.allocate(nbytes, self.stream)
            if nbytes <= KEPT:
                self._buffer = memory
        yield memory.ptr

    @staticmethod
    def _is_direct(sources: DeviceViews, targets: DeviceViews, prescale: float, postscale: float) -> bool:
        """Return whether a tensor goes from where it is to where it belongs; a factor wants whole vectors."""
        if len(sources) != 1 or sources[0] is None or targets[0] is None:
            return False
        scaled_from = (sources[0].ptr if prescale != 1.0 else 0, targets[0].ptr if postscale != 1.0 else 0)
        return all(ptr % ALIGNMENT == 0 for ptr in scaled_from)

    def _prescaled(self, source: DeviceView, target: int, count: int, factor: float) -> int:
        """Return where the source is, times the factor; at ``target`` if it had to be multiplied."""
        if factor == 1.0:
            return source.ptr
        self._scale(source.ptr, target, count, source.info.code, factor)
        return target

    def _scale(self, source: int, target: int, count: int, code: Code, factor: float) -> None:
        """Multiply, by unpacking a buffer of one tensor: packing would write beyond its last element."""
        if factor != 1.0:
            one = np.zeros(1, np.int64), np.array([target], np.int64), np.array([count], np.int64)
            self._packer.unpack(source, *one, code, code, factor, self.stream)

    def _pack(
        self,
        buffer: int,
        offsets: Words,
        sources: DeviceViews,
        counts: Sequence[int],
        info: DtypeInfo,
        op: ReduceOp,
        factor: float,
    ) -> None:
        ptrs, numbers = _addresses(sources), np.array(counts, np.int64)
        self._packer.pack(buffer, offsets, ptrs, numbers, info.code, info.code, op, factor, self.stream)

    def _unpack(
        self,
        buffer: int,
        offsets: Words,
        targets: DeviceViews,
        counts: Sequence[int],
        info: DtypeInfo,
        factor: float,
    ) -> None:
        ptrs, numbers = _addresses(targets), np.array(counts, np.int64)
        self._packer.unpack(buffer, offsets, ptrs, numbers, info.code, info.code, factor, self.stream)

    def _library_type(self, name: str) -> int:
        return int(getattr(self._library, name))


def _addresses(views: DeviceViews) -> Words:
    """Return the address of each tensor, 0 where a rank has joined."""
    return np.array([0 if view is None else view.ptr for view in views], np.int64)


def _places(ptr: int, counts: Sequence[int]) -> list[int]:
    """Return where blocks begin that lie one behind the other."""
    return list(itertools.accumulate(counts, initial=ptr))[:-1]
