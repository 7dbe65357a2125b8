"""Test mismatches, refused calls and joined ranks on ranks that are threads."""

from __future__ import annotations

from tests.conformance import disagreements, joining, refusals
from tests.conformance.cases import Case, Cases, each, on_threads


@each(disagreements.CASES)
def test_disagreement(case: Case, size: int) -> None:
    on_threads(case, size)


@each(refusals.CASES)
def test_refusal(case: Case, size: int) -> None:
    on_threads(case, size)


@each(joining.CASES)
def test_join(case: Case, size: int) -> None:
    on_threads(case, size)


@each(Cases([*disagreements.CASES, *refusals.CASES]), 3)
def test_without_cache_and_fusion(case: Case, size: int) -> None:
    on_threads(case, size, cache_capacity=0, fusion_threshold=0)
