"""Joined ranks under mpiexec."""

from __future__ import annotations

from tests.conformance import joining
from tests.conformance.cases import Case, each, run
from tests.mpi.harness import on_ranks


@each(joining.CASES, 2, 4, count="nranks")
@on_ranks(warm=True)
def test_case(case: Case) -> None:
    run(case)


@each(joining.IN_SETS, 3, 4, count="nranks")
@on_ranks(env={"PYHVD_DYNAMIC_PROCESS_SETS": "1"}, warm=True)
def test_in_sets(case: Case) -> None:
    run(case)
