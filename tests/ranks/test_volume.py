"""Test many names, many shapes and much data on ranks that are threads."""

from __future__ import annotations

import pytest

from tests.conformance import volumes
from tests.conformance.cases import Case, each, on_threads


@each(volumes.CASES, 2, 4)
def test_volume(case: Case, size: int) -> None:
    on_threads(case, size)


@pytest.mark.parametrize("hosts", [None, [0, 0, 1]], ids=str)
@pytest.mark.parametrize("capacity", [0, 1, 5, 3000])
def test_cache_of_any_size(capacity: int, hosts: list[int] | None) -> None:
    for case in volumes.CASES:
        if case.name in ("repeated_names_over_many_steps", "forty_shapes_under_one_name"):
            on_threads(case, 3, hosts, cache_capacity=capacity)
