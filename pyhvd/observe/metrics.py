"""What one rank has done so far: the counting of what goes by message, and the snapshot that users get.

Owns: :class:`Meter`, which the engine counts with; :class:`Histogram` and :class:`Metrics`, what
``pyhvd.metrics()`` returns. The fast lane counts for itself, in C (``counters.h``), and the meter reads it.
Knows nothing of Prometheus, nor of contexts.

A meter's lock guards all that it has counted; it is held for some additions, once per response.
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pyhvd.negotiation.message_table import StragglerStats
from pyhvd.negotiation.messages import RequestList, bytes_to_bits

BUCKETS = 48
"""As in ``counters.h``: the k-th bucket counts values up to 2**k, and above 2**(k-1)."""

FAST = "fast"
"""Agreed on and carried out in shared memory, without messages."""

WINDOW = "window"
"""Agreed on by message, carried out in shared memory."""

MPI = "mpi"
"""Agreed on by message, carried out over MPI."""

_NS = 1e-9


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many values fell between which bounds.

    Attributes
    ----------
    bounds : tuple of float
        Upper bounds of the buckets, inclusive, each twice the one before.
    counts : tuple of int
        Values in each bucket; one more than ``bounds``, for what lies above the last one.
    sum : float
        Of all values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Mean of the values; NaN where there are none."""
        return self.sum / self.count if self.count else math.nan

    def quantile(self, q: float) -> float:
        """Return a bound that at least a share ``q`` of the values do not exceed; NaN where there are none.

        It is at most twice the quantile itself, and infinite above the last bound.
        """
        if not 0 <= q <= 1:
            raise ValueError(f"a quantile is between 0 and 1, not {q!r}")
        wanted, seen = max(q * self.count, 1), 0
        for bound, count in zip((*self.bounds, math.inf), self.counts, strict=True):
            seen += count
            if seen >= wanted:
                return bound
        return math.nan

    def __sub__(self, earlier: Histogram) -> Histogram:
        """Return what has come in since an earlier snapshot of the same histogram."""
        counts = tuple(now - then for now, then in zip(self.counts, earlier.counts, strict=True))
        return Histogram(self.bounds, counts, self.sum - earlier.sum)


@dataclass(frozen=True, slots=True)
class Metrics:
    """What one rank has done since ``init()``. ``dataclasses.asdict`` makes it fit for JSON.

    A tensor counts once it has been carried out; a grouped call counts as its tensors. Bytes are those of
    this rank's input (0 for barrier and join). Everything is this rank's own, but for ``late_tensors`` and
    ``awaited_seconds``, which rank 0 has for every rank.

    Attributes
    ----------
    rank, size : int
        This rank, and how many there are.
    seconds : float
        Since ``init()``; in a difference, between the two snapshots.
    tensors, bytes : dict of str to dict of str to int
        By verb (``"allreduce"``, ...) and lane: ``"fast"`` (agreed on and reduced in shared memory, without
        messages), ``"window"`` (agreed on by message, carried out in shared memory) or ``"mpi"`` (by message,
        over MPI).
    responses : dict of str to int
        Responses, each of which is one or several tensors that rode together, by lane.
    response_tensors, response_bytes : Histogram
        How many tensors, and bytes, rode together in one response.
    cache_hits, cache_misses : int
        Submitted tensors that the response cache knew, and those that it did not.
    timed : bool
        Whether times are measured (PYHVD_METRICS_TIMES, or a metrics port); else the next three are empty.
    negotiation_seconds : Histogram
        Per tensor: from when this rank told the others to when it knew that all had submitted it.
    execution_seconds : Histogram
        Per response: from then until the results were there.
    wait_seconds : Histogram
        Per wait: how long a thread of the program waited for a handle that was not ready.
    late_tensors : tuple of int
        By rank: tensors that it was the last to submit. Empty but on rank 0.
    awaited_seconds : tuple of float
        By rank: how long others waited for it, and for nobody else. Times overlap only once: all ranks' sum
        is no more than has passed. Empty but on rank 0.
    errors : dict of str to int
        Tensors that ended in an error, by the error's class; calls that were refused here, as ``"refused"``.
    stall_warnings : int
        Reports of stalled tensors that rank 0 has logged.
    stalled_tensors : int
        Tensors that were overdue when rank 0 last looked.
    """

    rank: int
    size: int
    seconds: float
    tensors: dict[str, dict[str, int]]
    bytes: dict[str, dict[str, int]]
    responses: dict[str, int]
    response_tensors: Histogram
    response_bytes: Histogram
    cache_hits: int
    cache_misses: int
    timed: bool
    negotiation_seconds: Histogram
    execution_seconds: Histogram
    wait_seconds: Histogram
    late_tensors: tuple[int, ...]
    awaited_seconds: tuple[float, ...]
    errors: dict[str, int]
    stall_warnings: int
    stalled_tensors: int


