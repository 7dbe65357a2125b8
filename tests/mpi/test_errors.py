"""Disagreements and refusals under mpiexec."""

from __future__ import annotations

import pyhvd as hvd
from tests.conformance import disagreements, refusals
from tests.conformance.cases import run_all
from tests.mpi.harness import on_ranks


@on_ranks(2, 4, timeout=60)
def test_errors() -> None:
    hvd.init()
    run_all([*disagreements.CASES, *refusals.CASES])
