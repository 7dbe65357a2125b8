"""Metrics of one rank: the counters that the engine updates, and the snapshot that users read.

Owns :class:`Meter`, the engine's counters, and :class:`Histogram` and :class:`Metrics`, the results of
``pyhvd.metrics()``. The fast lane has its own counters in C (``counters.h``); the meter adds them.
Knows nothing of Prometheus or of contexts.

One lock guards a meter's counters. A thread holds it for a few additions, once per response.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyhvd.native.shared_memory import pool_counts
from pyhvd.negotiation.message_table import StragglerStats
from pyhvd.negotiation.messages import RequestList, bytes_to_bits, verb
from pyhvd.observe.host_meter import HostMeter

if TYPE_CHECKING:
    from pyhvd.native.shared_memory import FastPath

BUCKETS = 48
"""Buckets of a histogram; bucket k counts values above 2**(k-1) and up to 2**k, as in ``counters.h``."""

FAST = "fast"
"""Lane of tensors that are negotiated and reduced in shared memory, without messages."""

WINDOW = "window"
"""Lane of tensors that are negotiated by message and reduced in shared memory."""

MPI = "mpi"
"""Lane of tensors that are negotiated by message and reduced over MPI."""

_NS = 1e-9


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of values between bounds.

    Attributes
    ----------
    bounds : tuple of float
        Upper bounds of the buckets, inclusive, each twice the one before.
    counts : tuple of int
        Values in each bucket; the last count, one more than ``bounds``, is of values above the last bound.
    sum : float
        Sum of all values.
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
        """Mean of the values; NaN if there are none."""
        return self.sum / self.count if self.count else math.nan

    def quantile(self, q: float) -> float:
        """Return an upper bound of the ``q``-quantile; NaN if there are no values.

        The bound is at most twice the quantile; it is infinite above the last bucket.
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
        """Return the values added since an earlier snapshot of the same histogram."""
        counts = tuple(now - then for now, then in zip(self.counts, earlier.counts, strict=True))
        return Histogram(self.bounds, counts, self.sum - earlier.sum)