class FastCounts(Protocol):
    """What the fast lane has counted; see :class:`pyhvd.native.shared_memory.Lane`."""

    timed: bool

    def counts(self) -> dict[str, tuple[list[int], int]]:
        """Return histograms by name: the counts of the buckets, and the sum of the values."""

    def lateness(self) -> list[tuple[int, int]]:
        """Return, for each rank, tensors that it was the last to post, and the ns that others had waited."""


class _Counter:
    """A histogram that grows."""

    def __init__(self) -> None:
        self.buckets = [0] * BUCKETS
        self.sum = 0

    def observe(self, value: int, times: int = 1) -> None:
        """Count a value so many times."""
        self.buckets[bucket_of(value)] += times
        self.sum += value * times


def bucket_of(value: int) -> int:
    """Return the bucket of a value, as ``pyhvd_bucket`` does."""
    return min(max(value - 1, 0).bit_length(), BUCKETS - 1)


_SPECS = {
    # name: lowest and highest exponent that are shown, and the unit
    "response_tensors": (0, 12, 1.0),
    "response_bytes": (2, 30, 1.0),
    "negotiation": (10, 36, _NS),
    "execution": (10, 36, _NS),
    "wait": (10, 36, _NS),
}


def _shown(name: str, buckets: Sequence[int], total: int) -> Histogram:
    """Return a histogram between its bounds; what is below the lowest is counted there."""
    low, high, unit = _SPECS[name]
    bounds = tuple(2.0**k * unit for k in range(low, high + 1))
    counts = (sum(buckets[: low + 1]), *buckets[low + 1 : high + 1], sum(buckets[high + 1 :]))
    return Histogram(bounds, counts, total * unit)


