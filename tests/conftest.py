"""Settings of every part of the suite; must not import pyhvd, so that a broken build still reports."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests import thinning

if TYPE_CHECKING:
    from tests.mpi.harness import SharedJobs

# No deadline: on two shared cores an example's wall time says nothing. Derandomised: a red run is repeatable.
settings.register_profile("full", deadline=None, derandomize=True, max_examples=100, database=None)
settings.register_profile("quick", settings.get_profile("full"), max_examples=25)
# `pytest --hypothesis-profile=explore` looks for new counter-examples and keeps those it finds.
settings.register_profile("explore", deadline=None, max_examples=2000)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full",
        action="store_true",
        help="run every combination of parameters and every slow test, as `make test-all` does; without it a"
        " parametrised test runs in so many combinations that every value of every parameter occurs",
    )


def pytest_configure(config: pytest.Config) -> None:
    thinning.full = config.getoption("--full")
    if not config.getoption("--hypothesis-profile"):
        settings.load_profile("full" if thinning.full else "quick")
    config.addinivalue_line("markers", "slow: takes long and finds little; runs with --full alone")
    config.addinivalue_line(
        "markers", "any_mpi: does the same under every MPI; `make test` runs it under MPICH alone"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if thinning.full:
        return
    kept = thinning.each_value_once([item for item in items if item.get_closest_marker("slow") is None])
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


@pytest.fixture(scope="session")
def shared_jobs() -> Iterator[SharedJobs]:
    """The jobs in which tests under mpiexec run, see tests.mpi.harness."""
    from tests.mpi.harness import SharedJobs

    jobs = SharedJobs()
    yield jobs
    jobs.close()
