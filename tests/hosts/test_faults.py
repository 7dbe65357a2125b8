"""Faults of hosts: they stop the ranks, and afterwards the bed has whole hosts for the next job."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.bed import bed
from tests.conformance.cases import Case, run
from tests.conformance.determinism import CASES
from tests.hosts.faults import KINDS, VERBS, ReducingJob, heal, strike
from tests.hosts.jobs import HostsJob
from tests.hosts.launch import Site

pytestmark = pytest.mark.any_mpi

SHAPE = (1, 2)
LAST = sum(SHAPE) - 1
SILENT = ("cut", "power", "freeze")  # after the others, mpiexec may end the surviving rank before it can tell
WITHIN_S = 6.5  # five missed beats, and the harness's own time


@pytest.fixture(scope="module")
def small_site(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A site whose hosts can be struck without harm to the jobs of other tests."""
    folder = tmp_path_factory.mktemp("faults")
    with bed(["h0", "h1"], folder) as made:
        yield Site(made, folder)


@pytest.mark.parametrize("kind", KINDS)
def test_a_struck_host_heals(small_site: Site, kind: str) -> None:
    made, host = small_site.bed, small_site.bed.hosts["h1"]
    job = ReducingJob(small_site, SHAPE)
    try:
        job.wait_for_steps(3)
        victim = job.pid_of(LAST)
        strike(made, kind, host, job, LAST)
        if kind in SILENT:
            ending = job.endings([0], WITHIN_S)[0]
            assert ending.error == "RankFailedError"
            assert "host h1 (ranks 1-2)" in ending.text
        job.wait_until_still()
    finally:
        job.close()
    assert victim not in host.processes()
    heal(made, kind, host)
    check_a_new_job(small_site, CASES[0])


@pytest.mark.parametrize("verb", VERBS)
def test_a_cut_host_ends_a_verb(small_site: Site, verb: str) -> None:
    made, host = small_site.bed, small_site.bed.hosts["h1"]
    shape = (1, 1) if verb == "adasum" else SHAPE
    job = ReducingJob(small_site, shape, verb)
    try:
        job.wait_for_steps(3)
        made.cut_off(host)
        ending = job.endings([0], WITHIN_S)[0]
        assert ending.error == "RankFailedError"
        assert f"host h1 (rank{' 1' if shape == (1, 1) else 's 1-2'})" in ending.text
    finally:
        job.close()
        made.rejoin(host)


def check_a_new_job(site: Site, case: Case) -> None:
    job = HostsJob(site, SHAPE)
    try:
        job.run(run, case=case)
    finally:
        job.finish()