class Meter:
    """Counts for one rank. Any thread may call it.

    Parameters
    ----------
    rank, size : int
        This rank, and how many there are.
    timed : bool
        Whether to measure times.
    fast : FastCounts, optional
        The fast lane.
    lateness : StragglerStats, optional
        Of what goes by message: on rank 0.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        timed: bool,
        fast: FastCounts | None = None,
        lateness: StragglerStats | None = None,
    ) -> None:
        self._rank = rank
        self._size = size
        self._fast = fast
        self._lateness = lateness
        self._begun = time.monotonic()
        self._lock = threading.Lock()
        self._histograms = {name: _Counter() for name in _SPECS}
        self._tensors: dict[tuple[str, str], int] = defaultdict(int)
        self._bytes: dict[tuple[str, str], int] = defaultdict(int)
        self._responses: dict[str, int] = defaultdict(int)
        self._errors: dict[str, int] = defaultdict(int)
        self._hits = 0
        self._misses = 0
        self._stall_warnings = 0
        self._stalled = 0
        self.timed = timed

    @property
    def timed(self) -> bool:
        """Whether times are measured; may be changed at any time."""
        return self._timed

    @timed.setter
    def timed(self, value: bool) -> None:
        self._timed = value
        if self._fast is not None:
            self._fast.timed = value

    # -- for the engine ------------------------------------------------------------------------------

    def clock(self) -> int:
        """Return the time in ns, or 0 where times are not measured."""
        return time.monotonic_ns() if self._timed else 0

    def submitted(self, hits: int, misses: int) -> None:
        """So many tensors have been submitted that the response cache knew, or did not know."""
        with self._lock:
            self._hits += hits
            self._misses += misses

    def sent(self, message: RequestList) -> int:
        """The other ranks are being told of these tensors; return the time (ns), 0 if it is not wanted."""
        hits = sum(bytes_to_bits(bits).bit_count() for bits in message.bits.values())
        misses = sum(request.dtype >= 0 and not request.error for _, request in message.requests)
        self.submitted(hits, misses)
        return self.clock()

    def agreed(self, verb: str, lane: str, sizes: Sequence[int], told: Sequence[int], now: int) -> None:
        """A response is about to be carried out.

        Counted before anybody can see the results: who then reads the metrics finds them there.

        Parameters
        ----------
        verb, lane : str
            What, and which way.
        sizes : sequence of int
            Bytes of each tensor.
        told : sequence of int
            When (ns) this rank told the others of each; 0: not known.
        now : int
            The time (ns), or 0 where it is not timed.
        """
        with self._lock:
            self._tensors[verb, lane] += len(sizes)
            self._bytes[verb, lane] += sum(sizes)
            self._responses[lane] += 1
            self._histograms["response_tensors"].observe(len(sizes))
            self._histograms["response_bytes"].observe(sum(sizes))
            for when in told if now else ():
                if when:
                    self._histograms["negotiation"].observe(max(now - when, 0))

    def carried_out(self, began: int) -> None:
        """A response has been carried out that was agreed on at ``began`` (ns; 0: it is not timed)."""
        self._timed_since("execution", began)

    def waited(self, began: int) -> None:
        """A caller has waited for a handle since ``began`` (ns; 0: it is not timed)."""
        self._timed_since("wait", began)

    def failed(self, kind: str) -> None:
        """A tensor has ended in an error, or a call has been refused."""
        with self._lock:
            self._errors[kind] += 1

    def stalled(self, tensors: int, warned: bool = False) -> None:
        """So many tensors are overdue at this look; and whether that has been reported."""
        with self._lock:
            self._stalled = tensors
            self._stall_warnings += warned

    def _timed_since(self, name: str, began: int) -> None:
        if began and (now := self.clock()):
            with self._lock:
                self._histograms[name].observe(max(now - began, 0))

    # -- for users -----------------------------------------------------------------------------------

    def snapshot(self) -> Metrics:
        """Return what has been counted so far."""
        fast = self._fast.counts() if self._fast is not None else {}
        late = self._late()
        with self._lock:
            totals = {name: (list(c.buckets), c.sum) for name, c in self._histograms.items()}
            for name, (buckets, total) in fast.items():
                mine = totals[name]
                totals[name] = [a + b for a, b in zip(mine[0], buckets, strict=True)], mine[1] + total
            responses = sum(fast["response_tensors"][0]) if fast else 0
            on_lane = fast["response_tensors"][1] if fast else 0
            tensors, nbytes = dict(self._tensors), dict(self._bytes)
            if on_lane:
                tensors["allreduce", FAST] = on_lane
                nbytes["allreduce", FAST] = fast["response_bytes"][1]
            by_lane = {**self._responses, **({FAST: responses} if responses else {})}
            return Metrics(
                rank=self._rank,
                size=self._size,
                seconds=time.monotonic() - self._begun,
                tensors=_nested(tensors),
                bytes=_nested(nbytes),
                responses=dict(sorted(by_lane.items())),
                response_tensors=_shown("response_tensors", *totals["response_tensors"]),
                response_bytes=_shown("response_bytes", *totals["response_bytes"]),
                cache_hits=self._hits + on_lane,
                cache_misses=self._misses,
                timed=self._timed,
                negotiation_seconds=_shown("negotiation", *totals["negotiation"]),
                execution_seconds=_shown("execution", *totals["execution"]),
                wait_seconds=_shown("wait", *totals["wait"]),
                late_tensors=tuple(n for n, _ in late),
                awaited_seconds=tuple(seconds for _, seconds in late),
                errors=dict(sorted(self._errors.items())),
                stall_warnings=self._stall_warnings,
                stalled_tensors=self._stalled,
            )

    def _late(self) -> list[tuple[int, float]]:
        if self._lateness is None:
            return []
        late = self._lateness.totals()
        if self._fast is None:
            return late
        posted = self._fast.lateness()
        return [(n + m, s + ns * _NS) for (n, s), (m, ns) in zip(late, posted, strict=True)]


def _nested(flat: dict[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    nested: dict[str, dict[str, int]] = {}
    for (verb, lane), value in sorted(flat.items()):
        nested.setdefault(verb, {})[lane] = value
    return nested