@dataclass(frozen=True, slots=True)
class Metrics:
    """Counters of one rank since ``init()``; ``dataclasses.asdict`` converts them for JSON.

    A tensor counts when its collective runs; a grouped call counts as its tensors. Bytes are those of this
    rank's input (0 for barrier and join). All values are of this rank alone, except ``late_tensors`` and
    ``awaited_seconds``, which rank 0 has for every rank, and those that the lowest rank of a host has for it.

    Attributes
    ----------
    rank, size : int
        This rank, and the number of ranks.
    seconds : float
        Time since ``init()``; in a difference, time between the two snapshots.
    tensors, bytes : dict of str to dict of str to int
        By verb (``"allreduce"``, ...) and lane: ``"fast"`` (negotiated and carried out in shared memory,
        without messages), ``"window"`` (negotiated by message, carried out in shared memory) or ``"mpi"``
        (negotiated by message, carried out over MPI).
    responses : dict of str to int
        Responses by lane; a response is one tensor, or several that were fused.
    response_tensors, response_bytes : Histogram
        Tensors and bytes of one response.
    cache_hits, cache_misses : int
        Submitted tensors that were in the response cache, and those that were not.
    timed : bool
        Whether times are measured, as with a metrics port. If not, the next three are empty.
    negotiation_seconds : Histogram
        Per tensor: from this rank's announcement until it knew that all ranks had submitted the tensor.
    execution_seconds : Histogram
        Per response: from the agreement until the results were ready.
    wait_seconds : Histogram
        Per wait of a thread of the program for a handle that was not ready.
    late_tensors : tuple of int
        By rank: tensors that this rank was the last to submit. Empty except on rank 0.
    awaited_seconds : tuple of float
        By rank: time for which others waited for this rank alone. The sum over all ranks is at most the time
        that passed. Empty except on rank 0.
    errors : dict of str to int
        Failed tensors by class of error; calls that this rank rejected count as ``"refused"``.
    stall_warnings : int
        Stall reports that rank 0 logged.
    stalled_tensors : int
        Overdue tensors at rank 0's last look.
    link_sent_bytes, link_received_bytes : dict of str to dict of str to int
        Bytes over links, by the other host's name and by connection: ``"rail"`` (this rank's rails) or
        ``"agreement"`` (of all ranks of this host; on its lowest rank only).
    link_wait_seconds : dict of str to float
        By host: time for which this rank waited in an exchange between hosts until bytes of that host came.
    late_exchanges : dict of str to int
        By host: operations between hosts in which the last bytes for which this rank waited came from that
        host. This rank's own host: operations in which it waited for no other.
    host_late_tensors : dict of str to int
        By host: cached tensors that this host was the last to announce, as seen here. On the lowest rank of
        each host only.
    host_awaited_seconds : dict of str to float
        By other host: time for which this host's ranks waited for that host alone to announce cached tensors.
        On the lowest rank of each host only.
    results_kept_bytes : int
        Bytes of freed results that this process keeps for later ones now; see ``PYHVD_POOL_SIZE``.
    results_new, results_reused : int
        Large results of this process that got new memory, and those that got the memory of a freed result.
    generation : int or None
        The generation of this rank in an elastic job, from 0; None in any other job.
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
    link_sent_bytes: dict[str, dict[str, int]] = field(default_factory=dict)
    link_received_bytes: dict[str, dict[str, int]] = field(default_factory=dict)
    link_wait_seconds: dict[str, float] = field(default_factory=dict)
    late_exchanges: dict[str, int] = field(default_factory=dict)
    host_late_tensors: dict[str, int] = field(default_factory=dict)
    host_awaited_seconds: dict[str, float] = field(default_factory=dict)
    results_kept_bytes: int = 0
    results_new: int = 0
    results_reused: int = 0
    generation: int | None = None


@dataclass(slots=True)
class _OpenHistogram:
    """A histogram under construction."""

    buckets: list[int] = field(default_factory=lambda: [0] * BUCKETS)
    sum: int = 0

    def observe(self, value: int) -> None:
        """Count a value."""
        self.buckets[bucket_of(value)] += 1
        self.sum += value


def bucket_of(value: int) -> int:
    """Return the bucket of a value; the same as ``pyhvd_bucket`` in C."""
    return min(max(value - 1, 0).bit_length(), BUCKETS - 1)


_SPECS = {
    # name of FastPath.counts(): the field of Metrics, lowest and highest exponent shown, and the unit
    "response_tensors": ("response_tensors", 0, 12, 1.0),
    "response_bytes": ("response_bytes", 2, 30, 1.0),
    "negotiation": ("negotiation_seconds", 10, 36, _NS),
    "execution": ("execution_seconds", 10, 36, _NS),
    "wait": ("wait_seconds", 10, 36, _NS),
}


def _shown(buckets: Sequence[int], total: int, low: int, high: int, unit: float) -> Histogram:
    """Return a histogram between its shown bounds; smaller values count in the lowest bucket."""
    bounds = tuple(2.0**k * unit for k in range(low, high + 1))
    counts = (sum(buckets[: low + 1]), *buckets[low + 1 : high + 1], sum(buckets[high + 1 :]))
    return Histogram(bounds, counts, total * unit)


@dataclass(eq=False)
class Meter:
    """The counters of one rank; any thread may update them.

    Parameters
    ----------
    rank, size : int
        This rank, and the number of ranks.
    fast : FastPath, optional
        The fast lane's counters.
    lateness : StragglerStats, optional
        Stragglers of tensors negotiated by message; on rank 0.
    hosts : HostMeter, optional
        Counts what crosses to other hosts.
    generation : int, optional
        The generation of this rank, in an elastic job.
    results : callable
        Returns (bytes kept, results in new memory, results in kept memory) of this process.
    timed : bool
        Whether to measure times.
    """

    rank: int
    size: int
    fast: FastPath | None = None
    lateness: StragglerStats | None = None
    hosts: HostMeter | None = None
    generation: int | None = None
    results: Callable[[], tuple[int, int, int]] = pool_counts
    timed: bool = field(kw_only=True)

    def __post_init__(self) -> None:
        if self.fast is not None:
            self.fast.timed = self.timed
        self._begun = time.monotonic()
        _, self._results_new, self._results_reused = self.results()
        self._lock = threading.Lock()
        self._histograms = {name: _OpenHistogram() for name in _SPECS}
        self._tensors: Counter[tuple[str, str]] = Counter()
        self._bytes: Counter[tuple[str, str]] = Counter()
        self._responses: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._hits = 0
        self._misses = 0
        self._stall_warnings = 0
        self._stalled = 0

    # -- for the engine ------------------------------------------------------------------------------

    def clock(self) -> int:
        """Return the time in ns, or 0 if times are not measured."""
        return time.monotonic_ns() if self.timed else 0

    def submitted(self, hits: int, misses: int) -> None:
        """Count submitted tensors that hit and missed the response cache."""
        with self._lock:
            self._hits += hits
            self._misses += misses

    def sent(self, message: RequestList) -> int:
        """Count the tensors of a message to the coordinator; return :meth:`clock`."""
        hits = sum(bytes_to_bits(bits).bit_count() for bits in message.bits.values())
        misses = sum(request.dtype >= 0 and not request.error for _, request in message.requests)
        self.submitted(hits, misses)
        return self.clock()

    def agreed(
        self, verb: str, lane: str, sizes: Sequence[int], announced_ns: Sequence[int], now: int
    ) -> None:
        """Count a response that is about to run.

        A response counts before its results are visible, so that a thread with a result finds it counted.

        Parameters
        ----------
        verb, lane : str
            The collective, and one of FAST, WINDOW, MPI.
        sizes : sequence of int
            Bytes of each tensor.
        announced_ns : sequence of int
            Time (ns) of this rank's announcement of each tensor; 0 if not known.
        now : int
            The time (ns), or 0 if times are not measured.
        """
        with self._lock:
            self._tensors[verb, lane] += len(sizes)
            self._bytes[verb, lane] += sum(sizes)
            self._responses[lane] += 1
            self._histograms["response_tensors"].observe(len(sizes))
            self._histograms["response_bytes"].observe(sum(sizes))
            for when in announced_ns if now else ():
                if when:
                    self._histograms["negotiation"].observe(max(now - when, 0))

    def carried_out(self, began: int) -> None:
        """Note the end of a response whose agreement was at ``began`` (ns; 0 if not timed)."""
        self._timed_since("execution", began)

    def waited(self, began: int) -> None:
        """Note the end of a wait for a handle that started at ``began`` (ns; 0 if not timed)."""
        self._timed_since("wait", began)

    def failed(self, kind: str) -> None:
        """Count a failed tensor or a rejected call."""
        with self._lock:
            self._errors[kind] += 1

    def stalled(self, tensors: int, reports: int = 0) -> None:
        """Note the number of overdue tensors, and how many reports were just logged."""
        with self._lock:
            self._stalled = tensors
            self._stall_warnings += reports

    def _timed_since(self, name: str, began: int) -> None:
        if began and (now := self.clock()):
            with self._lock:
                self._histograms[name].observe(max(now - began, 0))

    # -- for users -----------------------------------------------------------------------------------

    def snapshot(self) -> Metrics:
        """Return the counters."""
        fast = self.fast.counts() if self.fast is not None else dict.fromkeys(_SPECS, ([0] * BUCKETS, 0))
        fast_tensors = fast["response_tensors"][1]
        late = self._late()
        kept, new, reused = self.results()
        further: dict[str, Any] = {**self.hosts.read(self.fast)} if self.hosts is not None else {}
        with self._lock:
            for name, (field_name, low, high, unit) in _SPECS.items():
                mine, (buckets, total) = self._histograms[name], fast[name]
                added = [a + b for a, b in zip(mine.buckets, buckets, strict=True)]
                further[field_name] = _shown(added, mine.sum + total, low, high, unit)
            tensors, nbytes, responses = dict(self._tensors), dict(self._bytes), dict(self._responses)
            for code, counts in self.fast.verb_counts().items() if self.fast is not None else ():
                tensors[verb(code), FAST], nbytes[verb(code), FAST] = counts
            if fast_tensors:
                responses[FAST] = sum(fast["response_tensors"][0])
            return Metrics(
                rank=self.rank,
                size=self.size,
                seconds=time.monotonic() - self._begun,
                tensors=_nested(tensors),
                bytes=_nested(nbytes),
                responses=dict(sorted(responses.items())),
                cache_hits=self._hits + fast_tensors,
                cache_misses=self._misses,
                timed=self.timed,
                late_tensors=tuple(n for n, _ in late),
                awaited_seconds=tuple(seconds for _, seconds in late),
                errors=dict(sorted(self._errors.items())),
                stall_warnings=self._stall_warnings,
                stalled_tensors=self._stalled,
                results_kept_bytes=kept,
                results_new=new - self._results_new,
                results_reused=reused - self._results_reused,
                generation=self.generation,
                **further,
            )

    def _late(self) -> list[tuple[int, float]]:
        if self.lateness is None:
            return []
        late = self.lateness.totals()
        if self.fast is None:
            return late
        posted = self.fast.lateness()
        return [(n + m, s + ns * _NS) for (n, s), (m, ns) in zip(late, posted, strict=True)]


def _nested(flat: dict[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    nested: dict[str, dict[str, int]] = {}
    for (of_verb, lane), value in sorted(flat.items()):
        nested.setdefault(of_verb, {})[lane] = value
    return nested
