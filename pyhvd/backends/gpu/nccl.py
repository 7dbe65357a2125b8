"""Collectives on device memory by NCCL, through CuPy: one communicator per process set.

Owns the communicator that :mod:`pyhvd.backends.gpu.nccl_init` has connected. Every call queues work on the
communication stream and returns; :meth:`NcclBackend.check` finds failures of that work. NCCL chooses the
order of a sum, so bits may differ from the host's; its minimum and maximum do not define the result for a
NaN.

1. The NCCL calls of a collective, and their counts, follow from what all ranks know: never from a tensor's
   address, nor from whether this rank has joined.
2. Blocks of uneven size use grouped sends and receives, or grouped reductions: ``ncclAllGather`` and
   ``ncclReduceScatter`` need equal sizes.
3. A single tensor moves directly from and to the caller's memory.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import InitVar, dataclass, field
from typing import Any

import numpy as np

from pyhvd.backends.gpu.nccl_bindings import Library, Terms, describe_failure, reduction
from pyhvd.backends.host import shares_of
from pyhvd.devices.base import DeviceBackend, DeviceContext, DeviceView, DeviceViews, Span
from pyhvd.devices.pack_plan import ALIGNMENT, Words, lay_out
from pyhvd.dtypes import Code, ReduceSpec
from pyhvd.errors import TransportError
from pyhvd.transport.fabric import PerRank

ABORT_SECONDS = 4.0
"""Seconds that a closing backend waits for the end of an abort."""

CALL_SECONDS = 1.0
"""Seconds after which a call of NCCL that has not returned counts as blocked."""


class _GoneError(TransportError):
    """A call of a communicator that was aborted or closed."""


@dataclass(eq=False)
class NcclBackend:
    """Runs agreed collectives by NCCL; implements :class:`pyhvd.devices.base.DeviceBackend`.

    Every failure aborts the communicator. That ends the queued work on this device and, over a network, on
    the peers' devices; later calls fail at once. An abort runs on a thread of its own: NCCL may take seconds
    for it, and may wait for the abort of another communicator of this device.

    Parameters
    ----------
    comm : cupy.cuda.nccl.NcclCommunicator
        Owned.
    rank, size : int
        This set rank, and the number of ranks.
    context : DeviceContext
        This rank's device, which has a packer.
    library : Library
        NCCL.
    by_host : callable
        Makes the backend for the few reductions that NCCL lacks; called when one is first needed.

    Attributes
    ----------
    failure : str
        Why the communicator was aborted or closed.
    """

    name = "NCCL"
    sums_wide = False

    comm: Any
    rank: int
    size: int
    context: InitVar[DeviceContext]
    library: Library
    by_host: Callable[[], DeviceBackend]
    failure: str = ""
    # The watchdog's thread may abort while the runtime's thread closes.
    _ending: threading.Lock = field(default_factory=threading.Lock)
    _aborting: threading.Thread | None = None
    # Held while a thread is in a call of the communicator, which an abort would free.
    _calling: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self, context: DeviceContext) -> None:
        assert context.packer is not None  # usable_version() raises an error for a device without a packer
        self.stream, self._room = context.stream, context.buffer.room
        self._device, self._packer = context.device, context.packer
        self._byte = self.library.NCCL_UINT8
        self._by_host = functools.cache(self.by_host)

    # -- reductions ----------------------------------------------------------------------------------

    def allreduce_room(self, counts: Sequence[int], spec: ReduceSpec, *, joined: bool) -> int:
        packs = len(counts) > 1 or joined
        return lay_out(counts, spec.info.itemsize)[1] * spec.info.itemsize if packs else 0

    def allreduce(
        self, sources: DeviceViews, targets: DeviceViews, counts: Sequence[int], spec: ReduceSpec
    ) -> None:
        """Reduce fused tensors in one buffer, or a single tensor in place."""
        terms = reduction(self.library, spec.info.code, spec.op)  # the same on all ranks
        if terms is None:
            self._by_host().allreduce(sources, targets, counts, spec)
            return
        with self._guarded():
            if self._is_direct(sources, targets, spec):
                (source,), (target,), (count,) = sources, targets, counts
                assert source is not None
                assert target is not None
                given = source.ptr
                if spec.prescale != 1.0:
                    given = target.ptr
                    self._scale(source.ptr, given, count, spec.info.code, spec.prescale)
                self._reduce(self.comm.allReduce, given, target.ptr, count, terms)
                self._scale(target.ptr, target.ptr, count, spec.info.code, spec.postscale)
                return
            offsets, total = lay_out(counts, spec.info.itemsize)
            if len(counts) == 1:
                total = counts[0]  # the same count as on ranks that reduce directly
            with self._room(total * spec.info.itemsize) as buffer:
                self._pack(buffer, offsets, _addresses(sources), counts, spec)
                self._reduce(self.comm.allReduce, buffer, buffer, total, terms)
                self._unpack(buffer, offsets, targets, counts, spec)

    def reducescatter_room(self, shapes: Sequence[tuple[int, ...]], spec: ReduceSpec, *, joined: bool) -> int:
        parts, _ = shares_of(shapes, self.size)
        blocks = [max(part) for part in parts]
        if len(shapes) == 1 and not joined and spec.prescale == 1.0:
            return 0
        total = lay_out(blocks, spec.info.itemsize)[1] * self.size
        return (total + lay_out(blocks[:1], spec.info.itemsize)[1]) * spec.info.itemsize

    def reducescatter(
        self, sources: DeviceViews, targets: DeviceViews, shapes: Sequence[tuple[int, ...]], spec: ReduceSpec
    ) -> None:
        """Reduce; each rank gets its own rows of dimension 0.

        Fused tensors are packed into one block per rank; all blocks have the longest one's length.
        """
        terms = reduction(self.library, spec.info.code, spec.op)  # the same on all ranks
        if terms is None:
            self._by_host().reducescatter(sources, targets, shapes, spec)
            return
        info = spec.info
        parts, starts = shares_of(shapes, self.size)
        with self._guarded():
            if len(shapes) == 1:
                self._scatter_one(sources[0], targets[0], parts[0], spec, terms)
                return
            offsets, block = lay_out([max(part) for part in parts], info.itemsize)
            ptrs = _addresses(sources)
            firsts = np.array(starts, np.int64)[:, :-1].T * info.itemsize
            counts = np.array(parts, np.int64).T.reshape(-1)
            where = (offsets + block * np.arange(self.size)[:, None]).reshape(-1)
            froms = np.where(ptrs, ptrs + firsts, 0).reshape(-1)
            with self._room(block * self.size * info.itemsize) as buffer:
                out = buffer + block * self.rank * info.itemsize
                self._pack(buffer, where, froms, counts, spec)
                self._reduce(self.comm.reduceScatter, buffer, out, block, terms)
                mine = [part[self.rank] for part in parts]
                self._unpack(out, offsets, targets, mine, spec)

    def _scatter_one(
        self,
        source: DeviceView | None,
        target: DeviceView | None,
        parts: Sequence[int],
        spec: ReduceSpec,
        terms: Terms,
    ) -> None:
        """Reduce one tensor's rows, directly or through a buffer."""
        info, mine = spec.info, parts[self.rank]
        packs = source is None or spec.prescale != 1.0
        via_buffer = target is None or (spec.postscale != 1.0 and target.ptr % ALIGNMENT != 0)
        first = -(-sum(parts) * info.itemsize // ALIGNMENT) * ALIGNMENT if packs else 0
        with self._room(first + mine * info.itemsize if packs or via_buffer else 0) as buffer:
            begin = np.zeros(1, np.int64)
            if packs:
                self._pack(buffer, begin, _addresses([source]), [sum(parts)], spec)
            send = source.ptr if source is not None and not packs else buffer
            recv = target.ptr if target is not None and not via_buffer else buffer + first
            self._reduce_rows(send, recv, parts, info.itemsize, terms)
            if via_buffer:
                self._unpack(recv, begin, [target], [mine], spec)
            else:
                self._scale(recv, recv, mine, info.code, spec.postscale)

    def _reduce(
        self, collective: Callable[..., None], send: int, recv: int, count: int, terms: Terms
    ) -> None:
        kind, how, numbers = terms
        if count:
            collective(send, recv, count * numbers, kind, how, self.stream)

    def _reduce_rows(self, send: int, recv: int, parts: Sequence[int], itemsize: int, terms: Terms) -> None:
        """Reduce each rank's rows of one tensor to that rank, without a buffer."""
        if len(set(parts)) == 1:
            self._reduce(self.comm.reduceScatter, send, recv, parts[0], terms)
            return
        kind, how, numbers = terms
        with self._group():
            for root, count in enumerate(parts):
                if count:
                    self.comm.reduce(send, recv, count * numbers, kind, how, root, self.stream)
                send += count * itemsize

    # -- the other collectives -----------------------------------------------------------------------

    def allgather(self, sources: DeviceViews, targets: Sequence[Span], counts: Sequence[PerRank]) -> None:
        """Concatenate; rank r's block of tensor i has ``counts[i][r]`` bytes."""
        uneven = [i for i, each in enumerate(counts) if len(set(each)) > 1]
        even = [i for i, each in enumerate(counts) if len(set(each)) == 1 and each[0]]
        with self._guarded():
            with self._group():
                for i in even:
                    source, nbytes = sources[i], counts[i][0]
                    assert source is not None  # a rank that has joined has a count of 0, so counts are uneven
                    self.comm.allGather(source.ptr, targets[i].ptr, nbytes, self._byte, self.stream)
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
        """Copy the root's bytes to all ranks."""
        with self._guarded():
            if buffer.nbytes:
                self.comm.broadcast(buffer.ptr, buffer.ptr, buffer.nbytes, self._byte, root, self.stream)

    def alltoall(self, send: Span, send_counts: PerRank, recv: Span, recv_counts: PerRank) -> None:
        """Send the r-th block to rank r; blocks are contiguous, counts are bytes."""
        out, into = _places(send.ptr, send_counts), _places(recv.ptr, recv_counts)
        me = self.rank
        with self._guarded():
            if send_counts[me]:
                self._device.copy(into[me], out[me], send_counts[me], self.stream)
            with self._group():
                self._exchange(out, send_counts, into, recv_counts)

    def _exchange(self, out: PerRank, given: PerRank, into: PerRank, taken: PerRank) -> None:
        """Queue the sends to, and receives from, all other ranks; called inside a group."""
        for step in range(1, self.size):
            to, source = (self.rank + step) % self.size, (self.rank - step) % self.size
            if given[to]:
                self.comm.send(out[to], given[to], self._byte, to, self.stream)
            if taken[source]:
                self.comm.recv(into[source], taken[source], self._byte, source, self.stream)

    # -- failure and closing ------------------------------------------------------------------------

    def check(self) -> None:
        """Raise an error if NCCL reports that queued work has failed.

        Raises
        ------
        TransportError
            Queued work has failed, and the communicator is aborted.
        """
        with self._guarded():
            self.comm.check_async_error()

    def abort(self, why: str) -> None:
        """Make later calls fail, begin to end the queued work, and return; not collective.

        Any thread may call it, even while another thread is inside NCCL.
        """
        with self._ending:
            if self.failure:
                return
            self.failure = why
            self._aborting = threading.Thread(target=self._abort, name="pyhvd-nccl-abort", daemon=True)
        self._aborting.start()

    def _abort(self) -> None:
        """Free the communicator when no thread is in a call of it; a call that blocks ends only by this."""
        free = self._calling.acquire(timeout=CALL_SECONDS)
        self._device.take_thread()
        with suppress(Exception):  # a failed communicator may raise its error again
            self.comm.abort()
        if free:
            self._calling.release()

    def close(self) -> None:
        """Free the communicator; collective. Queued work must be done."""
        if self._by_host.cache_info().currsize:
            self._by_host().close()
        with self._ending:
            first, self.failure = not self.failure, self.failure or "it has been closed"
        if first:
            self.comm.destroy()
        elif self._aborting is not None:
            self._aborting.join(ABORT_SECONDS)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            with self._calling:
                if self.failure:
                    raise _GoneError(f"NCCL's communicator is gone: {self.failure}")
                yield
        except _GoneError:
            raise
        except Exception as exc:
            text = f"NCCL failed on {self._device.name}: {describe_failure(exc)}"
            self.abort(text)
            raise TransportError(text) from exc

    @contextmanager
    def _group(self) -> Iterator[None]:
        """Group the NCCL calls inside; always end the group."""
        self.library.groupStart()
        try:
            yield
        except BaseException:
            with suppress(Exception):
                self.library.groupEnd()
            raise
        self.library.groupEnd()

    # -- packing ---------------------------------------------------------------------------------------

    @staticmethod
    def _is_direct(sources: DeviceViews, targets: DeviceViews, spec: ReduceSpec) -> bool:
        """Return whether a single tensor needs no buffer; scaling needs its address aligned."""
        if len(sources) != 1 or sources[0] is None or targets[0] is None:
            return False
        scaled = (sources[0].ptr, spec.prescale), (targets[0].ptr, spec.postscale)
        return all(factor == 1.0 or ptr % ALIGNMENT == 0 for ptr, factor in scaled)

    def _scale(self, source: int, target: int, count: int, code: Code, factor: float) -> None:
        """Multiply by unpacking a buffer of one tensor: packing would write beyond its last element."""
        if factor != 1.0:
            one = np.zeros(1, np.int64), np.array([target], np.int64), np.array([count], np.int64)
            self._packer.unpack(source, *one, code, factor, self.stream)

    def _pack(
        self, buffer: int, offsets: Words, ptrs: Words, counts: Words | Sequence[int], spec: ReduceSpec
    ) -> None:
        numbers, code = np.asarray(counts, np.int64), spec.info.code
        self._packer.pack(buffer, offsets, ptrs, numbers, code, spec.op, spec.prescale, self.stream)

    def _unpack(
        self, buffer: int, offsets: Words, targets: DeviceViews, counts: Sequence[int], spec: ReduceSpec
    ) -> None:
        ptrs, numbers, code = _addresses(targets), np.array(counts, np.int64), spec.info.code
        self._packer.unpack(buffer, offsets, ptrs, numbers, code, spec.postscale, self.stream)


def _addresses(views: DeviceViews) -> Words:
    """Return the address of each tensor; 0 if this rank has joined."""
    return np.array([0 if view is None else view.ptr for view in views], np.int64)


def _places(ptr: int, counts: Sequence[int]) -> list[int]:
    """Return the addresses of contiguous blocks."""
    return list(itertools.accumulate(counts, initial=ptr))[:-1]
