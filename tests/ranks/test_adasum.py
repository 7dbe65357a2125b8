"""Adasum on ranks that are threads, with and without the shared window, in one step and in many."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import pyhvd as hvd
from pyhvd.testing import run_ranks
from tests.conformance import adasum
from tests.conformance.cases import SECONDS, Case, each, on_threads
from tests.conformance.oracle import DTYPES, Array


@each(adasum.CASES)
def test_case(case: Case, size: int) -> None:
    on_threads(case, size)


@each(adasum.CASES, 2, 4)
def test_without_a_window(case: Case, size: int) -> None:
    on_threads(case, size, fast_lane=False)


@pytest.mark.parametrize("ride", [1, 100, 1 << 20])
@each(adasum.CASES, 4)
def test_halves_of_everything(case: Case, size: int, ride: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the flat algorithm and with short batches, some pieces are empty and buffers are not reused."""
    monkeypatch.setattr("pyhvd.backends.adasum.BATCH", ride)
    monkeypatch.setattr("pyhvd.backends.adasum.FLAT", 0)
    monkeypatch.setattr("pyhvd.backends.adasum.KEPT", 1000)
    on_threads(case, size)


SETTINGS: tuple[dict[str, Any], ...] = (
    {"fast_lane": False},
    {"fusion_threshold": 0},
    {"fusion_threshold": 5000},
    {"cache_capacity": 0},
    {"disable_group_fusion": True},
)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_settings_and_fabrics_do_not_matter(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    want = run_ranks(size, adasum.digests, timeout=SECONDS)
    assert all(each == want[0] for each in want), "the ranks differ"
    for knobs in SETTINGS:
        assert run_ranks(size, adasum.digests, timeout=SECONDS, knobs=knobs) == want, knobs
    for flat in (0, 1 << 30):
        monkeypatch.setattr("pyhvd.backends.adasum.FLAT", flat)
        assert run_ranks(size, adasum.digests, timeout=SECONDS) == want, f"flat up to {flat}"


@pytest.mark.parametrize("size", [2, 4, 8])
@settings(max_examples=15, deadline=None)
@given(
    name=st.sampled_from(sorted(adasum.ROUNDING)),
    counts=st.lists(st.one_of(st.integers(0, 20), st.integers(1, 20_000)), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
    alike=st.floats(-2, 2),
)
def test_random_vectors(size: int, name: str, counts: list[int], seed: int, alike: float) -> None:
    """Each tensor of a group equals the reference; the first has the same bits as when reduced alone."""
    rng = np.random.default_rng(seed)
    parts: list[list[Array]] = []
    for count in counts:
        common = rng.normal(size=count)
        parts.append([(alike * common + rng.normal(size=count)).astype(DTYPES[name]) for _ in range(size)])

    def reduce() -> None:
        mine = [part[hvd.rank()] for part in parts]
        group = hvd.grouped_allreduce_async(mine, op=hvd.Adasum)
        alone = hvd.allreduce(mine[0], op=hvd.Adasum)
        together = group.result()
        assert alone.tobytes() == together[0].tobytes()
        for part, got in zip(parts, together, strict=True):
            adasum.check(got, part)

    run_ranks(size, reduce, timeout=SECONDS)


def test_process_sets_of_any_world() -> None:
    """A set of 2 of 3 ranks works, and a set of 3 of 4 ranks raises on its members only."""

    def rank() -> None:
        size = hvd.size()
        two, three = hvd.add_process_set([0, 2]), hvd.add_process_set([0, 1, 3]) if size == 4 else None
        parts = adasum.vectors("float64", (40,))
        if two.included():
            got = hvd.allreduce(parts[hvd.rank()], op=hvd.Adasum, process_set=two)
            adasum.check(got, [parts[0], parts[2]])
        if three is not None and three.included():
            with pytest.raises(
                hvd.UnsupportedOpError, match=r"has 3 \(ranks 0-1, 3\): use a process set of 2"
            ):
                hvd.allreduce(parts[0], op=hvd.Adasum, process_set=three)
        hvd.barrier()

    for size in (3, 4):
        run_ranks(size, rank, timeout=SECONDS, knobs={"dynamic_process_sets": True})
