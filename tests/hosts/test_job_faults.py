"""Each fault of a job on many hosts once: what the user reads, within which time, and what is left.

``make test-hosts-ends`` makes each 20 times.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from tests.bed import why_not
from tests.hosts import sshd
from tests.hosts.job_faults import FAULTS, JobFault, Outcome, Workers, faults_of_this_mpi

# Several jobs share two cores, and the trials of slow faults come first.
_AT_ONCE = 3
_SLACK_S = 3.0


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Outcome]]]:
    """All faults that are to be tested, side by side."""
    if reason := why_not() or sshd.why_not():
        pytest.skip(reason)
    tests = [item for item in request.session.items if item.path == request.path]
    names = {item.callspec.id for item in tests if isinstance(item, pytest.Function)}
    faults = [fault for fault in FAULTS if fault.name in names]
    found: dict[str, Future[Outcome]] = {fault.name: Future() for fault in faults}
    workers = Workers(
        [(fault, 0) for fault in faults],
        _AT_ONCE,
        _SLACK_S,
        lambda fault, outcome: found[fault.name].set_result(outcome),
    )
    yield found
    workers.stop()
    workers.join()


_PARAMETERS = [
    pytest.param(fault, id=fault.name, marks=[pytest.mark.any_mpi] if fault.alike else [])
    for fault in faults_of_this_mpi()
]


@pytest.mark.parametrize("fault", _PARAMETERS)
def test_the_cause_is_named_in_time_and_nothing_is_left(
    outcomes: dict[str, Future[Outcome]], fault: JobFault
) -> None:
    assert outcomes[fault.name].result().wrong == []
