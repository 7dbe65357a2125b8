"""From what happened on one rank to Chrome trace events: a row per tensor, as in Horovod, and two of our own.

Owns: the names and nesting of events. Fed with records in the order of their times, by one thread; no I/O, no
clock. Row 0 has the header and CYCLE_START, row 1 the data path with one span per batch and its phases in it;
a row is a process (pid) in the trace, so that viewers name it. On a row, begins and ends nest and times never
run backwards: a record that comes late is put where the row has got to.

    submitted       all ranks have it            its batch's turn        done
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
from pyhvd.observe.trace.files import Event

MAIN, DATA_PATH, FIRST_TENSOR = 0, 1, 2
"""Row numbers (pid)."""

MOST_ROWS = 20_000
"""Names beyond so many share rows, like unnamed tensors do: rows are remembered while one records."""

Tensor = tuple[int, Request]


@dataclass(slots=True)
class Row:
    """One line of the trace."""

    pid: int
    last: int
    mine: int | None = None
    open: list[str] = field(default_factory=list)
    early: list[tuple[int, int]] = field(default_factory=list)
    pool: str = ""
    turn: Tensor | None = None
    args: Event = field(default_factory=dict)


class Rows:
    """See the module's docstring.

    Parameters
    ----------
    origin : int
        Time (ns) that becomes 0 in the trace.
    mark_cycles : bool
        Whether response lists and the fast lane's batches leave a CYCLE_START.
    """

    def __init__(self, origin: int, mark_cycles: bool) -> None:
        self._origin = origin
        self._mark_cycles = mark_cycles
        self._events: list[Event] = []
        self._rows: dict[tuple[int, int, str], Row] = {}
        self._free: dict[str, list[Row]] = {}
        self._pids = FIRST_TENSOR
        self._main = Row(MAIN, origin)
        self._path = Row(DATA_PATH, origin)
        self._batch = 0
        self._riders: list[Tensor] = []
        self._cycle = -1

    def take(self) -> list[Event]:
        """Return, and forget, the events so far."""
        events, self._events = self._events, []
        return events

    def microseconds(self, at: int) -> float:
        """Return a time (ns) as it stands in the trace."""
        return (at - self._origin) / 1000

    # -- what happened -------------------------------------------------------------------------------

    def queued(self, at: int, tensors: Iterable[Tensor]) -> None:
        """This rank has submitted tensors."""
        for tensor in tensors:
            row = self._row(tensor)
            if row.turn is not None:
                # The turn before: its handle has completed, though its batch has not ended so far.
                self._finish(row, at, row.turn)
                row = self._row(tensor)
            self._negotiate(row, at, tensor[1])
            row.mine = at

    def requested(self, at: int, rank: int, tensors: Iterable[Tensor]) -> None:
        """A rank's requests have been counted."""
        for tensor in tensors:
            row = self._row(tensor)
            if len(row.open) > 1 or (row.open and not row.open[0].startswith("NEGOTIATE_")):
                row.early.append((at, rank))  # of the next turn, on a rank that is faster than this one
                continue
            if not row.open:
                self._negotiate(row, at, tensor[1])
            self._tick(row, at, rank)

    def listed(self, at: int, number: int, tensors: Iterable[tuple[Tensor, str]]) -> None:
        """A response list has come: each tensor is ready, or in error."""
        self._mark_cycle(at)
        for tensor, error in tensors:
            row = self._row(tensor)
            self._ready(row, at, tensor, str(number))
            if error:
                row.args["error"] = error
                self._finish(row, at, tensor)

    def started(self, at: int, tensors: Sequence[Tensor]) -> None:
        """A batch begins."""
        for tensor in tensors:
            row = self._row(tensor)
            row.args["batch"] = self._batch
            if row.open and row.open[-1] == "QUEUE":
                self._end(row, at)
        self._begin(self._path, at, _operation(tensors[0][1]))

    def ended(self, at: int, tensors: Sequence[Tensor]) -> None:
        """... and has ended."""
        for tensor in tensors:
            row = self._row(tensor)
            if row.turn is not None:  # else its handle had completed, and its next turn has begun
                self._finish(row, at, tensor)
        nbytes = sum(_bytes(request) for _, request in tensors)
        self._close(self._path, at, {"batch": self._batch, "tensors": len(tensors), "bytes": nbytes})
        self._batch += 1

    def phase(self, name: str, begin: int, end: int, **args: Any) -> None:
        """A part of the batch that is being carried out."""
        start = self._at(self._path, begin)
        stop = self._at(self._path, end)
        event = self._event(self._path, name, "X", start)
        event["dur"] = (stop - start) / 1000
        event["args"] = {"batch": self._batch, **args}

    def posted(self, at: int, rank: int, tensors: Iterable[Tensor]) -> None:
        """This rank's tensors are on the board."""
        for tensor in tensors:
            row = self._row(tensor)
            if row.open and row.open[-1].startswith("NEGOTIATE_"):
                self._tick(row, at, rank)

    def matched(self, ready: int, turn: int, place: int, last: int, tensor: Tensor) -> None:
        """The board says that a tensor is ready, thanks to rank ``last``; its batch begins at ``turn``."""
        row = self._row(tensor)
        if place != self._cycle:
            self._cycle = place
            self._mark_cycle(ready)
        if row.open and row.open[-1].startswith("NEGOTIATE_"):
            self._tick(row, ready, last)
        self._ready(row, ready, tensor, f"f{place}")
        row.args["batch"] = self._batch
        self._end(row, turn)
        if not self._riders:
            self._begin(self._path, turn, _operation(tensor[1]))
        self._riders.append(tensor)

    def carried(self, end: int) -> None:
        """The tensors that were matched last have been carried out."""
        riders, self._riders = self._riders, []
        if riders:
            self.ended(end, riders)

    def close(self, at: int) -> None:
        """End what is open."""
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
        label = f"{verb(request.type)}.{request.name}" + (f" (process set {set_id})" if set_id else "")
        pool = ""
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
        for name, value in (("name", label), ("sort_index", row.pid)):
            event: Event = {
                "name": f"process_{name}",
                "ph": "M",
                "pid": row.pid,
                "tid": 0,
                "args": {name: value},
            }
            self._events.append(event)

    def head(self, title: str, epoch: int) -> None:
        """Name rows 0 and 1; ``epoch`` is the wall clock (us since 1970) at time 0."""
        args = {"name": title, "start_time_since_epoch_in_micros": epoch}
        self._events.append({"name": "process_name", "ph": "M", "pid": MAIN, "tid": 0, "args": args})
        self._name(self._path, "data path")

    def _release(self, row: Row, tensor: Tensor) -> None:
        if row.pool:
            del self._rows[tensor[0], tensor[1].type, tensor[1].name]
            self._free.setdefault(row.pool, []).append(row)

    # -- spans ---------------------------------------------------------------------------------------

    def _negotiate(self, row: Row, at: int, request: Request) -> None:
        if row.open and row.open[0].startswith("NEGOTIATE_"):
            return  # another rank was first
        self._begin(row, at, f"NEGOTIATE_{_operation(request)}")
        for when, rank in row.early:
            self._tick(row, when, rank)
        row.early.clear()

    def _tick(self, row: Row, at: int, rank: int) -> None:
        event = self._event(row, str(rank), "X", self._at(row, at))
        event["dur"] = 0

    def _ready(self, row: Row, at: int, tensor: Tensor, turn: str) -> None:
        while row.open:
            self._end(row, at)
        row.turn = tensor
        row.args = {"id": turn}
        if row.mine is not None:
            row.args["submitted"] = self.microseconds(row.mine)
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

    def _event(self, row: Row, name: str, kind: str, at: int) -> Event:
        event: Event = {"name": name, "ph": kind, "ts": self.microseconds(at), "pid": row.pid, "tid": 0}
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


def _operation(request: Request) -> str:
    return verb(request.type).upper()


def _bytes(request: Request) -> int:
    return math.prod(request.shape) * BY_CODE[request.dtype].itemsize if request.dtype in BY_CODE else 0
