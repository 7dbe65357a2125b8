"""Disagreements and refusals under mpiexec."""

from __future__ import annotations

from tests.conformance import disagreements, refusals
from tests.conformance.cases import Case, each, run
from tests.mpi.harness import on_ranks


@each([*disagreements.CASES, *refusals.CASES], 2, 4, count="nranks")
@on_ranks(warm=True)
def test_case(case: Case) -> None:
    run(case)
