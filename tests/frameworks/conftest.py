"""Simulated hosts for the tests of graphs across hosts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.bed import why_not
from tests.hosts.faults import faulty_site
from tests.hosts.launch import Site
from tests.mpi.launch import mpiexec_path


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    """A bed of three hosts, which are whole at the end of each test."""
    if reason := "no mpiexec" if mpiexec_path() is None else why_not():
        pytest.skip(reason)
    with faulty_site() as made:
        yield made
