"""Objects, compression, handles and names under mpiexec."""

from __future__ import annotations

from tests.conformance import objects, promises
from tests.conformance.cases import Case, each, run
from tests.mpi.harness import on_ranks


@each([*objects.CASES, *promises.CASES], 1, 4, count="nranks")
@on_ranks(warm=True)
def test_case(case: Case) -> None:
    run(case)
