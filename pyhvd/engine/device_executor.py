"""The device executor: runs agreed responses whose tensors are on devices.

Owns this rank's device, its communication stream, and the device backends by process set. Only the runtime's
thread calls it. It queues the work of a collective on the communication stream, which waits for the inputs.
The handle completes when all work is queued; its result waits for the event after that work. A stream of the
caller waits for nothing before the caller asks for the result.

Adasum, and every collective while results are checked, goes through host memory, tensor by tensor.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np

from pyhvd.arrays import TensorView, address, flat_bytes
from pyhvd.backends.gpu.nccl import ABORT_SECONDS
from pyhvd.backends.gpu.select import open_backend
from pyhvd.backends.gpu.staged import StagedBackend
from pyhvd.backends.host import HostBackend
from pyhvd.common.text import list_some
from pyhvd.devices.base import Device, DeviceBackend, DeviceContext, DeviceView, Memory, Span, Stream
from pyhvd.devices.fusion_buffer import KEPT
from pyhvd.devices.host_device import HostDevice
from pyhvd.devices.pending import LEAST_POLL_SECONDS, POLL_SECONDS, DeviceWork, PendingArray, Queued
from pyhvd.devices.streams import mark_ready
from pyhvd.dtypes import BY_CODE, Code
from pyhvd.engine.plans import Entries, Shape, allocate, as_splits, gathered, have_memory
from pyhvd.errors import HorovodInternalError, InternalError, TransportError
from pyhvd.negotiation.messages import RequestType, Response
from pyhvd.observe.hang_reporter import RankLocations
from pyhvd.observe.hooks import Instruments
from pyhvd.queue import TensorEntry

SWEEP_SECONDS = 0.01
"""Seconds between two checks of memory that the device may still use."""


@dataclass(eq=False)
class DeviceExecutor:
    """Runs responses of device tensors on one rank.

    Parameters
    ----------
    where : RankLocations
        Where this rank and the others are.
    backends : mapping of int to HostBackend
        Host backends by process set; the executor updates the mapping.
    sets : mapping of int to tuple of int
        Members of every process set.
    hooks : Instruments
        Notified of phases.
    on_host : callable
        Runs a batch whose tensors are in host memory.
    checked : bool
        Whether results are checked; the checks run on the host.
    patience : float
        Seconds that the device may take to end its work before a process set, or the rank, is closed.

    Attributes
    ----------
    work : DeviceWork
        The work that the device may still be doing.
    """

    where: RankLocations
    backends: Mapping[int, HostBackend]
    sets: Mapping[int, tuple[int, ...]]
    hooks: Instruments
    on_host: Callable[[list[Response], Entries], None]
    checked: bool = field(kw_only=True)
    patience: float = field(kw_only=True)

    def __post_init__(self) -> None:
        self._device_context: DeviceContext | None = None
        self._opened: dict[int, DeviceBackend] = {}
        self._reserved: dict[int, int] = {}  # bytes of the fusion buffer that all ranks of a set have
        self.work = DeviceWork()
        self.busy = False  # whether the device may still do work
        self._aborted = ""
        self._run: dict[int, Callable[[DeviceBackend, list[Response], Entries], None]] = {
            RequestType.ALLREDUCE: self._allreduce,
            RequestType.REDUCESCATTER: self._reducescatter,
            RequestType.ALLGATHER: self._allgather,
            RequestType.BROADCAST: self._broadcast,
            RequestType.ALLTOALL: self._alltoall,
        }

    def run(self, batch: list[Response], entries: Entries) -> None:
        """Run a batch of responses, and complete their entries."""
        self.busy = True
        self.work.sweep()
        context = self._settle(entries)
        _await_all(context, _distinct(entries))
        carry_out = self._run.get(batch[0].request.type)
        if carry_out is None or self.checked:
            self._by_host(batch, entries)
        else:
            carry_out(self._backend(batch[0].process_set), batch, entries)

    def look(self, now: float) -> float | None:
        """Release memory that the device no longer uses; return the time (monotonic s) of the next check.

        Raises
        ------
        TransportError
            Queued work has failed.
        """
        self.busy = self.work.sweep()
        if not self.busy:
            return None
        self._check()
        return now + SWEEP_SECONDS

    def _check(self) -> None:
        for backend in self._opened.values():
            backend.check()

    def synchronize(self, timeout: float) -> None:
        """Wait until the device has ended all work queued so far; from any thread but the runtime's.

        Raises
        ------
        HorovodInternalError
            Work was aborted.
        TimeoutError
            It has not ended within ``timeout`` seconds.
        """
        self.await_all(self.work.left()[-1:], timeout)

    def await_all(self, work: Sequence[Queued | PendingArray], timeout: float) -> None:
        """Wait until the device has ended this work; see :meth:`synchronize`. Any thread may call it."""
        began, delay = time.monotonic(), LEAST_POLL_SECONDS
        while not self._failure() and not all(each.has_ended for each in work):
            if time.monotonic() - began > timeout:
                raise TimeoutError(f"{self._unended()} within {timeout:g} s")
            time.sleep(delay)
            delay = min(2 * delay, POLL_SECONDS)
        self.check_aborted()

    def check_aborted(self) -> None:
        """Raise HorovodInternalError if queued work was aborted."""
        if why := self._failure():
            raise HorovodInternalError(f"work on a device was aborted, so results may be wrong: {why}")

    def close_set(self, set_id: int) -> None:
        """Close a process set's backend after the device's work; collective over the set.

        Raises
        ------
        TransportError
            Queued work has failed, or does not end in time.
        """
        if set_id in self._opened:
            self._finish()
            self._opened.pop(set_id).close()
            self._reserved.pop(set_id, None)

    def close(self) -> None:
        """Close the backends, in the order of their sets, as :meth:`close_set` does; collective."""
        self._finish()
        for set_id in sorted(self._opened):
            self._opened.pop(set_id).close()
        self._device_context = None  # its buffer returns to the device's pool

    def abort(self, why: str) -> None:
        """Begin to abort the device's waits for other ranks: a rank has failed.

        Returns at once. Not collective; from any thread.
        """
        self._aborted = self._aborted or why
        for backend in list(self._opened.values()):  # another thread may open one
            backend.abort(why)

    def _failure(self) -> str:
        """Return why queued work was aborted; empty if it was not."""
        backends = list(self._opened.values())
        return self._aborted or next((backend.failure for backend in backends if backend.failure), "")

    def _finish(self) -> None:
        """Wait until the device has ended its work; abort work that takes too long."""
        until = time.monotonic() + (ABORT_SECONDS if self._aborted else self.patience)
        while self.work.sweep():
            if time.monotonic() > until:
                text = f"{self._unended()} in time"
                self.abort(text)
                raise TransportError(text)
            if not self._aborted:
                self._check()
            time.sleep(POLL_SECONDS)

    def _unended(self) -> str:
        devices = dict.fromkeys(work.device.name for work in self.work.left())
        return f"{list_some([*devices])} has not ended its work on {list_some(self.work.names(), show=repr)}"

    # -- device and backend ---------------------------------------------------------------------

    def _settle(self, entries: Entries) -> DeviceContext:
        """Return this rank's device and stream: those of its arrays, or any if the rank has joined."""
        device = next((view.on for view in _distinct(entries)), None)
        if self._device_context is not None and device in (None, self._device_context.device):
            return self._device_context
        if self._device_context is not None and not isinstance(self._device_context.device, HostDevice):
            before, now = self._device_context.device.name, device.name if device else ""
            raise TransportError(
                f"rank {self.where.rank} had joined, and taken part with {before}, before it submitted"
                f" an array on {now}: let each rank use the device of its local rank, or submit an array"
                " before it joins"
            )
        chosen = device or self._own_device()
        self._device_context = DeviceContext.open(chosen)
        for set_id, backend in list(self._opened.items()):
            if isinstance(backend, StagedBackend):
                self._opened[set_id] = StagedBackend(self.backends[set_id], self._device_context)
        return self._device_context

    def _own_device(self) -> Device:
        """Return the device with this rank's local number; host memory if there is none."""
        rank, places = self.where.rank, self.where.places
        here = places[rank].host, places[rank].node
        neighbours = [r for r, place in enumerate(places) if (place.host, place.node) == here]
        try:
            from pyhvd.devices.cupy_device import count_devices, cuda_device
        except ImportError:
            return HostDevice()
        count = count_devices()
        return cuda_device(neighbours.index(rank) % count) if count else HostDevice()

    def _backend(self, set_id: int) -> DeviceBackend:
        if set_id not in self._opened:
            members = self.sets[set_id]
            look = partial(self._why_give_up, [rank for rank in members if rank != self.where.rank])
            self._opened[set_id] = open_backend(self.backends[set_id], self._here, members, look)
        return self._opened[set_id]

    def _why_give_up(self, others: Sequence[int]) -> str:
        """Return why this rank shall not wait for these ranks any more; empty if it may."""
        return self._aborted or next(filter(None, map(self.where.describe_ended, others)), "")

    # -- the verbs -----------------------------------------------------------------------------------

    def _allreduce(self, backend: DeviceBackend, batch: list[Response], entries: Entries) -> None:
        spec = batch[0].request.reduce_spec(backend.size, sums_wide=backend.sums_wide)
        counts = [math.prod(r.request.shape) for r in batch]
        room = backend.allreduce_room(counts, spec, joined=bool(batch[0].joined))
        if not self._reserve(room, batch, entries):
            return
        with self.hooks.phase(f"{backend.name}_ALLREDUCE"):
            backend.allreduce(_sources(entries), _targets(entries), counts, spec)
        self._deliver(backend.stream, entries, _targets(entries))

    def _reducescatter(self, backend: DeviceBackend, batch: list[Response], entries: Entries) -> None:
        spec = batch[0].request.reduce_spec(backend.size, sums_wide=backend.sums_wide)
        shapes = [r.request.shape for r in batch]
        room = backend.reducescatter_room(shapes, spec, joined=bool(batch[0].joined))
        if not self._reserve(room, batch, entries):
            return
        with self.hooks.phase(f"{backend.name}_REDUCESCATTER"):
            backend.reducescatter(_sources(entries), _targets(entries), shapes, spec)
        self._deliver(backend.stream, entries, _targets(entries))

    def _allgather(self, backend: DeviceBackend, batch: list[Response], entries: Entries) -> None:
        shapes, counts = gathered(batch)
        outputs = self._allocate(batch, entries, shapes)
        if outputs is None:
            return
        with self.hooks.phase(f"{backend.name}_ALLGATHER"):
            backend.allgather(_sources(entries), [_span(output) for output in outputs], counts)
        self._deliver(backend.stream, entries, outputs, [response.dims for response in batch])

    def _broadcast(self, backend: DeviceBackend, batch: list[Response], entries: Entries) -> None:
        (response,), (entry,) = batch, entries
        request = response.request
        root = self.sets[response.process_set].index(request.root)
        source, target = _sources(entries)[0], _targets(entries)[0]
        output: DeviceView | Memory | None = target
        if output is None:
            nbytes = math.prod(request.shape) * BY_CODE[request.dtype].itemsize
            output = self._here.device.allocate(nbytes, backend.stream)
        if backend.rank == root and source is not None and target is not None and source is not target:
            self._here.device.copy(target.ptr, source.ptr, source.nbytes, backend.stream)
        with self.hooks.phase(f"{backend.name}_BCAST"):
            backend.broadcast(_span(output), root)
        self._deliver(backend.stream, [entry], [output])

    def _alltoall(self, backend: DeviceBackend, batch: list[Response], entries: Entries) -> None:
        (response,), (entry,) = batch, entries
        source = _sources(entries)[0]
        if entry is None or source is None:
            raise InternalError(f"alltoall {response.request.name!r} was agreed, but is not in flight here")
        with self.hooks.phase(f"{backend.name}_ALLTOALL_COUNTS"):
            received = self.backends[response.process_set].exchange_counts(entry.splits)
        outputs = self._allocate(batch, entries, [(sum(received), *source.shape[1:])])
        if outputs is None:
            return
        row = math.prod(source.shape[1:]) * source.info.itemsize
        counts = [n * row for n in entry.splits], [n * row for n in received]
        with self.hooks.phase(f"{backend.name}_ALLTOALL"):
            backend.alltoall(source.span, counts[0], _span(outputs[0]), counts[1])
        self._deliver(backend.stream, entries, outputs, [as_splits(received)])

    # -- through host memory ------------------------------------------------------------------------------

    def _by_host(self, batch: list[Response], entries: Entries) -> None:
        """Run a batch on host arrays, tensor by tensor, and copy the results to the device."""
        device, stream = self._here.device, self._here.stream
        mirrored = [self._mirror(entry) if entry is not None else None for entry in entries]
        device.synchronize(device.mark(stream))
        self.on_host(batch, mirrored)

    def _mirror(self, entry: TensorEntry) -> TensorEntry:
        """Return an entry of the same tensor in host memory; the copy from the device is queued."""
        source, target = _view(entry.source), _view(entry.target)
        assert source is not None
        device = self._here.device
        given = _host_view(device, source)
        device.copy(given.ptr, source.ptr, source.nbytes, self._here.stream)
        result = given if target is source else None if target is None else _host_view(device, target)
        done = partial(self._send_up, entry)
        return msgspec.structs.replace(entry, source=given, target=result, done=done)

    def _send_up(self, entry: TensorEntry, result: Any, error: BaseException | None) -> None:
        """Complete an entry with a result in host memory."""
        if error is not None:
            entry.done(None, error)
            return
        array, beside = result if isinstance(result, tuple) else (result, None)
        source, target = _view(entry.source), _view(entry.target)
        assert source is not None
        target = target if target is not None else source.empty_like(array.shape)
        device, stream = self._here.device, self._here.stream
        if target is not entry.target:
            mark_ready([target])
        device.wait(stream, target.ready)
        pinned = device.allocate_pinned(max(array.nbytes, 1))
        pinned[: array.nbytes] = flat_bytes(array)
        device.copy(target.ptr, address(pinned), array.nbytes, stream)
        self.work.add(Queued(device, device.mark(stream), [entry.request.name], pinned))
        self._deliver(stream, [entry], [target], None if beside is None else [beside])

    # -- outputs -------------------------------------------------------------------------------------

    @property
    def _here(self) -> DeviceContext:
        assert self._device_context is not None
        return self._device_context

    def _reserve(self, nbytes: int, batch: list[Response], entries: Entries) -> bool:
        """Return whether all ranks have a fusion buffer of this size; else fail the entries on all ranks.

        The ranks agree each time that a set needs more than before, so that none can fail later.
        """
        set_id = batch[0].process_set
        if nbytes <= self._reserved.get(set_id, 0):
            return True
        failure: MemoryError | None = None
        try:
            self._here.buffer.reserve(nbytes)
        except MemoryError as exc:
            failure = exc
        what = [f"a fusion buffer of {nbytes} bytes"] * len(batch)
        ok = have_memory(self.backends[set_id], batch, entries, what, self.sets[set_id], failure)
        self._reserved[set_id] = nbytes if ok and nbytes <= KEPT else 0
        return ok

    def _allocate(
        self, batch: list[Response], entries: Entries, shapes: Sequence[Shape]
    ) -> list[DeviceView | Memory] | None:
        """Allocate outputs in the callers' libraries; a joined rank gets scratch memory."""
        context = self._here
        set_id = batch[0].process_set

        def make(response: Response, entry: TensorEntry | None, shape: Shape) -> DeviceView | Memory:
            source = _view(entry.source) if entry is not None else None
            if source is not None:
                return source.empty_like(shape)
            nbytes = math.prod(shape) * BY_CODE[response.request.dtype].itemsize
            return context.device.allocate(nbytes, context.stream)

        with self.hooks.phase("ALLOCATE_OUTPUT"):
            outputs = allocate(self.backends[set_id], batch, entries, shapes, make, self.sets[set_id])
        views = [output for output in outputs or () if isinstance(output, DeviceView)]
        mark_ready(views)
        _await_all(context, views)
        return outputs

    def _deliver(
        self,
        stream: Stream,
        entries: Entries,
        outputs: Sequence[DeviceView | Memory | None],
        beside: Sequence[Any] | None = None,
    ) -> None:
        """Return results that are ready when the queued work has ended, each with what comes beside it."""
        for entry, output in zip(entries, outputs, strict=True):
            if entry is not None and isinstance(output, DeviceView) and output.home is not None:
                output.library.copy_home(output, stream)
        event = self._here.device.mark(stream)
        mine = [entry for entry in entries if entry is not None]
        used = [(entry.source, entry.target) for entry in mine], list(outputs)
        self.work.add(Queued(self._here.device, event, [entry.request.name for entry in mine], used))
        for number, (entry, output) in enumerate(zip(entries, outputs, strict=True)):
            if entry is not None and isinstance(output, DeviceView):
                pending = PendingArray(output, event)
                entry.done(pending if beside is None else (pending, beside[number]), None)


