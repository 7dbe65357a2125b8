"""A bed of eight hosts for the whole run, and a job for each shape, one at a time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.bed import bed, why_not
from tests.hosts.jobs import SHAPES, HostsJob, name_of
from tests.hosts.launch import Site
from tests.mpi.launch import mpi_version, mpiexec_path


def pytest_report_header() -> str:
    return f"mpi: {mpi_version()} ({mpiexec_path()})"


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    if mpiexec_path() is None:
        pytest.skip("no mpiexec beside this interpreter or on PATH")
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("site")
    with bed([f"h{number}" for number in range(8)], folder) as made:
        yield Site(made, folder)


# Eight ranks of Open MPI take a minute on two cores. Links and trees are the same under every MPI; with four
# ranks there are even and uneven hosts too.
_PARAMETERS = [
    pytest.param(shape, id=name_of(shape), marks=[pytest.mark.any_mpi] if sum(shape) > 4 else [])
    for shape in SHAPES
]


# pytest runs the tests of one shape together, because the fixture is the session's.
@pytest.fixture(scope="session", params=_PARAMETERS)
def job(request: pytest.FixtureRequest, site: Site) -> Iterator[HostsJob]:
    made = HostsJob(site, request.param)
    yield made
    made.finish()
