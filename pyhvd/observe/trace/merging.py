"""The merged trace: all ranks on one clock, one process per rank, one thread per phase.

Owns the layout of the merged trace. An arrow leads from the last rank's submission of a tensor to the span
that every other rank could start only then. The spans of a thread must nest. Spans of one phase that overlap
without nesting go to further threads of the same name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pyhvd.observe.trace.files import Event
from pyhvd.observe.trace.loading import RankTrace, Turn

NEGOTIATE, QUEUE, RUN, WAIT, PACK, REDUCE, UNPACK, MOVE = range(8)
TRACKS = ("negotiate", "queue", "run", "wait for a rank", "pack", "reduce", "unpack", "allocate, exchange")
_LANES = 1000
# Larger than any rank: viewers treat thread 0 and the thread with its process's number as one thread.
_FIRST_THREAD = 1_000_000


def track_of(phase: str) -> int:
    """Return the track of a phase, by its name in the ranks' files."""
    fixed = {
        "WAIT_FOR_RANK": WAIT,
        "MEMCPY_IN_FUSION_BUFFER": PACK,
        "MEMCPY_OUT_FUSION_BUFFER": UNPACK,
    }
    if phase in fixed:
        return fixed[phase]
    return REDUCE if phase.endswith(("_ALLREDUCE", "_REDUCESCATTER", "_ADASUM")) else MOVE


@dataclass(slots=True)
class Span:
    """One span of the merged trace; in whole ns, so that written spans nest as exactly as these do."""

    begin: int
    end: int
    name: str
    category: str
    args: Event
    lane: int = 0


def lay_out(spans: list[Span]) -> list[Span]:
    """Give each span the first lane on which it nests with the earlier spans; return the spans by time."""
    spans.sort(key=lambda span: (span.begin, -span.end))
    open_ends: list[list[int]] = []
    for span in spans:
        for lane, ends in enumerate(open_ends):
            while ends and ends[-1] <= span.begin:
                ends.pop()
            if not ends or span.end <= ends[-1]:
                ends.append(span.end)
                span.lane = lane
                break
        else:
            open_ends.append([span.end])
            span.lane = len(open_ends) - 1
    return spans


def merge(traces: Sequence[RankTrace]) -> Event:
    """Return the merged trace, as an object with ``traceEvents`` and ``metadata``."""
    origin = min((begin for trace in traces for begin in _begins(trace)), default=0.0)
    events: list[Event] = []
    places: dict[tuple[int, int, int], tuple[int, int, int]] = {}
    for trace in traces:
        _add_rank(events, trace, origin, places)
    events += _arrows(traces, origin, places)
    clocks = {str(trace.rank): describe_clock(trace) for trace in traces}
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "metadata": {
            "pyhvd_clock": "times are rank 0's; us from the first event",
            "pyhvd_ranks": clocks,
            "pyhvd_uncertainty_us": max(trace.clock.uncertainty for trace in traces) / 1000,
        },
    }


def describe_clock(trace: RankTrace) -> dict[str, Any]:
    """Return the facts of a rank's clock: offset (us, at its start), uncertainty (us), drift (ppm)."""
    return {
        "host": trace.host,
        "offset_us": trace.clock.start.offset / 1000,
        "uncertainty_us": trace.clock.uncertainty / 1000,
        "drift_ppm": trace.clock.drift,
        "measured_at_the_end": trace.clock.end is not None,
    }


def _begins(trace: RankTrace) -> Iterable[float]:
    for turn in trace.turns:
        yield turn.ready if turn.submitted is None else min(turn.submitted, turn.ready)
    for phase in trace.phases:
        yield phase.begin


def _since(origin: float, time: float) -> int:
    """Return the ns from an origin to a time, both in us."""
    return round((time - origin) * 1000)


def _thread(track: int, lane: int) -> int:
    return _FIRST_THREAD + track * _LANES + lane


def _us(ns: int) -> float:
    """Return ns in us such that a viewer that truncates (Perfetto does) gets the same ns."""
    us = ns / 1000
    return us if int(us * 1000) == ns else math.nextafter(us, math.inf)


def label(turn: Turn) -> str:
    """Return the text of a turn."""
    set_id, operation, name = turn.key
    return f"{operation.lower()}.{name}" + (f" (process set {set_id})" if set_id else "")


