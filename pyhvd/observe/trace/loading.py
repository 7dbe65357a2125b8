"""Reader of recordings: the files of one recording, and each rank's turns and phases.

Owns the choice of files, and the conversion of a rank's events to turns. A *turn* is one collective of one
tensor, from its submission to its end. Files of killed ranks are read up to their last whole event.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec

from pyhvd.common.text import describe_ranks
from pyhvd.observe.trace.clocks import ClockMap, ClockReading
from pyhvd.observe.trace.files import CLOCK, END, FORMAT, HEADER, Event, TraceError, read_bytes, read_events
from pyhvd.observe.trace.rows import DATA_PATH, MAIN, row_label


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One turn of one tensor on one rank; times in us of rank 0's clock. Each is equal to itself only.

    Attributes
    ----------
    rank : int
        The rank.
    key : (int, str, str)
        Process set id, operation (``ALLREDUCE``), name.
    turn : str
        Identifies the turn among those of its key; the same on every rank of the turn.
    submitted : float or None
        Time of this rank's submission; None if the rank had joined, or submitted before the recording.
    ready, begun, ended : float
        Times of the agreement, of the batch's start, and of the end.
    batch : int
        Number of the batch on this rank.
    nbytes : int
        Size on this rank (bytes).
    error : str
        Text of the error, or empty.
    """

    rank: int
    key: tuple[int, str, str]
    turn: str
    submitted: float | None
    ready: float
    begun: float
    ended: float
    batch: int
    nbytes: int
    error: str

    @property
    def label(self) -> str:
        """The text that shows operation, name and process set."""
        return row_label(*self.key)


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a batch on one rank (us of rank 0's clock).

    ``rank`` is the rank waited for, or -1. An exchange between hosts has the bytes sent and received, and the
    host whose bytes came last.
    """

    name: str
    begin: float
    end: float
    batch: int
    rank: int
    nbytes: int = 0
    last_host: str = ""


class Header(msgspec.Struct):
    """The header of a file; ``origin_ns`` is the rank's clock at time 0.

    Files of older versions have no generation.
    """

    job: str
    rank: Annotated[int, msgspec.Meta(ge=0)]
    size: Annotated[int, msgspec.Meta(ge=1)]
    host: str
    origin_ns: int
    generation: Annotated[int, msgspec.Meta(ge=0)] = 0


class RankTrace(Header, kw_only=True):
    """The contents of one rank's file."""

    path: Path
    started: float
    clock: ClockMap
    cut: bool
    complete: bool
    dropped: int
    turns: list[Turn] = []
    phases: list[Phase] = []
    unfinished: list[tuple[str, str, float]] = []


def load(paths: Sequence[str]) -> list[RankTrace]:
    """Return the ranks of one recording, in order.

    Parameters
    ----------
    paths : sequence of str
        Directories, in which every file of a timeline counts; or files, each of which stands for all files of
        its recording in its directory.

    Raises
    ------
    TraceError
        No files, unreadable files, or files of several recordings.
    """
    found: dict[Path, Path] = {}  # as given, by resolved path: each file counts once
    named: set[Path] = set()
    for each in map(Path, paths):
        if each.is_dir():
            files = _traces_in(each)
        elif each.exists():
            files = [*_traces_in(each.parent), each]
            named.add(each.resolve())
        else:
            raise TraceError(f"{each}: no such file or directory")
        found |= {path.resolve(): path for path in files}
    if not found:
        raise TraceError(f"{', '.join(paths)}: no trace files; a timeline writes *.json there")
    traces = {resolved: _read(path) for resolved, path in found.items()}
    jobs = {traces[path].job for path in named}
    by_job: dict[str, list[RankTrace]] = {}
    for trace in traces.values():
        if not jobs or trace.job in jobs:
            by_job.setdefault(trace.job, []).append(trace)
    if len(by_job) > 1:
        raise TraceError(_mixed(by_job.values()))
    return _in_order(next(iter(by_job.values())))


def _in_order(traces: list[RankTrace]) -> list[RankTrace]:
    """Return the traces by rank; refuse two files of one rank."""
    traces = sorted(traces, key=lambda trace: (trace.rank, trace.path))
    for one, other in itertools.pairwise(traces):
        if one.rank == other.rank:
            raise TraceError(
                f"{one.path} and {other.path} are both of rank {one.rank} in the same recording: move the"
                " copy to another directory"
            )
    return traces


def _traces_in(directory: Path) -> list[Path]:
    """Return the trace files in a directory; skip other JSON files, such as a merged trace."""
    paths = sorted(directory.glob("*.json"))
    return [path for path in paths if HEADER.encode() in read_bytes(path, most=200)]


def _header(path: Path, events: list[Event]) -> Header:
    args = events[0].get("args") if events and events[0].get("name") == HEADER else None
    if not isinstance(args, dict):
        raise TraceError(f"{path}: not a trace of a pyhvd timeline: no header")
    if args.get("format") != FORMAT:
        raise TraceError(f"{path}: format {args.get('format')!r}; this version of pyhvd reads {FORMAT}")
    try:
        return msgspec.convert(args, Header)
    except msgspec.ValidationError as exc:
        raise TraceError(f"{path}: damaged header: {exc}") from exc


def _mixed(recordings: Iterable[list[RankTrace]]) -> str:
    texts = []
    for traces in sorted(recordings, key=lambda each: each[0].started):
        when = time.strftime("%H:%M:%S", time.localtime(traces[0].started))
        ranks = describe_ranks([trace.rank for trace in traces])
        later = f" of generation {traces[0].generation}" if traces[0].generation else ""
        first = min(traces, key=lambda trace: trace.rank)
        texts.append(f"{first.path} ({ranks}{later}, started at {when})")
    return f"files of {len(texts)} recordings: name one file of the recording you want: {'; '.join(texts)}"


def _read(path: Path) -> RankTrace:
    events, cut = read_events(path)
    header = _header(path, events)
    try:
        trace = _read_metadata(path, header, events, cut=cut)
        _Reader(trace).read(events)
    except TraceError:
        raise
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as exc:
        raise TraceError(f"{path}: damaged: incomplete event: {exc!r}") from exc
    return trace


def _read_metadata(path: Path, header: Header, events: list[Event], *, cut: bool) -> RankTrace:
    """Return a trace without turns and phases."""
    readings: dict[str, ClockReading] = {}
    dropped, complete, epoch = 0, False, 0
    for event in events:
        args = event.get("args", {})
        if event["name"] == CLOCK:
            readings[args["when"]] = ClockReading(args["at_ns"], args["offset_ns"], args["uncertainty_ns"])
        elif event["name"] == END:
            dropped, complete = args["dropped"], True
        elif "start_time_since_epoch_in_micros" in args:
            epoch = args["start_time_since_epoch_in_micros"]
    if "start" not in readings:
        raise TraceError(f"{path}: damaged: no measurement of the clock")
    clock = ClockMap(readings["start"], readings.get("end"))
    return RankTrace(
        **msgspec.structs.asdict(header),
        path=path,
        started=epoch / 1e6,
        clock=clock,
        cut=cut,
        complete=complete,
        dropped=dropped,
    )


@dataclass(slots=True)
class _RowState:
    label: str = ""
    open: list[tuple[str, float]] = field(default_factory=list)
    begun: float | None = None


class _Reader:
    """Converts one rank's events to turns and phases."""

    def __init__(self, trace: RankTrace) -> None:
        self._trace = trace
        self._rows: dict[int, _RowState] = {}

    def read(self, events: Iterable[Event]) -> None:
        """Convert all events, in the order of the file."""
        for event in events:
            pid = event["pid"]
            row = self._rows.setdefault(pid, _RowState())
            kind = event["ph"]
            if kind == "M" and event["name"] == "process_name":
                row.label = event["args"]["name"]
            elif pid == DATA_PATH and kind == "X":
                self._phase(event)
            elif pid in (MAIN, DATA_PATH):
                continue
            elif kind == "B":
                row.open.append((event["name"], self._time(event["ts"])))
            elif kind == "E":
                self._close(row, event)
        for row in self._rows.values():
            if row.open:
                name, since = row.open[0]
                self._trace.unfinished.append((row.label, name, since))

    def _time(self, ts: float) -> float:
        return self._trace.clock.to_root(self._trace.origin_ns + ts * 1000) / 1000

    def _phase(self, event: Event) -> None:
        args = event["args"]
        begin, end = self._time(event["ts"]), self._time(event["ts"] + event["dur"])
        exchanged = args.get("bytes", 0), args.get("last_host", "")
        phase = Phase(event["name"], begin, end, args["batch"], args.get("rank", -1), *exchanged)
        self._trace.phases.append(phase)

    def _close(self, row: _RowState, event: Event) -> None:
        name, begin = row.open.pop()
        args = event.get("args", {})
        end = self._time(event["ts"])
        if name == "QUEUE":
            row.begun = end
        if args.get("unfinished") and not row.open:
            self._trace.unfinished.append((row.label, name, begin))
        if "id" not in args:
            return
        submitted = args.get("submitted")
        turn = Turn(
            rank=self._trace.rank,
            key=(args["process_set"], name, args["tensor"]),
            turn=args["id"],
            submitted=None if submitted is None else self._time(submitted),
            ready=begin,
            begun=row.begun if row.begun is not None else end,
            ended=end,
            batch=args.get("batch", -1),
            nbytes=args.get("bytes", 0),
            error=args.get("error", ""),
        )
        self._trace.turns.append(turn)
        row.begun = None
