"""Random programs of all verbs under mpiexec, and results of more than 2 GiB."""

from __future__ import annotations

import numpy as np
import pytest

import pyhvd as hvd
from tests import thinning
from tests.mpi.harness import on_ranks
from tests.ranks.verb_programs import run_program

PROGRAMS = 100 if thinning.full else 10
AT_ONCE = 10
STEPS = 6


@pytest.mark.any_mpi
@pytest.mark.parametrize("first", range(0, PROGRAMS, AT_ONCE))
@on_ranks(2, 3, timeout=120, env={"PYHVD_DYNAMIC_PROCESS_SETS": "1", "PYHVD_FAST_LANE": "1"})
def test_programs(first: int) -> None:
    hvd.init()
    for seed in range(first, first + AT_ONCE):
        run_program(seed, STEPS, hvd.size())
    for verb in ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter"):
        assert hvd.metrics().tensors[verb]["fast"] > 0, f"no {verb} was remembered"


@pytest.mark.skipif(not thinning.long, reason="takes 9 GiB of memory: --long")
@on_ranks(2, timeout=300)
def test_more_than_two_gigabytes() -> None:
    hvd.init()
    rows = (1 << 31) // 2 + 5
    mine = np.full(rows, hvd.rank() + 1, np.uint8)
    for _ in range(3):
        whole = hvd.allgather(mine, name="g")
        assert whole.nbytes == 2 * rows > 1 << 31
        assert whole[0] == whole[rows - 1] == 1
        assert whole[rows] == whole[-1] == 2
        del whole
        uneven = [rows - 7, 7]
        mixed, received = hvd.alltoall(mine, uneven, name="a")
        assert received.tolist() == [uneven[hvd.rank()]] * 2
        assert mixed[0] == mixed[received[0] - 1] == 1
        assert mixed[received[0]] == mixed[-1] == 2
        del mixed