def _add_rank(
    events: list[Event],
    trace: RankTrace,
    origin: float,
    places: dict[tuple[int, int, int], tuple[int, int, int]],
) -> None:
    tracks: list[list[Span]] = [[] for _ in TRACKS]
    owners: list[tuple[int, int, Span]] = []
    for number, turn in enumerate(trace.turns):
        args: Event = {"tensor": turn.key[2], "turn": turn.turn, "bytes": turn.nbytes, "batch": turn.batch}
        if turn.error:
            args["error"] = turn.error
        name, operation = label(turn), turn.key[1]
        ready, begun, ended = (_since(origin, time) for time in (turn.ready, turn.begun, turn.ended))
        if turn.submitted is not None:
            span = Span(
                min(_since(origin, turn.submitted), ready), ready, name, f"NEGOTIATE_{operation}", args
            )
            tracks[NEGOTIATE].append(span)
            owners.append((number, NEGOTIATE, span))
        if begun > ready:
            tracks[QUEUE].append(Span(ready, begun, name, "QUEUE", args))
        span = Span(begun, ended, name, operation, args)
        tracks[RUN].append(span)
        owners.append((number, RUN, span))
    for phase in trace.phases:
        args = {"batch": phase.batch} | ({"waited for rank": phase.rank} if phase.rank >= 0 else {})
        name = f"rank {phase.rank}" if phase.rank >= 0 else phase.name
        begin, end = _since(origin, phase.begin), _since(origin, phase.end)
        tracks[track_of(phase.name)].append(Span(begin, end, name, phase.name, args))
    rank = trace.rank
    events.append(_metadata("process_name", rank, 0, name=f"rank {rank} ({trace.host})"))
    events.append(_metadata("process_sort_index", rank, 0, sort_index=rank))
    for track, spans in enumerate(tracks):
        lanes = 1 + max((span.lane for span in lay_out(spans)), default=-1)
        for lane in range(lanes):
            tid = _thread(track, lane)
            events.append(_metadata("thread_name", rank, tid, name=TRACKS[track]))
            events.append(_metadata("thread_sort_index", rank, tid, sort_index=tid))
        for span in spans:
            event = _event(span.name, "X", span.begin, rank, _thread(track, span.lane))
            event |= {"dur": _us(span.end - span.begin), "cat": span.category, "args": span.args}
            events.append(event)
    for number, track, span in owners:
        places[rank, number, track] = (span.begin, span.end, _thread(track, span.lane))


def turns_together(traces: Sequence[RankTrace]) -> list[list[tuple[int, int, Turn]]]:
    """Return the records of each turn over all ranks, as (rank, number on that rank, turn), by time."""
    together: dict[tuple[tuple[int, str, str], str], list[tuple[int, int, Turn]]] = {}
    for trace in traces:
        for number, turn in enumerate(trace.turns):
            together.setdefault((turn.key, turn.turn), []).append((trace.rank, number, turn))
    return sorted(together.values(), key=lambda parts: min(turn.ready for _, _, turn in parts))


def last_to_submit(parts: Sequence[tuple[int, int, Turn]]) -> tuple[float, int, int] | None:
    """Return (time, rank, number of the turn) of a tensor's last submission; None if there was none."""
    times = [(turn.submitted, rank, number) for rank, number, turn in parts if turn.submitted is not None]
    return max(times) if times else None


def _arrows(
    traces: Sequence[RankTrace],
    origin: float,
    places: dict[tuple[int, int, int], tuple[int, int, int]],
) -> list[Event]:
    events: list[Event] = []
    for parts in turns_together(traces):
        last = last_to_submit(parts)
        if last is None or len(parts) < 2:
            continue
        when, slowest, its_number = last
        begin, end, tid = places[slowest, its_number, NEGOTIATE]
        start = min(max(_since(origin, when), begin), end)
        for rank, number, turn in parts:
            if rank == slowest:
                continue
            arrow = {"cat": "last to submit", "id": len(events) // 2}
            to_begin, _, to_tid = places[rank, number, RUN]
            events.append(_event(label(turn), "s", start, slowest, tid) | arrow)
            # Clocks are not exact, but an arrow must not point backwards.
            events.append(_event(label(turn), "f", max(to_begin, start), rank, to_tid) | arrow | {"bp": "e"})
    return events


def _event(name: str, kind: str, ns: int, pid: int, tid: int) -> Event:
    return {"name": name, "ph": kind, "ts": _us(ns), "pid": pid, "tid": tid}


def _metadata(what: str, pid: int, tid: int, **args: Any) -> Event:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": args}
