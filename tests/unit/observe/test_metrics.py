"""Counting: histograms, the meter's snapshot, and the rank that the others wait for."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, cast

import pytest
from hypothesis import given, strategies as st

from pyhvd.negotiation.message_table import StragglerStats
from pyhvd.negotiation.messages import RequestType
from pyhvd.observe.metrics import BUCKETS, Histogram, Meter, bucket_of


class FakeFastPath:
    """The counters of a fast path with two responses: one tensor of 8 bytes, and three of 16 bytes in all."""

    timed = False

    def counts(self) -> dict[str, tuple[list[int], int]]:
        return {
            "response_tensors": (_buckets({0: 1, 2: 1}), 4),
            "response_bytes": (_buckets({3: 1, 4: 1}), 24),
            "negotiation": (_buckets({12: 4}), 16_000),
            "execution": (_buckets({13: 2}), 10_000),
            "wait": (_buckets({}), 0),
        }

    def verb_counts(self) -> dict[int, tuple[int, int]]:
        return {RequestType.ALLREDUCE: (3, 16), RequestType.ALLTOALL: (1, 8)}

    def lateness(self) -> list[tuple[int, int]]:
        return [(1, 0), (3, 2_000_000_000)]


def _buckets(filled: dict[int, int]) -> list[int]:
    return [filled.get(k, 0) for k in range(BUCKETS)]


@given(st.integers(0, 2**60))
def test_a_value_falls_between_the_bounds_of_its_bucket(value: int) -> None:
    k = bucket_of(value)
    assert value <= 2**k or k == BUCKETS - 1
    assert value > 2 ** (k - 1) or k == 0


@given(st.lists(st.integers(1, 4000), min_size=1), st.floats(0.01, 1.0))
def test_quantiles_are_bounds_that_are_at_most_twice_too_high(values: list[int], q: float) -> None:
    meter = Meter(0, 1, timed=False)
    for value in values:
        meter.agreed("allreduce", "mpi", [1] * value, [], 0)
    histogram = meter.snapshot().response_tensors
    assert (histogram.count, histogram.sum) == (len(values), sum(values))
    assert histogram.mean == pytest.approx(sum(values) / len(values))
    true = sorted(values)[max(math.ceil(q * len(values)) - 1, 0)]
    assert true <= histogram.quantile(q) <= 2 * true


def test_an_empty_histogram() -> None:
    empty = Histogram((1.0, 2.0), (0, 0, 0), 0.0)
    assert (empty.count, math.isnan(empty.mean), math.isnan(empty.quantile(0.5))) == (0, True, True)
    with pytest.raises(ValueError, match=r"between 0 and 1, not 1\.5"):
        empty.quantile(1.5)


def test_the_difference_of_histograms() -> None:
    later = Histogram((1.0, 2.0), (3, 1, 4), 30.0)
    assert later - Histogram((1.0, 2.0), (1, 1, 0), 2.5) == Histogram((1.0, 2.0), (2, 0, 4), 27.5)
    assert later.quantile(1.0) == math.inf


def test_a_snapshot_has_what_both_lanes_counted() -> None:
    lateness = StragglerStats(2)
    lateness.count(0, 1, since=1.0, now=1.5, tensors=2)
    meter = Meter(0, 2, timed=True, fast=cast(Any, FakeFastPath()), lateness=lateness)
    meter.submitted(hits=2, misses=5)
    now = meter.clock()
    meter.agreed("allreduce", "window", [100, 28], [now - 3000, 0], now)
    meter.agreed("broadcast", "window", [7], [now - 5000], now)
    meter.carried_out(now)
    meter.waited(now)
    meter.failed("MismatchError")
    meter.stalled(3, reports=1)
    seen = meter.snapshot()
    assert seen.tensors == {
        "allreduce": {"fast": 3, "window": 2},
        "alltoall": {"fast": 1},
        "broadcast": {"window": 1},
    }
    assert seen.bytes == {
        "allreduce": {"fast": 16, "window": 128},
        "alltoall": {"fast": 8},
        "broadcast": {"window": 7},
    }
    assert seen.responses == {"fast": 2, "window": 2}
    assert (seen.response_tensors.count, seen.response_tensors.sum) == (4, 7)
    assert (seen.response_bytes.count, seen.response_bytes.sum) == (4, 24 + 135)
    assert (seen.cache_hits, seen.cache_misses) == (2 + 4, 5)
    assert seen.negotiation_seconds.count == 4 + 2, (
        "a tensor of which nobody knows when it was told is left out"
    )
    assert seen.negotiation_seconds.sum == pytest.approx(24e-6)
    assert seen.execution_seconds.count == 2 + 1
    assert seen.wait_seconds.count == 1
    assert seen.late_tensors == (1, 5)
    assert seen.awaited_seconds == pytest.approx((0.0, 2.5))
    assert seen.errors == {"MismatchError": 1}
    assert (seen.stall_warnings, seen.stalled_tensors) == (1, 3)


def test_without_times_only_times_are_missing() -> None:
    meter = Meter(3, 4, timed=False)
    assert meter.clock() == 0
    meter.agreed("allgather", "mpi", [8], [17], meter.clock())
    meter.carried_out(0)
    meter.waited(0)
    seen = meter.snapshot()
    assert seen.tensors == {"allgather": {"mpi": 1}}
    assert not any(
        each.count for each in (seen.negotiation_seconds, seen.execution_seconds, seen.wait_seconds)
    )
    assert (seen.late_tensors, seen.awaited_seconds) == ((), ()), "only rank 0 knows"
    assert (seen.rank, seen.size, seen.timed) == (3, 4, False)


@pytest.mark.parametrize("timed", [True, False])
def test_the_fast_lane_measures_times_if_the_meter_does(timed: bool) -> None:
    lane = FakeFastPath()
    meter = Meter(0, 1, timed=timed, fast=cast(Any, lane))
    meter.waited(meter.clock())
    assert (lane.timed, meter.snapshot().wait_seconds.count) == (timed, timed)


def test_a_snapshot_is_fit_for_json() -> None:
    meter = Meter(0, 2, timed=False, lateness=StragglerStats(2))
    meter.agreed("allreduce", "mpi", [4], [], 0)
    told: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(meter.snapshot()), allow_nan=False))
    assert told["tensors"] == {"allreduce": {"mpi": 1}}
    assert len(told["response_bytes"]["counts"]) == len(told["response_bytes"]["bounds"]) + 1


def test_time_that_overlaps_counts_once() -> None:
    late = StragglerStats(3)
    late.count(0, 1, since=0.0, now=10.0)
    late.count(0, 1, since=1.0, now=11.0)
    late.count(0, 2, since=10.5, now=12.0)
    late.count(7, 0, since=0.0, now=2.0, tensors=4)  # waits of another set count separately
    assert late.totals() == [(4, 2.0), (1 + 1, 11.0), (1, 1.0)]


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0, 100), st.floats(0, 5)), max_size=30))
def test_nobody_is_awaited_for_longer_than_has_passed(steps: list[tuple[int, float, float]]) -> None:
    late, now = StragglerStats(3), 0.0
    for rank, before, passed in steps:
        now += passed
        late.count(0, rank, since=max(now - before, 0.0), now=now)
    assert sum(seconds for _, seconds in late.totals()) <= now * (1 + 1e-9)
    assert sum(tensors for tensors, _ in late.totals()) == len(steps)
