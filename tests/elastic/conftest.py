"""Elastic jobs need Linux, and an MPI that survives the loss of ranks."""

from __future__ import annotations

import sys

import pytest

from pyhvd.job.errors import LaunchError
from pyhvd.job.mpi.flavour import find_library
from pyhvd.job.mpi.rank_env import MPICH


@pytest.fixture(scope="package", autouse=True)
def mpich() -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("agents need Linux")
    try:
        family = find_library().family
    except LaunchError as exc:
        pytest.skip(str(exc))
    if family != MPICH:
        pytest.skip("elastic jobs need MPICH or Intel MPI")
