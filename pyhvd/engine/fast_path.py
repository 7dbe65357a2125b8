"""The Python half of the fast path: how tensors enter it, and how they leave it.

Owns: opening the fast path, installing the meaning of cache slots, and taking back calls that the ready
table refused or that the coordinator recalled. Such a call becomes entries of the queue. The fast path itself
is :mod:`pyhvd.native.shared_memory`. The runtime's thread runs all but :func:`open_fast_path`, a collective.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from pyhvd.arrays import view_at
from pyhvd.backends.host import HostBackend
from pyhvd.backends.shm import ShmBackend
from pyhvd.config import Config
from pyhvd.controller import Worker
from pyhvd.devices.array_libraries import View, adopt
from pyhvd.dtypes import lookup
from pyhvd.engine.plans import HostPlaces, make_plan
from pyhvd.errors import UnsupportedDtypeError
from pyhvd.native.shared_memory import MAX_SLOTS, CachedCall, FastPath, ready_table_bytes
from pyhvd.negotiation.delegation import is_delegated
from pyhvd.negotiation.messages import (
    Request,
    RequestType,
    Response,
    ResponseList,
    bits_to_bytes,
    bytes_to_bits,
    iter_bits,
)
from pyhvd.negotiation.turn_slots import named
from pyhvd.observe.metrics import Meter
from pyhvd.queue import TensorEntry, TensorQueue
from pyhvd.transport.arena import Arena
from pyhvd.transport.control import ControlTransport
from pyhvd.transport.fabric import Aborted, Fabric, allgather_bytes
from pyhvd.transport.hosts import HostsFabric
from pyhvd.transport.link_control import LinkTransport
from pyhvd.transport.moves import Ints
from pyhvd.transport.shm import OpenWindow, Segment
from pyhvd.transport.world import World

_log = logging.getLogger("pyhvd")


def open_fast_path(
    fabric: Fabric, open_window: OpenWindow | None, backend: HostBackend, config: Config
) -> FastPath | None:
    """Return this rank's end of a new fast path, or None if there cannot be one. Collective.

    With the response cache off, or with PYHVD_CHECK, no tensor uses it: then only ranks of several hosts have
    one, for their beats.

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
    if open_window is None or not isinstance(backend, ShmBackend):
        return None
    delegates = config.cache_capacity > 0 and config.check == "off"
    slots = max(min(-(-config.cache_capacity // 64) * 64, MAX_SLOTS), 64)
    on_hosts = backend.fabric if isinstance(backend.fabric, HostsFabric) else None
    if not delegates and on_hosts is None:
        return None
    hosts = [list(range(fabric.size))] if on_hosts is None else on_hosts.hosts
    here = next(ranks for ranks in hosts if fabric.rank in ranks)
    local = fabric if on_hosts is None else fabric.subset(here, 1)
    agreement = None if on_hosts is None else on_hosts.make_agreement()
    opened = open_window(local, -(-ready_table_bytes(len(here), slots, agreement) // len(here)))
    cause = b"" if isinstance(opened, Segment) else opened.cause.encode()
    failed = [text for text in allgather_bytes(fabric, cause) if text]
    if failed or not isinstance(opened, Segment):
        if fabric.rank == 0:
            _log.warning("no shared memory to agree in, so messages do it: %s", failed[0].decode())
        return None
    fast_path = FastPath(
        opened.areas[0],
        opened.memory,
        here.index(fabric.rank),
        len(here),
        slots,
        config.fusion_threshold,
        config.disable_group_fusion,
        config.cycle_time_ms / 1000,
        _code_of,
        agreement,
        delegates,
    )
    if fabric.rank == here[0]:
        fast_path.clear()
    fabric.barrier()
    if on_hosts is not None:
        on_hosts.follow(on_hosts, fast_path)
        fast_path.start_beats()
    return fast_path


def _is_join(request: Request) -> bool:
    return request.type == RequestType.JOIN and not request.error


def _slots_of(calls: Iterable[CachedCall]) -> dict[int, bytes]:
    """Return the slots of calls, by process set, as bit vectors."""
    slots: dict[int, int] = {}
    for call in calls:
        for slot in call.slots():
            slots[call.set_id] = slots.get(call.set_id, 0) | 1 << slot
    return {set_id: bits_to_bytes(bits) for set_id, bits in slots.items()}


def _code_of(dtype: np.dtype[Any]) -> int:
    try:
        return int(lookup(dtype).code)
    except UnsupportedDtypeError:
        return -1


def _view(tensor: Any, request: Request) -> View | None:
    """Return the view of a tensor of a taken call: an array, or (address, shape) if C code gave it."""
    if tensor is None:
        return None
    if isinstance(tensor, tuple):
        at, shape = tensor
        return view_at(at, shape, request.dtype)
    return adopt(tensor, any_layout=True)


class FastPathAdapter:
    """The fast path as the runtime sees it.

    Parameters
    ----------
    fast_path : FastPath
        The fast path's Cython object.
    arena : Arena or None
        Shared memory of arrays that need not be copied.
    fabric : Fabric
        The fabric of all ranks.
    worker : Worker
        This rank's side of the negotiation.
    queue : TensorQueue
        Tensors that go by message.
    meter : Meter
        Counts tensors that leave the fast path; the fast path counts those it completes.

    Attributes
    ----------
    path : FastPath
        The fast path.
    across : bool
        Whether the ranks are on several hosts.
    holds_back : bool
        Whether a request is held back: look again soon.
    """

    def __init__(
        self,
        fast_path: FastPath,
        arena: Arena | None,
        fabric: Fabric,
        worker: Worker,
        queue: TensorQueue,
        meter: Meter,
    ) -> None:
        self.path = fast_path
        self._entered = False
        self._arena = arena
        self._fabric = fabric
        self.across, self.holds_back = fast_path.partial, False
        self._worker = worker
        self._queue = queue
        self._meter = meter
        self._unsent: list[tuple[int, Request]] = []
        self._held: list[tuple[int, Request]] = []
        self._to_recall: dict[int, bytes] = {}
        self._recalled: set[CachedCall] = set()  # for what is held back
        # Of the alltoalls of this response list, by set and slot.
        self._splits: dict[tuple[int, int], Ints] = {}
        self._host_places: dict[int, HostPlaces] = {}  # of the sets on several hosts
        if arena is not None:
            fast_path.know_arena(arena)
        fast_path.attach(queue.entries, queue.groups, queue.refusals, queue.flush)

    def add_set(self, set_id: int) -> None:
        """Note a new process set; until :meth:`open_set` its calls go by message."""
        ranks = self._worker.sets[set_id]
        self._host_places.pop(set_id, None)
        if self.path.serves(set_id, ranks):
            if self.across:  # on one host the coordinator has: again, it would wipe out delegated turn slots
                self.path.open_ready_set(set_id, ranks)
            self.path.add_set(set_id, self._worker.seen)

    def open_set(self, set_id: int, backend: HostBackend) -> None:
        """Let a process set's calls use the fast path, if its ranks can agree there."""
        ranks = self._worker.sets[set_id]
        if isinstance(backend.fabric, HostsFabric) and isinstance(self._fabric, HostsFabric):
            fabric = backend.fabric
            fabric.follow(self._fabric, self.path)
            order = [ranks.index(rank) for each in self._fabric.hosts for rank in each if rank in ranks]
            self._host_places[set_id] = HostPlaces(fabric.layout, fabric.window.chunk, order)
        if isinstance(backend, ShmBackend) and self.path.serves(set_id, ranks):
            starts = [] if self._arena is None else self._arena.starts
            arenas = [starts[rank] for rank in ranks if starts]
            places = self._host_places.get(set_id)
            self.path.open_set(set_id, backend.window, arenas, places)

    def close_set(self, set_id: int) -> list[TensorEntry]:
        """Forget a process set; return its tensors in flight."""
        left: list[TensorEntry] = []
        if self.path.has_set(set_id):
            self.path.retire_set(set_id)
            left = [entry for call in self.path.in_flight(set_id) for entry in self._entries(call)[1]]
        self.path.close_set(set_id)
        return left

    def close(self, *, stuck: bool = False) -> list[TensorEntry]:
        """Accept no further calls; return the tensors in flight. ``stuck``: the thread is blocked."""
        self.path.end(stuck or self._entered)
        self.path.leave_hosts()
        return [entry for call in self.path.in_flight() for entry in self._entries(call)[1]]

    def look(self) -> tuple[list[str], bool, int]:
        """Return the names in flight, whether a batch is running, and the position. From any thread."""
        names = [call.name for call in self.path.in_flight()]
        return names, self.path.is_running(), self.path.position()

    def before_sending(self, fresh: list[tuple[int, Request]]) -> list[tuple[int, Request]]:
        """Return the requests to send, after all calls that this rank has marked ready.

        1. Calls that the ready table refused go by message first.
        2. A tensor that this rank rejected is frozen: its next call must not match the others' current call.
        3. On several hosts, and in turn slots, the coordinator does not take over the marks of slots that it
           recalls: the ranks submit these tensors again. So a refusal waits for the calls that it concerns,
           and whatever the rank submits later to that set waits behind it. A join waits for all such calls of
           all sets. A refused call without a name has a number of its own, and concerns no earlier call.
        """
        if fresh:
            self.path.mark_ready()
        first, self._unsent = self._unsent, []
        while (call := self.path.refused()) is not None:
            _, entries = self._entries(call)
            self._queue.adopt(entries)
            first += [(entry.process_set, entry.request) for entry in entries]
        fresh = self._hold_back(fresh)
        for set_id, request in fresh:
            if request.error and self.path.has_set(set_id):
                for slot in self._worker.slots_of(set_id, request.name):
                    if slot < self.path.slots:
                        self.path.freeze(set_id, slot)
        return first + fresh

    def _hold_back(self, fresh: list[tuple[int, Request]]) -> list[tuple[int, Request]]:
        """Return the requests that need not wait for marked calls, in order."""
        if not self._held and not any(request.error or _is_join(request) for _, request in fresh):
            return fresh
        leaving: list[tuple[int, Request]] = []
        held: list[tuple[int, Request]] = []
        blocking: set[CachedCall] = set()
        for set_id, request in self._held + fresh:
            calls = self._open_calls(set_id, request)
            blocking.update(calls)
            if calls or any(set_id == each for each, _ in held) or (held and _is_join(request)):
                held.append((set_id, request))
            else:
                leaving.append((set_id, request))
        self._held, self.holds_back = held, bool(held)
        self._to_recall = _slots_of(blocking - self._recalled)
        self._recalled = blocking
        return leaving

    def _open_calls(self, set_id: int, request: Request) -> list[CachedCall]:
        """Return the calls in flight that may yet go by message, and that a join or a refusal concerns."""
        if _is_join(request):
            calls = [call for call in self.path.in_flight() if self.across or call.has_turn]
            return [call for call in calls if call.is_open()]
        if not self.across or not request.error or not self.path.has_set(set_id):
            return []
        names = (request.name, request.group) if request.group else (request.name,)
        slots = {slot for name in names for slot in self._worker.slots_of(set_id, name)}
        return [
            call
            for call in self.path.in_flight(set_id)
            if call.is_open() and not slots.isdisjoint(call.slots())
        ]

    def to_recall(self) -> dict[int, bytes]:
        """Return, by process set, the slots that the coordinator must recall for what is held back; once."""
        slots, self._to_recall = self._to_recall, {}
        return slots

    def enter(self, number: int) -> bool:
        """Return whether it is a response list's turn; True holds the progress lock until :meth:`leave`."""
        self._entered = self.path.enter(number)
        return self._entered

    def leave(self) -> None:
        """Release the progress lock, if :meth:`enter` took it."""
        if self._entered:
            self._entered = False
            self.path.leave()

    def waiting(self, patience: float) -> dict[int, bytes]:
        """Return, by process set, the slots that this rank marked so long (s) ago; rank 0 may not see it."""
        since = time.monotonic_ns() - int(patience * 1e9)
        return _slots_of(call for call in self.path.in_flight() if 0 < call.marked_ns() <= since)

    def prepare(self, message: ResponseList) -> None:
        """Take back the calls that a response list answers: the coordinator recalled their slots."""
        for set_id, data in message.cached.items():
            if self.path.has_set(set_id):
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
            if response.slot >= 0 and self.path.has_set(response.process_set):
                own = self._worker.request_of(response.process_set, response.slot)
                call = self.path.retire(response.process_set, response.slot, own, response.version)
                if call is not None:  # on several hosts the coordinator knows of no recalled mark
                    self._convert(call, known=not self.across)

    def install(self, todo: Sequence[Response]) -> None:
        """Accept the calls that a finished response list has put into the cache."""
        for response in todo:
            set_id, slot = response.process_set, response.slot
            if not 0 <= slot < self.path.slots or not self.path.has_set(set_id):
                continue
            own = self._worker.request_of(set_id, slot)
            # With a small cache a list may reassign a slot several times: the last one counts.
            if is_delegated(own) and own.name == response.request.name:
                self._remember(own, response)
        self._splits.clear()

    def _remember(self, own: Request, response: Response) -> None:
        set_id, slot = response.process_set, response.slot
        members = self._worker.sets[set_id]
        rank, splits = members.index(self._worker.rank), self._splits.get((set_id, slot))
        plan = make_plan(own, rank, members, response.dims, splits, self._host_places.get(set_id))
        if plan is None:
            return
        op, postscale = own.kernel_terms(len(members))
        self.path.install(set_id, slot, own, response.version, op, postscale, response.direct, plan)

    def wants_splits(self, response: Response) -> bool:
        """Return whether every rank needs all ranks' splits of an alltoall, to remember it."""
        return (
            0 <= response.slot < self.path.slots
            and self.path.has_set(response.process_set)
            and is_delegated(response.request)
        )

    def learn_splits(self, response: Response, splits: Ints) -> None:
        """Keep all ranks' splits of an alltoall until it is installed; see :func:`make_plan`."""
        self._splits[response.process_set, response.slot] = splits

    def _take_over(self, set_id: int, names: Iterable[str]) -> None:
        for name in names:
            if (call := self.path.find(set_id, name)) is not None:
                self._convert(call)

    def _convert(self, call: CachedCall, *, known: bool = True) -> None:
        """Move a call from the fast path to the queue; ``known``: the coordinator knows of its marks."""
        marked, entries = self._entries(call)
        self._queue.adopt(entries)
        if marked and known:
            self._meter.submitted(len(entries), 0)
        for entry in entries:
            if marked and known:
                self._worker.adopt(entry.process_set, entry.request)
            else:
                self._unsent.append((entry.process_set, entry.request))

    def _entries(self, call: CachedCall) -> tuple[bool, list[TensorEntry]]:
        """Take a call; return whether it was marked, and its tensors."""
        taken = call.take()
        if taken is None:
            return False, []
        posted, tensors = taken

        def done(k: int, result: Any, error: BaseException | None) -> None:
            if error is not None:
                self._meter.failed(type(error).__name__)
            call.settle(k, result, error)

        if call.has_turn:
            requests = named([each[0] for each in tensors], call.name, grouped=call.grouped)
            tensors = [(request, *each[1:]) for request, each in zip(requests, tensors, strict=True)]
        return posted > 0, [
            TensorEntry(
                call.set_id,
                request,
                _view(source, request),
                _view(target, request),
                partial(done, k),
                splits,
                posted,
                call.site,
            )
            for k, (request, source, target, splits) in enumerate(tensors)
        ]


def connect(world: World, fast_path: FastPath | None, fabric: Fabric) -> ControlTransport:
    """Return the control transport; collective. It uses links between hosts if there are any.

    ``fabric`` is that of all ranks. Without a fast path no rank sleeps on links, so messages do not use them.
    """
    if fast_path is None:
        return world.connect(None)
    inner = world.connect(FastPathBell(fast_path, world.topology.rank, fabric))
    if not isinstance(fabric, HostsFabric):
        return inner
    transport = LinkTransport(inner, fabric.control, fabric.error_of_connection)
    fast_path.wake_by(transport.fileno())
    return transport


class FastPathBell:
    """A doorbell in the ready table: the background thread makes progress on the fast path, or sleeps there.

    A bell's address is the rank.
    """

    shortest = 0.0

    def __init__(self, fast_path: FastPath, rank: int, fabric: Fabric) -> None:
        self._fast_path = fast_path
        self._rank = rank
        self._fabric = fabric

    def ring(self, address: int | None = None) -> None:
        """Ring a bell, by default this rank's own; from any thread; never blocks."""
        self._fast_path.call(self._rank if address is None else address)

    def wait(self, timeout: float | None) -> bool:
        """Sleep until rung, at most ``timeout`` seconds; return whether it was rung.

        Raises
        ------
        Aborted
            Another rank has aborted a window while this one's engine was, or came, inside; or it has told all
            hosts that it fails.
        LinkLost
            The connection to another host has failed.
        """
        rung = bool(self._fast_path.sleep(timeout))
        if (note := self._fast_path.note()) is not None:
            raise Aborted(note)
        if isinstance(self._fabric, HostsFabric):
            self._fabric.look_at_hosts()
        return rung

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
