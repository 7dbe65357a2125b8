"""Adasum under mpiexec: through shared memory, and through MPI alone."""

from __future__ import annotations

import os

import pyhvd as hvd
from pyhvd.testing import run_ranks
from tests.conformance import adasum
from tests.conformance.cases import run_all
from tests.mpi.harness import on_ranks


@on_ranks(1, 2, 3, 4, timeout=20)
def test_adasum() -> None:
    hvd.init()
    run_all(adasum.CASES)


@on_ranks(2, 4, timeout=20, env={"PYHVD_FAST_LANE": "0"})
def test_over_mpi() -> None:
    hvd.init()
    run_all(adasum.CASES)


@on_ranks(2, 8, timeout=60)
def test_bits() -> None:
    """Ranks that are threads and both fabrics of a job: the same bits, also in messages of a few bytes."""
    from pyhvd.transport.mpi import fabric

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    want = adasum.digests()
    found = hvd.allgather_object(want)
    if rank == 0:  # not all at once: that would be size * size threads
        assert run_ranks(size, adasum.digests, timeout=50) == found
    hvd.barrier()
    hvd.shutdown()
    os.environ["PYHVD_FAST_LANE"] = "0"
    hvd.init()
    assert adasum.digests() == want
    fabric.LARGEST = 5000
    assert adasum.digests() == want
