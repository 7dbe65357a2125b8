"""The timeline: one rank's recording, and how all ranks start and stop one together.

Owns :class:`Timeline`, an instrument that collects notes and writes them to a trace file from the background
thread, and :class:`Recorder`, which starts and stops recordings. Each start and stop measures the ranks'
clocks, so that the files of all ranks can be merged on one clock.

Memory is bounded: MOST_NOTES notes of hooks, and CELLS records of the C code. When one is full, new events
are dropped and counted; the file and the log say how many.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from pyhvd.backends.host import HostBackend
from pyhvd.backends.shm import ShmBackend
from pyhvd.errors import HorovodInternalError, TimelineError, copy_error
from pyhvd.native.shared_memory import (
    AWAITING,
    CARRIED,
    EXCHANGING,
    MARKED_READY,
    OTHER_HOST,
    PACKING,
    READY,
    REDUCING,
    SUBMITTED,
    UNPACKING,
    FastPath,
    Trace,
)
from pyhvd.negotiation.messages import UNNAMED, Request, RequestType, Response, TimelineOrder
from pyhvd.negotiation.turn_slots import named
from pyhvd.observe.hooks import Instrument, Instruments, read_clock
from pyhvd.observe.trace.clocks import ClockReading, measure
from pyhvd.observe.trace.files import CLOCK, END, FORMAT, HEADER, Event, TraceWriter, metadata, rank_path
from pyhvd.observe.trace.rows import Rows, Tensor
from pyhvd.queue import TensorEntry
from pyhvd.transport.fabric import Fabric, allgather_bytes

_log = logging.getLogger("pyhvd")

DYNAMIC = "DYNAMIC"
"""Value of PYHVD_TIMELINE that permits start_timeline() and records nothing before that call."""

CELLS = 1 << 16
"""Records of the C code between two drains; 3.5 MiB."""

MOST_NOTES = 1 << 16
"""Notes of hooks between two drains."""

PERIOD = 0.05
"""Seconds between two drains; a killed rank loses at most this much, unless it was busy."""

_STAGES = {
    PACKING: "MEMCPY_IN_FUSION_BUFFER",
    REDUCING: "SHM_ALLREDUCE",
    UNPACKING: "MEMCPY_OUT_FUSION_BUFFER",
}

Note = tuple[int, Callable[[], None]]
"""The time (ns) of an event, and the call that adds the event to the rows."""


class Timeline(Instrument):
    """The recording of one rank.

    Parameters
    ----------
    writer : TraceWriter
        The file; this object closes it.
    order : TimelineOrder
        The name of the recording, which is the same on every rank, and whether to write a CYCLE_START for
        every response list and every entry of the ready log.
    recorder : Recorder
        Knows the rank, and what its records mean.
    """

    def __init__(self, writer: TraceWriter, order: TimelineOrder, recorder: Recorder) -> None:
        self._writer = writer
        self._recorder = recorder
        self._rank = rank = recorder.rank
        self._trace = trace = recorder.trace
        self._notes: deque[Note] = deque()
        self._counting = threading.Lock()
        self._dropped = -trace.dropped
        self._warned_dropped = False
        self._failed = False
        self._turns: dict[tuple[int, int], list[Request]] = {}  # by process set and turn slot
        self._due = 0.0
        self._origin = read_clock()
        self._rows = Rows(self._origin, mark_cycles=order.mark_cycles)
        args = {"format": FORMAT, "job": order.job, "rank": rank, "size": recorder.size}
        args |= {"host": platform.node(), "process": os.getpid()}
        args |= {"origin_ns": self._origin, "generation": recorder.generation}
        self._head: list[Event] = [metadata(HEADER, args)]
        self._rows.head(f"pyhvd rank {rank}", time.time_ns() // 1000)
        trace.start(CELLS)

    # -- hooks: see Instrument ------------------------------------------------------------------------

    def queued(self, entries: Sequence[TensorEntry]) -> None:
        self._note(self._rows.queued, [(entry.process_set, entry.request) for entry in entries])

    def requested(self, rank: int, tensors: Sequence[Tensor]) -> None:
        mine = [each for each in tensors if self._rank in self._members(each[0])]
        if mine:
            self._note(self._rows.requested, rank, mine)

    def list_taken(self, number: int, todo: Sequence[Response]) -> None:
        errors = [r.error.message if r.error is not None else "" for r in todo]
        self._note(self._rows.listed, number, list(zip(_tensors_of(todo), errors, strict=True)))
        if any(r.slot >= 0 or r.request.type == RequestType.REMOVE_PROCESS_SET for r in todo):
            self._collect()  # cache slots change their meaning now; the records before this need the old one

    def batch_started(self, batch: Sequence[Response]) -> None:
        self._note(self._rows.started, _tensors_of(batch))

    def batch_ended(self, batch: Sequence[Response]) -> None:
        self._note(self._rows.ended, _tensors_of(batch))

    def phase(self, name: str, begin: int, end: int) -> None:
        self._append(end, self._rows.phase, name, begin, end)

    def look(self, now: float) -> float:
        if now >= self._due:
            self._drain()
            self._due = now + PERIOD
        return self._due

    def add_clock(self, when: str, reading: ClockReading) -> None:
        """Record a measurement of this rank's clock; ``when`` is "start" or "end"."""
        args: Event = {"when": when, "at_ns": reading.at, "offset_ns": reading.offset}
        self._head.append(metadata(CLOCK, args | {"uncertainty_ns": reading.uncertainty}))

    def close(self) -> None:
        """Write the remaining events, end the array, close the file."""
        self._trace.stop()
        self._drain()
        self._rows.close(read_clock())
        dropped = self._count_dropped()
        self._head.append(metadata(END, {"dropped": dropped, "at_ns": read_clock()}))
        self._write()
        self._writer.close()
        if dropped:
            _log.warning("the timeline of rank %d lacks %d events: the buffer was full", self._rank, dropped)

    # -- notes ---------------------------------------------------------------------------------------

    def _note(self, what: Callable[..., None], *args: Any) -> None:
        now = read_clock()
        self._append(now, what, now, *args)

    def _append(self, at: int, what: Callable[..., None], *args: Any) -> None:
        if len(self._notes) < MOST_NOTES:
            self._notes.append((at, partial(what, *args)))
        else:
            with self._counting:
                self._dropped += 1

    def _count_dropped(self) -> int:
        return self._dropped + self._trace.dropped

    def _collect(self) -> None:
        """Turn the ring's records into notes, with the tensors that they name."""
        rows = self._rows
        for kind, begin, end, number, set_id, slot, rank in self._trace.take(CELLS):
            if begin < self._origin:
                continue  # of an earlier recording
            if kind == SUBMITTED:
                self._note_turn(set_id, slot, number, rank)
                self._append(begin, rows.queued, begin, self._tensors(set_id, slot, alone=False))
            elif kind == MARKED_READY:
                tensors = self._tensors(set_id, slot, alone=False)
                self._append(begin, rows.posted, begin, self._rank, tensors)
            elif kind == READY:
                for tensor in self._tensors(set_id, slot, alone=True):
                    self._append(end, rows.matched, begin, end, number, self._who(rank), tensor)
            elif kind == CARRIED:
                self._append(end, rows.carried, end)
            elif kind == AWAITING:
                self._append(end, self._awaited, begin, end, rank)
            elif kind == EXCHANGING:
                self._append(end, rows.exchanged, begin, end, number, self._recorder.hosts[rank])
            else:
                self._append(end, rows.phase, _STAGES[kind], begin, end)

    def _members(self, set_id: int) -> tuple[int, ...]:
        return self._recorder.members.get(set_id, ())

    def _tensors(self, set_id: int, slot: int, *, alone: bool) -> list[Tensor]:
        """Return the tensors of the call that a slot belongs to, or with ``alone`` the slot's tensor."""
        if (unnamed := self._turns.get((set_id, slot))) is not None:
            return [(set_id, request) for request in unnamed]
        fast_path = self._recorder.fast_path
        requests = fast_path.requests(set_id, slot, alone) if fast_path is not None else []
        return [(set_id, request) for request in requests]

    def _note_turn(self, set_id: int, slot: int, number: int, signature: int) -> None:
        """Note which call without a name uses a turn slot from now on; 0 is no signature."""
        fast_path = self._recorder.fast_path
        if fast_path is None or not signature:
            return
        requests, grouped = fast_path.signature(set_id, signature)
        if requests:
            self._turns[set_id, slot] = named(requests, f"{UNNAMED}.{number}", grouped=grouped)

    def _who(self, last: int) -> int | str:
        """Return the rank, or the name of the host, that was the last to make a tensor ready."""
        return f"host {self._recorder.hosts[last - OTHER_HOST]}" if last >= OTHER_HOST else last

    def _awaited(self, begin: int, end: int, set_rank: int) -> None:
        """Add the wait for a rank of the process set whose batch is under way."""
        members = self._members(self._rows.process_set)
        rank = members[set_rank] if set_rank < len(members) else -1
        self._rows.phase("WAIT_FOR_RANK", begin, end, rank=rank)

    def _drain(self) -> None:
        """Turn all notes into events, ordered by time, and write them."""
        self._collect()
        notes = [self._notes.popleft() for _ in range(len(self._notes))]
        notes.sort(key=itemgetter(0))
        for _, add in notes:
            add()
        if self._count_dropped() and not self._warned_dropped:
            self._warned_dropped = True
            _log.warning("the timeline of rank %d drops events: the buffer is full", self._rank)
        self._write()

    def _write(self) -> None:
        events, self._head = [*self._head, *self._rows.take()], []
        if self._failed:
            return
        try:
            self._writer.write(events)
        except OSError as exc:
            self._failed = True
            _log.error("the timeline of rank %d ends here: %s: %s", self._rank, self._writer.path, exc)