def _view(view: Any) -> DeviceView | None:
    """Return a view; the ranks have agreed that the tensor is on a device."""
    assert view is None or isinstance(view, DeviceView)
    return view


def _sources(entries: Entries) -> list[DeviceView | None]:
    return [_view(entry.source) if entry is not None else None for entry in entries]


def _targets(entries: Entries) -> list[DeviceView | None]:
    return [_view(entry.target) if entry is not None else None for entry in entries]


def _distinct(entries: Entries) -> list[DeviceView]:
    """Return all views of sources and targets, without duplicates."""
    pairs = zip(_sources(entries), _targets(entries), strict=True)
    found = [view for source, target in pairs for view in (source, None if target is source else target)]
    return [view for view in found if view is not None]


def _await_all(context: DeviceContext, views: Sequence[DeviceView]) -> None:
    """Make the communication stream wait for the views' events; the views of one call share an event."""
    for event in {id(view.ready): view.ready for view in views}.values():
        context.device.wait(context.stream, event)


def _span(memory: DeviceView | Memory) -> Span:
    return Span(memory.ptr, memory.nbytes)


def _host_view(device: Device, view: DeviceView) -> TensorView:
    """Return page-locked memory for a tensor; as 16-bit words for bfloat16, which numpy lacks."""
    dtype = np.uint16 if view.info.code == Code.BFLOAT16 else BY_CODE[view.info.code].name
    memory = device.allocate_pinned(max(view.nbytes, 1))[: view.nbytes]
    return TensorView(memory.view(dtype).reshape(view.shape), view.info)
