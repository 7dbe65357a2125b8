"""Objects, compression, handles and names, on ranks that are threads."""

from __future__ import annotations

from tests.conformance import objects, promises
from tests.conformance.cases import Case, each, on_threads


@each(objects.CASES)
def test_object(case: Case, size: int) -> None:
    on_threads(case, size)


@each(promises.CASES)
def test_promise(case: Case, size: int) -> None:
    on_threads(case, size)