def _tensors_of(responses: Sequence[Response]) -> list[Tensor]:
    return [(response.process_set, response.request) for response in responses]


class Recorder:
    """Starts and stops this rank's recordings, at the same place in the order of responses on every rank.

    Parameters
    ----------
    rank, size : int
        This rank, and the number of ranks.
    hooks : Instruments
        Instruments to which a recording is added.
    generation : int
        The generation of this rank, in an elastic job; each has files of its own.

    Attributes
    ----------
    fast_path : FastPath or None
        The fast path, which knows the tensors of cache slots.
    members : mapping of int to tuple of int
        The ranks of each process set; the runtime replaces it after the first recording has begun.
    hosts : tuple of str
        The names of the job's hosts.
    trace : Trace
        Ring to which the C code writes records.
    busy : bool
        Whether this rank starts or stops a recording together with the others. Any thread may read it.
    """

    def __init__(self, rank: int, size: int, hooks: Instruments, generation: int = 0) -> None:
        self.busy = False
        self.fast_path: FastPath | None = None
        self.members: Mapping[int, tuple[int, ...]] = {}
        self.hosts: tuple[str, ...] = ()
        self.trace = Trace()
        self.rank = rank
        self.size = size
        self.generation = generation
        self._hooks = hooks
        self._writer: TraceWriter | None = None
        self._order = TimelineOrder()
        self._active: Timeline | None = None
        self._lock = threading.Lock()
        self.asked: deque[tuple[TimelineOrder, Future[None]]] = deque()
        self._under_way: deque[tuple[TimelineOrder, Future[None]]] = deque()
        self._over: Future[None] = Future()
        self._last_stops: list[Future[None]] = []
        self._closed: HorovodInternalError | None = None

    def watch(self, backend: HostBackend) -> None:
        """Record the phases of a backend."""
        backend.phases = self._hooks
        if isinstance(backend, ShmBackend):
            backend.window.attach(self.trace)

    # -- all ranks together --------------------------------------------------------------------------

    def open(self, order: TimelineOrder, fabric: Fabric) -> None:
        """Open this rank's file. Collective.

        Raises
        ------
        TimelineError
            Some rank cannot write its file. Every rank raises the same error, and none records.
        """
        error, path = "", Path(order.path)
        writer: TraceWriter | None = None
        try:
            path = rank_path(order.path, self.rank, self.generation)  # it looks at the path
            writer = TraceWriter(path, make_directory=order.path.endswith(os.sep))
        except OSError as exc:
            error = f"rank {self.rank} on {platform.node()} cannot write its timeline to {str(path)!r}: "
            error += exc.strerror or str(exc)
        mine = f"{order.job}\n{error}".encode(errors="replace")
        job, *_ = heard = [text.decode() for text in allgather_bytes(fabric, mine)]
        if errors := [text.partition("\n")[2] for text in heard if not text.endswith("\n")]:
            if writer is not None:
                writer.close()
                with contextlib.suppress(OSError):
                    path.unlink()
            more = f" (and {len(errors) - 1} more ranks)" if len(errors) > 1 else ""
            raise TimelineError(f"{errors[0]}{more}: give a path in a directory that every rank can write to")
        self._writer = writer
        self._order = TimelineOrder(order.path, order.mark_cycles, job.split("\n")[0])

    def begin(self, fabric: Fabric) -> None:
        """Start to record, if a file is open. Collective."""
        if self._writer is None:
            return
        reading = measure(fabric, read_clock)
        writer, self._writer = self._writer, None
        self._active = Timeline(writer, self._order, self)
        self._active.add_clock("start", reading)
        self._hooks.add(self._active)

    def end(self, fabric: Fabric | None) -> None:
        """Stop recording and close the file; without a fabric, measure no clock. Collective with one."""
        active, self._active = self._active, None
        if active is None:
            return
        self._hooks.remove(active)
        try:
            if fabric is not None:
                active.add_clock("end", measure(fabric, read_clock))
        finally:
            active.close()

    def follow(self, order: TimelineOrder, fabric: Fabric) -> None:
        """Carry out an order of rank 0. Collective."""
        error: TimelineError | None = None
        self.busy = True
        try:
            self.end(fabric)
            if order.path:
                self.open(order, fabric)
                self.begin(fabric)
        except TimelineError as exc:
            error = exc
        finally:
            self.busy = False
        with self._lock:  # only here: after an exception above, close() must still find the waiting future
            if not self._under_way:
                return
            _, waiting = self._under_way.popleft()
        _complete(waiting, error)

    # -- orders of rank 0 -----------------------------------------------------------------------------

    def ask(self, order: TimelineOrder) -> Future[None]:
        """Queue an order for all ranks; on rank 0, from any thread. The caller wakes the runtime.

        The end of the runtime also stops a recording: a stop that is asked for after it just waits for that.
        """
        future: Future[None] = Future()
        with self._lock:
            if self._closed is not None and not order.path:
                return self._over
            if self._closed is not None:
                raise copy_error(self._closed)
            self.asked.append((order, future))
        return future

    def next_order(self) -> TimelineOrder | None:
        """Return the next order to send to all ranks, or None."""
        if not self.asked:
            return None
        with self._lock:
            self._under_way.append(self.asked.popleft())
        return self._under_way[-1][0]

    def close(self, error: HorovodInternalError) -> None:
        """Fail the orders that are left: the runtime ends."""
        with self._lock:
            self._closed = error
            left = [*self._under_way, *self.asked]
            self.asked.clear()
            self._under_way.clear()
        for order, future in left:
            if order.path:
                future.set_exception(error)
            else:
                self._last_stops.append(future)

    def abandon(self, error: HorovodInternalError) -> None:
        """Do as :meth:`close`, and fail all waits: the runtime's thread is stuck in a collective."""
        self.close(error)
        self._complete_stops(error)

    def finish(self, fabric: Fabric | None) -> None:
        """Stop the last recording, and complete all waits for it."""
        try:
            self.end(fabric)
        finally:
            self._complete_stops(None)

    def _complete_stops(self, error: HorovodInternalError | None) -> None:
        for future in (self._over, *self._last_stops):
            with contextlib.suppress(InvalidStateError):  # finish() or abandon() was first
                _complete(future, error)


def _complete(future: Future[None], error: Exception | None) -> None:
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(None)


def new_job() -> str:
    """Return a unique name for a recording."""
    return uuid.uuid4().hex
