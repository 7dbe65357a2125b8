"""Adasum under mpiexec: through shared memory, and through MPI alone."""

from __future__ import annotations

import os

import pytest

import pyhvd as hvd
from pyhvd.testing import run_ranks
from tests.conformance import adasum
from tests.conformance.cases import Case, each, run
from tests.mpi.harness import on_ranks

pytestmark = pytest.mark.any_mpi


@each(adasum.CASES, 1, 2, 3, 4, count="nranks")
@on_ranks(warm=True)
def test_case(case: Case) -> None:
    run(case)


@each(adasum.CASES, 2, 4, count="nranks")
@on_ranks(env={"PYHVD_FAST_LANE": "0"}, warm=True)
def test_over_mpi(case: Case) -> None:
    run(case)


@pytest.mark.parametrize("nranks", [2, pytest.param(8, marks=pytest.mark.slow)])
@on_ranks()
def test_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks as threads, the window and MPI give the same bits, also with messages of a few bytes."""
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
    monkeypatch.setattr(fabric, "LARGEST", 5000)
    assert adasum.digests() == want
