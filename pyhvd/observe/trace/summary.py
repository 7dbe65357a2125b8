"""Summary of a recording: time by part, for each tensor and for all tensors.

Owns the arithmetic; does no I/O. The time of one turn on one rank has these parts:

    submitted ... slowest rank submitted   waiting for that rank
    ... agreement on this rank             negotiation
    ... batch starts                       queue
    ... batch ends                         the data path: waiting, packing, reducing, the exchange between
                                           hosts, unpacking, other

A tensor's share of its batch's time is its share of the batch's bytes. Times are means over the ranks of the
turn, in us.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pyhvd.observe.trace.loading import RankTrace, Turn
from pyhvd.observe.trace.merging import ACROSS, last_to_submit, track_of, turns_together

Interval = tuple[float, float]


PARTS = ("slowest", "negotiation", "queue", "wait", "pack", "reduce", "between hosts", "unpack", "other")
"""Parts of a turn's time; from "wait" on they are the tracks of the data path, with the same numbers."""


@dataclass(slots=True)
class Total:
    """Sums of one tensor, or of all tensors; times in us, means over ranks.

    Attributes
    ----------
    nbytes : int
        Bytes on one rank, over all turns.
    failed : int
        Turns that ended in an error.
    parts : dict of str to float
        Time of each of :data:`PARTS`.
    waited_for : dict of int to float
        Time for which the others waited, by the rank that was last.
    last : Counter of int
        Turns in which a rank was last, by rank.
    """

    name: str
    turns: int = 0
    nbytes: int = 0
    failed: int = 0
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    waited_for: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    last: Counter[int] = field(default_factory=Counter)

    @property
    def time(self) -> float:
        """Sum of all parts (us)."""
        return sum(self.parts.values())

    def slowest_rank(self) -> int | None:
        """Return the rank for which the others waited longest, or None."""
        return max(self.waited_for, key=lambda rank: (self.waited_for[rank], -rank), default=None)


def summarise(traces: Sequence[RankTrace]) -> tuple[Total, list[Total]]:
    """Return the total of all tensors, and the total of each tensor, longest first.

    The total of all is less than the sum, because many tensors wait or negotiate at the same time. On each
    rank a part counts for the time in which at least one tensor was in it.
    """
    shares = {turn: share for trace in traces for turn, share in _shares(trace)}
    totals: dict[tuple[int, str, str], Total] = {}
    everything = Total("all together")
    spans: defaultdict[tuple[int, str, int], list[Interval]] = defaultdict(list)
    for turns in turns_together(traces):
        own = totals.setdefault(turns[0].key, Total(turns[0].label))
        last = last_to_submit(turns)
        # With one rank's record alone it is not known that anybody waited.
        slowest = last[1].rank if last is not None and len(turns) > 1 else -1
        for total in (own, everything):
            _count(total, turns, slowest)
        for turn in turns:
            for part, (begin, end) in _before_the_batch(turn, last).items():
                own.parts[part] += (end - begin) / len(turns)
                who = slowest if part == "slowest" else -1
                spans[turn.rank, part, who].append((begin, end))
                if who >= 0:
                    own.waited_for[who] += (end - begin) / len(turns)
            for part, us in shares[turn].items():
                own.parts[part] += us / len(turns)
                everything.parts[part] += us / len(traces)
    for (_, part, who), intervals in spans.items():
        us = covered(intervals) / len(traces)
        everything.parts[part] += us
        if who >= 0:
            everything.waited_for[who] += us
    return everything, sorted(totals.values(), key=lambda total: -total.time)


@dataclass(slots=True)
class Across:
    """What crossed between hosts; times in us, means over ranks.

    Attributes
    ----------
    nbytes : float
        Bytes that a rank sent and received.
    time, share : float
        Time in the exchange; its share of the time from a rank's first submission to its last result.
    waited_for : dict of str to float
        That time by the host whose bytes came last in it.
    last : Counter of str
        Batches, of all ranks together, in which a host's bytes came last.
    """

    nbytes: float = 0.0
    time: float = 0.0
    share: float = 0.0
    waited_for: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    last: Counter[str] = field(default_factory=Counter)


def summarise_hosts(traces: Sequence[RankTrace]) -> Across:
    """Return what crossed between hosts."""
    across, ranks = Across(), len(traces)
    for trace in traces:
        last: dict[int, str] = {}
        spent = 0.0
        for phase in (each for each in trace.phases if track_of(each.name) == ACROSS):
            across.nbytes += phase.nbytes / ranks
            across.waited_for[phase.last_host] += (phase.end - phase.begin) / ranks
            spent += phase.end - phase.begin
            last[phase.batch] = phase.last_host
        across.last.update(last.values())
        across.time += spent / ranks
        begins = [turn.ready if turn.submitted is None else turn.submitted for turn in trace.turns]
        whole = max((turn.ended for turn in trace.turns), default=0.0) - min(begins, default=0.0)
        across.share += spent / whole / ranks if whole else 0.0
    return across


def covered(intervals: Sequence[Interval]) -> float:
    """Return the length of the union of intervals."""
    whole, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        if end > reached:
            whole += end - max(begin, reached)
            reached = end
    return whole


def _count(total: Total, turns: Sequence[Turn], slowest: int) -> None:
    total.turns += 1
    total.nbytes += max(turn.nbytes for turn in turns)
    total.failed += any(turn.error for turn in turns)
    if slowest >= 0:
        total.last[slowest] += 1


def _before_the_batch(turn: Turn, last: tuple[float, Turn] | None) -> dict[str, Interval]:
    """Return the intervals in which a rank waited for the slowest rank, negotiated, and queued."""
    intervals = {"queue": (turn.ready, max(turn.begun, turn.ready))}
    if turn.submitted is None or last is None:
        return intervals
    # Clocks are not exact, but a tensor is never ready before its last submission.
    submitted = min(turn.submitted, turn.ready)
    everywhere = min(max(last[0], submitted), turn.ready)
    return intervals | {"slowest": (submitted, everywhere), "negotiation": (everywhere, turn.ready)}


def _shares(trace: RankTrace) -> Iterator[tuple[Turn, dict[str, float]]]:
    """Yield each turn with its share (us) of each part of its batch's data path."""
    spent: defaultdict[int, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for phase in trace.phases:
        spent[phase.batch][PARTS[track_of(phase.name)]] += phase.end - phase.begin
    nbytes: Counter[int] = Counter()
    members: Counter[int] = Counter()
    for turn in trace.turns:
        nbytes[turn.batch] += turn.nbytes
        members[turn.batch] += 1
    for turn in trace.turns:
        whole = nbytes[turn.batch]
        share = turn.nbytes / whole if whole else 1 / members[turn.batch]
        parts = {part: us * share for part, us in spent[turn.batch].items()}
        rest = (turn.ended - turn.begun) * share - sum(parts.values())
        parts["other"] = parts.get("other", 0.0) + max(rest, 0.0)
        yield turn, parts
