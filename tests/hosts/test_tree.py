"""More than 8 hosts: they agree in a tree, and a host that is lost anywhere in it is known to all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.bed import bed, why_not
from tests.conformance.cases import run
from tests.conformance.determinism import CASES
from tests.hosts.faults import SLACK_S, Fault, try_fault
from tests.hosts.jobs import HostsJob
from tests.hosts.launch import Site
from tests.mpi.launch import mpiexec_path

# Trees are made of links, which are the same under every MPI.
pytestmark = pytest.mark.any_mpi
SHAPE = (1,) * 9
TOP, BELOW = 1, 8  # of the 3 tops, and of the hosts below them


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    if reason := "no mpiexec" if mpiexec_path() is None else why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("tree")
    with bed([f"h{number}" for number in range(len(SHAPE))], folder) as made:
        yield Site(made, folder)


def test_nine_hosts(wide: Site) -> None:
    job = HostsJob(wide, SHAPE)
    try:
        for case in CASES:
            job.run(run, case=case)
    finally:
        job.finish()


@pytest.mark.parametrize("lost", [TOP, BELOW])
@pytest.mark.parametrize("kind", ["cut", "freeze"])
def test_a_lost_host_is_named_everywhere(wide: Site, kind: str, lost: int) -> None:
    outcome = try_fault(wide, Fault(1, kind, SHAPE, lost, lost, 1.0), SLACK_S)
    assert not outcome.wrong, "\n".join(outcome.wrong)
