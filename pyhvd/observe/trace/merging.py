"""The merged trace: all ranks on one clock, one process per rank, one thread per phase.

Owns the layout of the merged trace. An arrow leads from the last rank's submission of a tensor to the span
that every other rank could start only then. The spans of a thread must nest. Spans of one phase that overlap
without nesting go to further threads of the same name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pyhvd.observe.trace import rows
from pyhvd.observe.trace.files import Event, metadata
from pyhvd.observe.trace.loading import RankTrace, Turn

NEGOTIATE, QUEUE, RUN, WAIT, PACK, REDUCE, ACROSS, UNPACK, MOVE = range(9)
TRACKS = (
    *("negotiate", "queue", "run", "wait for a rank", "pack", "reduce", "between hosts", "unpack"),
    "allocate, exchange",
)
_TRACK_OF = {
    "WAIT_FOR_RANK": WAIT,
    "MEMCPY_IN_FUSION_BUFFER": PACK,
    "MEMCPY_OUT_FUSION_BUFFER": UNPACK,
    rows.EXCHANGE: ACROSS,
}
_LANES = 1000
# Larger than any rank: viewers treat thread 0 and the thread with its process's number as one thread.
_FIRST_THREAD = 1_000_000


def track_of(phase: str) -> int:
    """Return the track of a phase, by its name in the ranks' files."""
    reduces = phase.endswith(("_ALLREDUCE", "_REDUCESCATTER", "_ADASUM"))
    return _TRACK_OF.get(phase, REDUCE if reduces else MOVE)


@dataclass(slots=True)
class TraceSpan:
    """One span of the merged trace; in whole ns, so that written spans nest as exactly as these do."""

    begin: int
    end: int
    name: str
    category: str
    args: Event
    lane: int = 0


Drawn = dict[tuple[Turn, int], TraceSpan]
"""The spans that an arrow may join: by turn and track (NEGOTIATE or RUN)."""


def lay_out(spans: list[TraceSpan]) -> list[TraceSpan]:
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
    drawn: Drawn = {}
    events = [event for trace in traces for event in _rank_events(trace, origin, drawn)]
    events += _arrows(traces, origin, drawn)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "metadata": {
            "pyhvd_clock": "times are rank 0's; us from the first event",
            "pyhvd_ranks": {str(trace.rank): _describe_clock(trace) for trace in traces},
            "pyhvd_uncertainty_us": max(trace.clock.uncertainty for trace in traces) / 1000,
            "pyhvd_generation": traces[0].generation,
        },
    }


def _describe_clock(trace: RankTrace) -> Event:
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


def _rank_events(trace: RankTrace, origin: float, drawn: Drawn) -> Iterator[Event]:
    """Yield the events of one rank."""
    rank = trace.rank
    yield metadata("process_name", {"name": f"rank {rank} ({trace.host})"}, rank)
    yield metadata("process_sort_index", {"sort_index": rank}, rank)
    for track, spans in enumerate(_spans(trace, origin, drawn)):
        lanes = 1 + max((span.lane for span in lay_out(spans)), default=-1)
        for tid in (_thread(track, lane) for lane in range(lanes)):
            yield metadata("thread_name", {"name": TRACKS[track]}, rank, tid)
            yield metadata("thread_sort_index", {"sort_index": tid}, rank, tid)
        for span in spans:
            event = _event(span.name, "X", span.begin, rank, _thread(track, span.lane))
            yield event | {"dur": _us(span.end - span.begin), "cat": span.category, "args": span.args}


def _spans(trace: RankTrace, origin: float, drawn: Drawn) -> list[list[TraceSpan]]:
    """Return the spans of each track; note in ``drawn`` those that arrows join."""
    tracks: list[list[TraceSpan]] = [[] for _ in TRACKS]
    for turn in trace.turns:
        args: Event = {"tensor": turn.key[2], "turn": turn.turn, "bytes": turn.nbytes, "batch": turn.batch}
        if turn.error:
            args["error"] = turn.error
        name, operation = turn.label, turn.key[1]
        ready, begun, ended = (_since(origin, time) for time in (turn.ready, turn.begun, turn.ended))
        if turn.submitted is not None:
            submitted = min(_since(origin, turn.submitted), ready)
            drawn[turn, NEGOTIATE] = TraceSpan(submitted, ready, name, f"NEGOTIATE_{operation}", args)
            tracks[NEGOTIATE].append(drawn[turn, NEGOTIATE])
        if begun > ready:
            tracks[QUEUE].append(TraceSpan(ready, begun, name, "QUEUE", args))
        drawn[turn, RUN] = TraceSpan(begun, ended, name, operation, args)
        tracks[RUN].append(drawn[turn, RUN])
    for phase in trace.phases:
        about: Event = {"batch": phase.batch}
        if phase.rank >= 0:
            about["waited for rank"] = phase.rank
        if phase.last_host:
            about |= {"bytes": phase.nbytes, "last host": phase.last_host}
        name = f"rank {phase.rank}" if phase.rank >= 0 else phase.name
        begin, end = _since(origin, phase.begin), _since(origin, phase.end)
        tracks[track_of(phase.name)].append(TraceSpan(begin, end, name, phase.name, about))
    return tracks


def turns_together(traces: Sequence[RankTrace]) -> list[list[Turn]]:
    """Return the records that the ranks have of each turn, by time."""
    together: dict[tuple[tuple[int, str, str], str], list[Turn]] = {}
    for trace in traces:
        for turn in trace.turns:
            together.setdefault((turn.key, turn.turn), []).append(turn)
    return sorted(together.values(), key=lambda turns: min(turn.ready for turn in turns))


def last_to_submit(turns: Iterable[Turn]) -> tuple[float, Turn] | None:
    """Return the time of a turn's last submission, and that rank's record; None without a submission."""
    times = [(turn.submitted, turn) for turn in turns if turn.submitted is not None]
    return max(times, key=lambda each: (each[0], each[1].rank), default=None)


def _arrows(traces: Sequence[RankTrace], origin: float, drawn: Drawn) -> list[Event]:
    events: list[Event] = []
    for turns in turns_together(traces):
        last = last_to_submit(turns)
        if last is None:
            continue
        when, slowest = last
        tail = drawn[slowest, NEGOTIATE]
        start = min(max(_since(origin, when), tail.begin), tail.end)
        for turn in turns:
            if turn is slowest:
                continue
            arrow = {"cat": "last to submit", "id": len(events) // 2}
            head = drawn[turn, RUN]
            tail_thread, head_thread = _thread(NEGOTIATE, tail.lane), _thread(RUN, head.lane)
            events.append(_event(turn.label, "s", start, slowest.rank, tail_thread) | arrow)
            # Clocks are not exact, but an arrow must not point backwards.
            end = _event(turn.label, "f", max(head.begin, start), turn.rank, head_thread)
            events.append(end | arrow | {"bp": "e"})
    return events


def _event(name: str, kind: str, ns: int, pid: int, tid: int) -> Event:
    return {"name": name, "ph": kind, "ts": _us(ns), "pid": pid, "tid": tid}
