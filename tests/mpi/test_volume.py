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


@on_ranks(2, 4)
def test_many_calls_without_a_name() -> None:
    hvd.init()
    size = hvd.size()
    for turn in range(40):
        handles = [hvd.allreduce_async(np.full(n, turn, np.float32), op=hvd.Sum) for n in range(1, 11)]
        for n, handle in enumerate(handles, 1):
            assert handle.result().tolist() == [size * turn] * n
    fast = hvd.metrics().tensors["allreduce"]["fast"]
    assert fast >= 390, "a call goes by message once for each signature"
    with np.testing.assert_raises_regex(hvd.MismatchError, f"noname.{400}"):
        hvd.allreduce(np.ones(1 + hvd.rank() % 2, np.float32))
    assert hvd.allreduce(np.ones(2), op=hvd.Sum).tolist() == [size] * 2
