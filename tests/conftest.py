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
    parser.addoption(
        "--rest", action="store_true", help="run what --full adds to a run without it, and all of Hypothesis"
    )
    parser.addoption(
        "--long", action="store_true", help="run tests at the sizes of `make test-stress`, for minutes"
    )
    parser.addoption(
        "--second-mpi", action="store_true", help="leave out the tests marked any_mpi, unless --full is given"
    )


def pytest_configure(config: pytest.Config) -> None:
    thinning.full = config.getoption("--full") or config.getoption("--rest")
    thinning.long = config.getoption("--long")
    if not config.getoption("--hypothesis-profile"):
        settings.load_profile("full" if thinning.full else "quick")
    config.addinivalue_line(
        "markers", "slow: takes long for what it finds; `make test` leaves it to `make test-rest`"
    )
    config.addinivalue_line("markers", "slowest: as slow; `make test-all` alone runs it")
    config.addinivalue_line(
        "markers", "any_mpi: does the same under every MPI; without --full it runs under MPICH alone"
    )
    config.addinivalue_line(
        "markers", "any_spark: does the same under every Spark; the part spark35 leaves it out"
    )


def _has(item: pytest.Item, name: str) -> bool:
    return item.get_closest_marker(name) is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    left_out = ["slowest", *(["any_mpi"] if config.getoption("--second-mpi") else [])]
    asked = [item for item in items if not any(_has(item, mark) for mark in left_out)]
    kept = thinning.each_value_once([item for item in asked if not _has(item, "slow")])
    if config.getoption("--rest"):
        kept = {item for item in asked if item not in kept or thinning.is_search(item)}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


@pytest.fixture(scope="session")
def shared_jobs() -> Iterator[SharedJobs]:
    """The jobs in which tests under mpiexec run, see tests.mpi.harness."""
    from tests.mpi.harness import SharedJobs

    jobs = SharedJobs()
    yield jobs
    jobs.close()
