"""Conversion of one rank's records to Chrome trace events: one row per tensor, as in Horovod, and two more.

Owns the names and the nesting of events. One thread calls it, with records in the order of their times; it
does no I/O and reads no clock. Row 0 holds the header and CYCLE_START. Row 1 holds the data path: one span
per batch, with the batch's phases inside. A row is a process (pid) of the trace: viewers show its name.

Invariants of a row:

1. Begins and ends nest.
2. Times never decrease; a late record gets the row's latest time.

    submitted       ready on all ranks           batch starts            done
        |---- NEGOTIATE_ALLREDUCE ----|---------------- ALLREDUCE -------------|
                   x x   x            |--- QUEUE ---|
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyhvd.dtypes import BY_CODE
from pyhvd.negotiation.messages import UNNAMED, Request, verb
from pyhvd.observe.trace.files import Event, metadata

MAIN, DATA_PATH, FIRST_TENSOR = 0, 1, 2
"""Row numbers (pid)."""

MOST_ROWS = 20_000
"""Rows that a recording keeps; further names share rows, as unnamed tensors do."""

EXCHANGE = "LINKS_EXCHANGE"
"""The phase in which a rank sends, receives, sums and waits for what crosses between hosts."""

Tensor = tuple[int, Request]


@dataclass(slots=True)
class Row:
    """One row of the trace."""

    pid: int
    last: int
    mine: int | None = None
    open: list[str] = field(default_factory=list)
    early: list[tuple[int, int]] = field(default_factory=list)
    pool: str = ""
    turn: Tensor | None = None
    args: Event = field(default_factory=dict)

    @property
    def negotiating(self) -> bool:
        """Whether the tensor is being negotiated; that span is never open together with another."""
        return bool(self.open) and self.open[0].startswith("NEGOTIATE_")


class Rows:
    """See the module's docstring.

    Parameters
    ----------
    origin : int
        Time (ns) that becomes 0 in the trace.
    mark_cycles : bool
        Whether to write a CYCLE_START for each response list and each batch of the fast lane.

    Attributes
    ----------
    process_set : int
        Id of the process set whose batch started last.
    """

    def __init__(self, origin: int, *, mark_cycles: bool) -> None:
        self.process_set = 0
        self._origin = origin
        self._mark_cycles = mark_cycles
        self._events: list[Event] = []
        self._rows: dict[tuple[int, int, str], Row] = {}
        self._free: dict[str, list[Row]] = {}
        self._pids = FIRST_TENSOR
        self._main = Row(MAIN, origin)
        self._path = Row(DATA_PATH, origin)
        self._batch = 0
        self._matched: list[Tensor] = []
        self._cycle = -1

    def take(self) -> list[Event]:
        """Return the events so far, and drop them."""
        events, self._events = self._events, []
        return events

    # -- records -------------------------------------------------------------------------------

    def queued(self, at: int, tensors: Iterable[Tensor]) -> None:
        """Record that this rank submitted tensors."""
        for tensor in tensors:
            row = self._row(tensor)
            if row.turn is not None:
                # The handle of the tensor's previous call completed, but that call's batch has not ended yet.
                self._finish(row, at, row.turn)
                row = self._row(tensor)
            self._negotiate(row, at, tensor[1])
            row.mine = at

    def requested(self, at: int, rank: int, tensors: Iterable[Tensor]) -> None:
        """Record that rank 0 counted requests of a rank."""
        for tensor in tensors:
            row = self._row(tensor)
            if row.open and not row.negotiating:
                row.early.append((at, rank))  # of the tensor's next call, on a rank that is ahead
                continue
            if not row.open:
                self._negotiate(row, at, tensor[1])
            self._tick(row, at, rank)

    def listed(self, at: int, number: int, tensors: Iterable[tuple[Tensor, str]]) -> None:
        """Record a response list: each tensor is ready, or has failed."""
        self._mark_cycle(at)
        for tensor, error in tensors:
            row = self._row(tensor)
            self._ready(row, at, tensor, str(number))
            if error:
                row.args["error"] = error
                self._finish(row, at, tensor)

    def started(self, at: int, tensors: Sequence[Tensor]) -> None:
        """Record the start of a batch."""
        self.process_set = tensors[0][0]
        for tensor in tensors:
            row = self._row(tensor)
            row.args["batch"] = self._batch
            if row.open and row.open[-1] == "QUEUE":
                self._end(row, at)
        self._begin(self._path, at, _operation(tensors[0][1]))

    def ended(self, at: int, tensors: Sequence[Tensor]) -> None:
        """Record the end of a batch."""
        for tensor in tensors:
            row = self._row(tensor)
            if row.turn is not None:  # else its handle completed, and the tensor's next call began
                self._finish(row, at, tensor)
        nbytes = sum(_bytes(request) for _, request in tensors)
        self._close(self._path, at, {"batch": self._batch, "tensors": len(tensors), "bytes": nbytes})
        self._batch += 1

    def phase(self, name: str, begin: int, end: int, **args: Any) -> None:
        """Record a phase of the current batch."""
        start = self._at(self._path, begin)
        stop = self._at(self._path, end)
        event = self._event(self._path, name, "X", start)
        event["dur"] = (stop - start) / 1000
        event["args"] = {"batch": self._batch, **args}

    def exchanged(self, begin: int, end: int, nbytes: int, last_host: str) -> None:
        """Record an exchange between hosts, if it belongs to a batch; measuring clocks does not."""
        if self._path.open:
            self.phase(EXCHANGE, begin, end, bytes=nbytes, last_host=last_host)

    def posted(self, at: int, rank: int, tensors: Iterable[Tensor]) -> None:
        """Record that this rank marked tensors ready."""
        for tensor in tensors:
            row = self._row(tensor)
            if row.negotiating:
                self._tick(row, at, rank)

    def matched(self, ready: int, turn: int, place: int, last: int | str, tensor: Tensor) -> None:
        """Record that ``last`` (a rank, or text) made a tensor ready; its batch starts at ``turn``."""
        self.process_set = tensor[0]
        row = self._row(tensor)
        if place != self._cycle:
            self._cycle = place
            self._mark_cycle(ready)
        if row.negotiating:
            self._tick(row, ready, last)
        self._ready(row, ready, tensor, f"f{place}")
        row.args["batch"] = self._batch
        self._end(row, turn)
        if not self._matched:
            self._begin(self._path, turn, _operation(tensor[1]))
        self._matched.append(tensor)

    def carried(self, end: int) -> None:
        """Record the end of the batch of the tensors matched last."""
        matched, self._matched = self._matched, []
        if matched:
            self.ended(end, matched)

    def close(self, at: int) -> None:
        """End all open spans."""
        for row in [*self._rows.values(), self._path]:
            while row.open:
                self._close(row, at, {"unfinished": True})

    # -- rows ----------------------------------------------------------------------------------------

    def _row(self, tensor: Tensor) -> Row:
        set_id, request = tensor
        key = (set_id, request.type, request.name)
        row = self._rows.get(key)
        if row is not None:
            return row
        label, pool = row_label(set_id, verb(request.type), request.name), ""
        if UNNAMED in request.name.split(".") or self._pids >= MOST_ROWS:
            pool = label = f"{verb(request.type)} (unnamed)"
        free = self._free.get(pool, []) if pool else []
        row = free.pop() if free else self._new_row(label)
        row.pool = pool
        self._rows[key] = row
        return row

    def _new_row(self, label: str) -> Row:
        row = Row(self._pids, self._origin)
        self._pids += 1
        self._name(row, label)
        return row

    def _name(self, row: Row, label: str) -> None:
        self._events.append(metadata("process_name", {"name": label}, row.pid))
        self._events.append(metadata("process_sort_index", {"sort_index": row.pid}, row.pid))

    def head(self, title: str, epoch: int) -> None:
        """Name rows 0 and 1; ``epoch`` is the wall clock (us since 1970) at time 0."""
        args = {"name": title, "start_time_since_epoch_in_micros": epoch}
        self._events.append(metadata("process_name", args, MAIN))
        self._name(self._path, "data path")

    def _release(self, row: Row, tensor: Tensor) -> None:
        if row.pool:
            del self._rows[tensor[0], tensor[1].type, tensor[1].name]
            self._free.setdefault(row.pool, []).append(row)

    # -- spans ---------------------------------------------------------------------------------------

    def _negotiate(self, row: Row, at: int, request: Request) -> None:
        if row.negotiating:
            return  # another rank submitted first
        self._begin(row, at, f"NEGOTIATE_{_operation(request)}")
        for when, rank in row.early:
            self._tick(row, when, rank)
        row.early.clear()

    def _tick(self, row: Row, at: int, who: int | str) -> None:
        event = self._event(row, str(who), "X", self._at(row, at))
        event["dur"] = 0

    def _ready(self, row: Row, at: int, tensor: Tensor, turn: str) -> None:
        while row.open:
            self._end(row, at)
        row.turn = tensor
        row.args = {"id": turn}
        if row.mine is not None:
            row.args["submitted"] = self._since_origin(row.mine)
            row.mine = None
        self._begin(row, at, _operation(tensor[1]))
        self._begin(row, at, "QUEUE")

    def _finish(self, row: Row, at: int, tensor: Tensor) -> None:
        request = tensor[1]
        while len(row.open) > 1:
            self._end(row, at)
        if request.dtype in BY_CODE:
            row.args["dtype"] = BY_CODE[request.dtype].name
            row.args["shape"] = list(request.shape)
            row.args["bytes"] = _bytes(request)
        row.args["tensor"] = request.name
        row.args["process_set"] = tensor[0]
        self._close(row, at, row.args)
        row.turn = None
        self._release(row, tensor)

    # -- events --------------------------------------------------------------------------------------

    def _mark_cycle(self, at: int) -> None:
        if self._mark_cycles:
            self._event(self._main, "CYCLE_START", "i", self._at(self._main, at))["s"] = "g"

    def _at(self, row: Row, at: int) -> int:
        row.last = max(row.last, at)
        return row.last

    def _since_origin(self, at: int) -> float:
        """Return a time (ns) in us of the trace."""
        return (at - self._origin) / 1000

    def _event(self, row: Row, name: str, kind: str, at: int) -> Event:
        event: Event = {"name": name, "ph": kind, "ts": self._since_origin(at), "pid": row.pid, "tid": 0}
        self._events.append(event)
        return event

    def _begin(self, row: Row, at: int, name: str) -> None:
        row.open.append(name)
        self._event(row, name, "B", self._at(row, at))

    def _end(self, row: Row, at: int) -> None:
        self._event(row, row.open.pop(), "E", self._at(row, at))

    def _close(self, row: Row, at: int, args: Event) -> None:
        if row.open:
            self._end(row, at)
            if args:
                self._events[-1]["args"] = args


def row_label(set_id: int, operation: str, name: str) -> str:
    """Return the label of a tensor's row."""
    return f"{operation.lower()}.{name}" + (f" (process set {set_id})" if set_id else "")


def _operation(request: Request) -> str:
    return verb(request.type).upper()


def _bytes(request: Request) -> int:
    return math.prod(request.shape) * BY_CODE[request.dtype].itemsize if request.dtype in BY_CODE else 0
