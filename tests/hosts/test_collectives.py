"""The conformance cases on several hosts: results equal numpy's, for every verb and dtype."""

from __future__ import annotations

import pytest

from tests.conformance import determinism, kinds_of_arrays, movements, reductions
from tests.conformance.cases import Case, run
from tests.hosts.jobs import HostsJob

CASES = [*reductions.CASES, *movements.CASES, *kinds_of_arrays.CASES, *determinism.CASES]
# What depends on how ranks are spread over hosts.
SPREAD = [*(case for case in CASES if case.name.startswith("every_dtype")), *determinism.CASES]


@pytest.mark.parametrize("case", SPREAD, ids=lambda case: case.name)
def test_case(job: HostsJob, case: Case) -> None:
    job.run(run, case=case)


@pytest.mark.parametrize("case", [case for case in CASES if case not in SPREAD], ids=lambda case: case.name)
@pytest.mark.parametrize("job", [(2, 2), (3, 1)], indirect=True, ids=["2x2", "3+1"])
def test_other_case(job: HostsJob, case: Case) -> None:
    job.run(run, case=case)
