"""Test every verb, dtype and kind of array on ranks that are threads."""

from __future__ import annotations

import pytest

from tests.conformance import kinds_of_arrays, movements, reductions
from tests.conformance.cases import Case, Cases, each, on_threads

CASES = Cases([*reductions.CASES, *movements.CASES, *kinds_of_arrays.CASES])


@each(CASES)
def test_case(case: Case, size: int) -> None:
    on_threads(case, size)


CROSSING = Cases(
    case
    for case in CASES
    if case.name.startswith(("every", "groups_mix", "layouts-c", "halves", "empty"))
    and "sync" not in case.name
)


@pytest.mark.parametrize(("chunk", "flat"), [(1, 0), (24, 0), (100, 1 << 16), (100, 0)])
@each(CROSSING, 3)
def test_windows(case: Case, size: int, chunk: int, flat: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use windows of a few bytes: every tensor spans several, and ends in a tail or an empty slice."""
    monkeypatch.setattr("pyhvd.backends.host.FLAT", flat)
    on_threads(case, size, staging_size=chunk)
