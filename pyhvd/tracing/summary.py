"""Where the time went: sums over a recording, by tensor and in all.

Owns: the arithmetic; no files, no printing. For one turn of one tensor, on one rank:

    submitted ... slowest rank submitted   waiting for that rank
    ... agreement here                     negotiation
    ... its batch begins                   queue
    ... it has ended                       the data path: waiting, packing, reducing, unpacking, the rest

What a batch's tensors share, each gets by its bytes. Times are means over the ranks that took part, in us.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pyhvd.tracing.loading import RankTrace, Turn
from pyhvd.tracing.merging import (
    MOVE,
    PACK,
    REDUCE,
    UNPACK,
    WAIT,
    label,
    last_to_submit,
    track_of,
    turns_together,
)

PARTS = ("slowest", "negotiation", "queue", "wait", "pack", "reduce", "unpack", "other")
_TRACKS = {WAIT: "wait", PACK: "pack", REDUCE: "reduce", UNPACK: "unpack", MOVE: "other"}


@dataclass(slots=True)
class Total:
    """Sums of one tensor, or of all.

    Attributes
    ----------
    name : str
        The tensor with its operation.
    turns : int
        How often it went round.
    nbytes : int
        Bytes on one rank, over all turns.
    parts : dict of str to float
        By :data:`PARTS`, us, mean over ranks.
    waited_for : dict of int to float
        By the rank that was last, the us for which the others waited (mean over ranks).
    last : dict of int to int
        How often a rank was last.
    failed : int
        Turns that ended in an error.
    """

    name: str
    turns: int = 0
    nbytes: int = 0
    failed: int = 0
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    waited_for: dict[int, float] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)

    @property
    def time(self) -> float:
        """All parts (us)."""
        return sum(self.parts.values())

    def slowest_rank(self) -> int | None:
        """Return the rank for which the others waited longest, or None."""
        return max(self.waited_for, key=lambda rank: (self.waited_for[rank], -rank), default=None)


def summarise(traces: Sequence[RankTrace]) -> tuple[Total, list[Total]]:
    """Return the sum over all tensors, and each tensor's, the most time first."""
    shares = {trace.rank: _shares(trace) for trace in traces}
    totals: dict[tuple[int, str, str], Total] = {}
    everything = Total("all")
    for parts in turns_together(traces):
        first = parts[0][2]
        own = totals.setdefault(first.key, Total(label(first)))
        for total in (own, everything):
            _add(total, parts, shares)
    return everything, sorted(totals.values(), key=lambda total: -total.time)


def _shares(trace: RankTrace) -> list[dict[str, float]]:
    """Return, by turn, its share (us) of each part of its batch's data path."""
    spent: dict[int, dict[str, float]] = {}
    for phase in trace.phases:
        batch = spent.setdefault(phase.batch, {})
        part = _TRACKS[track_of(phase.name)]
        batch[part] = batch.get(part, 0.0) + phase.end - phase.begin
    nbytes: dict[int, int] = {}
    members: dict[int, int] = {}
    for turn in trace.turns:
        nbytes[turn.batch] = nbytes.get(turn.batch, 0) + turn.nbytes
        members[turn.batch] = members.get(turn.batch, 0) + 1
    shares = []
    for turn in trace.turns:
        whole = nbytes[turn.batch]
        share = turn.nbytes / whole if whole else 1 / members[turn.batch]
        parts = {part: us * share for part, us in spent.get(turn.batch, {}).items()}
        rest = (turn.ended - turn.begun) * share - sum(parts.values())
        parts["other"] = parts.get("other", 0.0) + max(rest, 0.0)
        shares.append(parts)
    return shares


def _add(
    total: Total, parts: Sequence[tuple[int, int, Turn]], shares: dict[int, list[dict[str, float]]]
) -> None:
    ranks = len(parts)
    last = last_to_submit(parts)
    total.turns += 1
    total.nbytes += max(turn.nbytes for _, _, turn in parts)
    total.failed += any(turn.error for _, _, turn in parts)
    waited = 0.0
    for rank, number, turn in parts:
        since = turn.ready
        if last is not None and turn.submitted is not None:
            since = min(max(last[0], turn.submitted), turn.ready)  # clocks are not exact
            waited += since - turn.submitted if since > turn.submitted else 0.0
        total.parts["negotiation"] += max(turn.ready - since, 0.0) / ranks
        total.parts["queue"] += max(turn.begun - turn.ready, 0.0) / ranks
        for part, us in shares[rank][number].items():
            total.parts[part] += us / ranks
    total.parts["slowest"] += waited / ranks
    if last is not None and ranks > 1:
        total.waited_for[last[1]] = total.waited_for.get(last[1], 0.0) + waited / ranks
        total.last[last[1]] = total.last.get(last[1], 0) + 1
