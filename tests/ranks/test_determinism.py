"""Test that the same input gives the same bits on ranks that are threads."""

from __future__ import annotations

import pytest

from tests.conformance import determinism
from tests.conformance.cases import Case, each, on_threads

SLOW = pytest.mark.slow
SETTINGS = (
    {"fusion_threshold": 0},
    {"fusion_threshold": 1},
    {"fusion_threshold": 5000},
    {"disable_group_fusion": True},
    {"cycle_time_ms": 0.0},
    {"cycle_time_ms": 20.0},
    {"cache_capacity": 0},
    {"chunk_size": 16384},
    {"chunk_size": 1 << 20},
    {"staging_size": 100},
)


@each(determinism.CASES)
def test_case(case: Case, size: int) -> None:
    on_threads(case, size)


@pytest.mark.parametrize("chunk", [600, 3000])
@each(determinism.CASES, 3)
def test_windows_do_not_matter(case: Case, size: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyhvd.backends.host.FLAT", 0)
    on_threads(case, size, staging_size=chunk)


@pytest.mark.parametrize("size", [pytest.param(1, marks=SLOW), 3, pytest.param(4, marks=SLOW)])
def test_settings_do_not_matter(size: int) -> None:
    want = on_threads(determinism.digests, size)
    for knobs in SETTINGS:
        assert on_threads(determinism.digests, size, **knobs) == want, knobs
