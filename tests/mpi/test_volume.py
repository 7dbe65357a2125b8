"""Many names, many shapes, much data under mpiexec."""

from __future__ import annotations

import numpy as np
import pytest

import pyhvd as hvd
from tests.conformance import volumes
from tests.conformance.cases import Case, each, run
from tests.mpi.harness import on_ranks


@each(volumes.CASES, 2, 4, count="nranks")
@on_ranks(timeout=90)
def test_case(case: Case) -> None:
    run(case)


@pytest.mark.any_mpi
@on_ranks(2)
def test_a_tensor_of_240_megabytes() -> None:
    hvd.init()
    n = 60_000_000
    mine = np.arange(n, dtype=np.int32)
    assert mine.nbytes == 240_000_000
    assert hvd.allreduce_(mine, op=hvd.Sum, prescale_factor=1.0) is mine
    mine -= 2 * np.arange(n, dtype=np.int32)
    assert not mine.any()
    mine += hvd.rank()
    total = hvd.allreduce(mine, op=hvd.Sum)
    assert total is not mine
    assert (total == 1).all()
    assert (mine == hvd.rank()).all()
