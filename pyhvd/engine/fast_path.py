"""The Python half of the fast path: how tensors enter it, and how they leave it.

Owns: opening the fast path, installing the meaning of cache slots, and taking back calls that the ready
table refused or that the coordinator recalled. Such a call becomes entries of the queue. The fast path itself
is :mod:`pyhvd.native.shared_memory`. The runtime's thread runs all but :func:`open_lane`, a collective.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from pyhvd.arrays import TensorView
from pyhvd.backends.host import HostBackend
from pyhvd.backends.shm import ShmBackend
from pyhvd.config import Config
from pyhvd.controller import Worker
from pyhvd.dtypes import ReduceSpec, lookup
from pyhvd.errors import UnsupportedDtypeError
from pyhvd.native.shared_memory import MAX_SLOTS, SETS, CachedCall, FastPath, ready_table_bytes
from pyhvd.negotiation.messages import (
    HOST,
    Request,
    RequestType,
    Response,
    ResponseList,
    bytes_to_bits,
    iter_bits,
)
from pyhvd.observe.metrics import Meter
from pyhvd.queue import TensorEntry, TensorQueue
from pyhvd.transport.arena import Arena
from pyhvd.transport.fabric import Aborted, Fabric
from pyhvd.transport.shm import OpenWindow, Segment

_log = logging.getLogger("pyhvd")

KernelTerms = Callable[[Request, int], ReduceSpec]


def open_lane(
    fabric: Fabric, open_window: OpenWindow | None, backend: HostBackend, config: Config
) -> FastPath | None:
    """Return this rank's end of a new fast path, or None if there cannot be one. Collective.

    Parameters
    ----------
    fabric : Fabric
        Reaches all ranks.
    open_window : callable or None
        Makes shared memory.
    backend : HostBackend
        Backend of all ranks; without a window there is no fast path.
    config : Config
        The knobs, with rank 0's values.
    """
    slots = min(-(-config.cache_capacity // 64) * 64, MAX_SLOTS)
    if open_window is None or not slots or not isinstance(backend, ShmBackend):
        return None
    opened = open_window(fabric, -(-ready_table_bytes(fabric.size) // fabric.size))
    if not isinstance(opened, Segment):
        if fabric.rank == 0:
            _log.warning("no shared memory to agree in, so messages do it: %s", opened.cause)
        return None
    lane = FastPath(
        opened.areas[0],
        opened.memory,
        fabric.rank,
        fabric.size,
        slots,
        config.fusion_threshold,
        config.disable_group_fusion,
        config.cycle_time_ms / 1000,
        _code_of,
    )
    if fabric.rank == 0:
        lane.clear()
    fabric.barrier()
    return lane


def _code_of(dtype: np.dtype[Any]) -> int:
    try:
        return int(lookup(dtype).code)
    except UnsupportedDtypeError:
        return -1


class NoFastPath:
    """A fast path that is off: every call goes by message.

    :class:`FastPathAdapter` overrides each method for a fast path that exists.
    """

    def open_set(self, set_id: int, backend: HostBackend) -> None:
        """Let a process set's allreduces use the fast path, if its ranks share a window."""

    def close_set(self, set_id: int) -> list[TensorEntry]:  # noqa: ARG002
        """Forget a process set; return its tensors in flight."""
        return []

    def close(self, stuck: bool = False) -> list[TensorEntry]:  # noqa: ARG002
        """Accept no further calls; return the tensors in flight. ``stuck``: the thread is blocked."""
        return []

    def forget(self, keep: bool = False) -> None:
        """Release the handles' arrays; with ``keep``, only those that no other rank can reach."""

    def look(self) -> tuple[list[str], bool, int]:
        """Return the names in flight, whether a batch is running, and the position. From any thread."""
        return [], False, 0

    def flush(self) -> None:
        """Mark held calls as ready: a thread waits."""

    def before_sending(self, fresh: list[tuple[int, Request]]) -> list[tuple[int, Request]]:
        """Return the requests to send."""
        return fresh

    def announce(self, number: int, ranks: Iterable[int]) -> bool:  # noqa: ARG002
        """Give a response list its place in the ready log; return False if the log is full."""
        return True

    def enter(self, number: int) -> bool:  # noqa: ARG002
        """Return whether it is a response list's turn; True holds the progress lock until :meth:`leave`."""
        return True

    def leave(self) -> None:
        """Release the progress lock, if :meth:`enter` took it."""

    def tune(self, threshold: int, cycle: float) -> None:
        """Use another fusion threshold (bytes) and cycle time (s)."""

    def prepare(self, message: ResponseList) -> None:
        """Take back the calls that a response list answers."""

    def follow(self, todo: Iterable[Response]) -> None:
        """Take back the calls whose cache slots a response list reassigns."""

    def install(self, todo: Sequence[Response]) -> None:
        """Accept the calls that a response list has put into the cache, once it is carried out."""


