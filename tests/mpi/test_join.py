"""Joined ranks under mpiexec."""

from __future__ import annotations

import pyhvd as hvd
from tests.conformance import joining
from tests.conformance.cases import run_all
from tests.mpi.harness import on_ranks


@on_ranks(2, 4, timeout=60)
def test_join() -> None:
    hvd.init()
    run_all(joining.CASES)
