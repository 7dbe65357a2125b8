"""The conformance cases on several hosts: results equal numpy's, for every verb and dtype."""

from __future__ import annotations

import pytest

from tests.conformance import adasum, determinism, joining, kinds_of_arrays, movements, reductions, sets
from tests.conformance.cases import Case, run, run_all
from tests.hosts.jobs import HostsJob, name_of

CASES = [
    *reductions.CASES,
    *movements.CASES,
    *kinds_of_arrays.CASES,
    *determinism.CASES,
    *joining.CASES,
    *joining.IN_SETS,
    *adasum.CASES,
    *sets.DYNAMIC,
]
# What depends on how ranks are spread over hosts.
SPREAD = [*(case for case in CASES if case.name.startswith("every_dtype")), *determinism.CASES]
EVEN, UNEVEN = (2, 2), (3, 1)
OTHERS = [case for case in CASES if case not in SPREAD and sum(EVEN) in case.sizes]


@pytest.mark.any_mpi
@pytest.mark.parametrize("case", SPREAD, ids=lambda case: case.name)
def test_case(job: HostsJob, case: Case) -> None:
    job.run(run, case=case)


@pytest.mark.any_mpi
@pytest.mark.parametrize(
    ("job", "cases"),
    [(EVEN, OTHERS[::2]), (UNEVEN, OTHERS[1::2])],
    indirect=["job"],
    ids=lambda value: "" if isinstance(value, list) else name_of(value),
)
def test_other_cases(job: HostsJob, cases: list[Case]) -> None:
    """All of them between one init() and its end, which takes longer than most of them."""
    job.run(run_all, timeout=240, env={"PYHVD_DYNAMIC_PROCESS_SETS": "1"}, cases=cases)