class FastPathAdapter(NoFastPath):
    """The fast path as the runtime sees it.

    Parameters
    ----------
    lane : FastPath
        The fast path's Cython object.
    worker : Worker
        This rank's side of the negotiation.
    queue : TensorQueue
        Tensors that go by message.
    terms : callable
        ``terms(request, size)`` returns the reduction's :class:`~pyhvd.dtypes.ReduceSpec`.
    arena : Arena or None
        Shared memory of arrays that need not be copied.
    meter : Meter
        Counts tensors that leave the fast path; the fast path counts those it completes.
    """

    def __init__(
        self,
        lane: FastPath,
        worker: Worker,
        queue: TensorQueue,
        terms: KernelTerms,
        arena: Arena | None,
        meter: Meter,
    ) -> None:
        self._lane = lane
        self._entered = False
        self._arena = arena
        self._worker = worker
        self._queue = queue
        self._terms = terms
        self._meter = meter
        self._unsent: list[tuple[int, Request]] = []
        if arena is not None:
            lane.know_arena(arena.start, arena.nbytes)
        lane.attach(queue.entries, queue.groups, queue.refusals, queue.flush)

    def open_set(self, set_id: int, backend: HostBackend) -> None:
        """Let a process set's allreduces use the fast path, if its ranks share a window."""
        if set_id < SETS and isinstance(backend, ShmBackend):
            starts = [] if self._arena is None else self._arena.starts
            ranks = self._worker.sets[set_id]
            self._lane.open_set(set_id, backend.window, [starts[rank] for rank in ranks if starts])

    def close_set(self, set_id: int) -> list[TensorEntry]:
        """Forget a process set; return its tensors in flight."""
        if not self._lane.has_set(set_id):
            return []
        left = [entry for unit in self._lane.in_flight(set_id) for entry in self._entries(unit)[1]]
        self._lane.close_set(set_id)
        return left

    def close(self, stuck: bool = False) -> list[TensorEntry]:
        """Accept no further calls; return the tensors in flight. ``stuck``: the thread is blocked."""
        self._lane.shut(stuck or self._entered)
        return [entry for unit in self._lane.in_flight() for entry in self._entries(unit)[1]]

    def look(self) -> tuple[list[str], bool, int]:
        """Return the names in flight, whether a batch is running, and the position. From any thread."""
        names = [unit.name for unit in self._lane.in_flight()]
        return names, self._lane.is_running(), self._lane.position()

    def before_sending(self, fresh: list[tuple[int, Request]]) -> list[tuple[int, Request]]:
        """Return the requests to send, after all calls that this rank has marked ready.

        1. Calls that the ready table refused go by message first.
        2. A tensor that this rank rejected is frozen: its next call must not match the others' current call.
        """
        if fresh:
            self._lane.mark_ready()
        first, self._unsent = self._unsent, []
        while (unit := self._lane.refused()) is not None:
            _, entries = self._entries(unit)
            self._queue.adopt(entries)
            first += [(entry.process_set, entry.request) for entry in entries]
        for set_id, request in fresh:
            if request.error and self._lane.has_set(set_id):
                for slot in self._worker.slots_of(set_id, request.name):
                    if slot < self._lane.slots:
                        self._lane.freeze(set_id, slot)
        return first + fresh

    def forget(self, keep: bool = False) -> None:
        """Release the handles' arrays; with ``keep``, only those that no other rank can reach."""
        self._lane.forget(keep=keep)

    def flush(self) -> None:
        """Mark held calls as ready: a thread waits."""
        self._lane.flush()

    def announce(self, number: int, ranks: Iterable[int]) -> bool:
        """Give a response list its place in the ready log; return False if the log is full."""
        return self._lane.announce(number, ranks)

    def enter(self, number: int) -> bool:
        """Return whether it is a response list's turn; True holds the progress lock until :meth:`leave`."""
        self._entered = self._lane.enter(number)
        return self._entered

    def leave(self) -> None:
        """Release the progress lock, if :meth:`enter` took it."""
        if self._entered:
            self._entered = False
            self._lane.leave()

    def tune(self, threshold: int, cycle: float) -> None:
        """Use another fusion threshold (bytes) and cycle time (s)."""
        self._lane.tune(threshold, cycle)

    def prepare(self, message: ResponseList) -> None:
        """Take back the calls that a response list answers: the coordinator recalled their slots."""
        for set_id, data in message.cached.items():
            if self._lane.has_set(set_id):
                names = (
                    self._worker.request_of(set_id, slot).name for slot in iter_bits(bytes_to_bits(data))
                )
                self._take_over(set_id, names)
        for response in message.responses:
            if not response.only or self._worker.rank in response.only:
                self._take_over(response.process_set, (response.request.name,))

    def follow(self, todo: Iterable[Response]) -> None:
        """Take back the calls whose cache slots a response list reassigns."""
        for response in todo:
            if response.slot >= 0 and self._lane.has_set(response.process_set):
                own = self._worker.request_of(response.process_set, response.slot)
                unit = self._lane.retire(response.process_set, response.slot, own)
                if unit is not None:
                    self._convert(unit)

    def install(self, todo: Sequence[Response]) -> None:
        """Accept the calls that a finished response list has put into the cache."""
        for response in todo:
            set_id, slot = response.process_set, response.slot
            if not 0 <= slot < self._lane.slots or not self._lane.has_set(set_id):
                continue
            own = self._worker.request_of(set_id, slot)
            # With a small cache a list may reassign a slot several times: the last one counts.
            on_host = own.device == HOST
            if on_host and own.type == RequestType.ALLREDUCE and own.name == response.request.name:
                spec = self._terms(own, len(self._worker.sets[set_id]))
                self._lane.install(
                    set_id, slot, own, response.version, spec.op, spec.postscale, response.direct
                )

    def _take_over(self, set_id: int, names: Iterable[str]) -> None:
        for name in names:
            if (unit := self._lane.find(set_id, name)) is not None:
                self._convert(unit)

    def _convert(self, unit: CachedCall) -> None:
        """Move a call from the fast path to the queue."""
        known, entries = self._entries(unit)
        self._queue.adopt(entries)
        if known:
            self._meter.submitted(len(entries), 0)
        for entry in entries:
            if known:
                self._worker.adopt(entry.process_set, entry.request)
            else:
                self._unsent.append((entry.process_set, entry.request))

    def _entries(self, unit: CachedCall) -> tuple[bool, list[TensorEntry]]:
        """Take a call; return whether the coordinator may know of it, and its tensors."""
        taken = unit.take()
        if taken is None:
            return False, []
        posted, tensors = taken

        def done(_: Any, error: BaseException | None) -> None:
            if error is not None:
                self._meter.failed(type(error).__name__)
            unit.settle(error)

        return posted > 0, [
            TensorEntry(
                unit.set_id,
                request,
                TensorView(source, lookup(source.dtype)),
                TensorView(target, lookup(target.dtype)),
                done,
                announced_ns=posted,
            )
            for request, source, target in tensors
        ]


class LaneBell:
    """A doorbell in the ready table: the background thread makes progress on the fast path, or sleeps there.

    A bell's address is the rank.
    """

    shortest = 0.0

    def __init__(self, lane: FastPath, rank: int) -> None:
        self._lane = lane
        self._rank = rank

    def ring(self, address: int | None = None) -> None:
        """Ring a bell, by default this rank's own; from any thread; never blocks."""
        self._lane.call(self._rank if address is None else address)

    def wait(self, timeout: float | None) -> bool:
        """Sleep until rung, at most ``timeout`` seconds; return whether it was rung.

        Raises
        ------
        Aborted
            Another rank has aborted a window while this one's engine was, or came, inside.
        """
        rung = bool(self._lane.doze(timeout))
        if (note := self._lane.note()) is not None:
            raise Aborted(note)
        return rung

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
