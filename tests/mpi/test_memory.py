"""``hvd.empty()`` under mpiexec: shared memory is allocated, freed, and exhausted."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.engine.context import current
from pyhvd.transport.arena import Arena
from tests.mpi.harness import hear_log, on_ranks

pytestmark = pytest.mark.any_mpi

WITH_LANE = {"PYHVD_FAST_LANE": "1"}  # without the fast path there is no shared memory


def _bytes_used() -> int:
    """Return the bytes of shared memory behind all arenas."""
    used = 0
    for fd in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{fd}"
        if os.path.islink(path) and os.readlink(path).startswith("/dev/shm/#"):
            used += os.stat(path).st_blocks * 512
    return used


@on_ranks(1, 2, 4, env=WITH_LANE)
def test_coming_and_going() -> None:
    hvd.init()
    want = sum(range(1, hvd.size() + 1))
    for turn in range(4):
        arrays = [hvd.empty((n,), np.float32) for n in (10, 300_000, 2_000_000)]
        for _ in range(3):
            for t, array in enumerate(arrays):
                array[:] = hvd.rank() + 1
                hvd.allreduce_(array, name=f"t{t}", op=hvd.Sum)
                assert (array == want).all(), turn
        del array
        hvd.barrier()
        assert _bytes_used() >= hvd.size() * 9_000_000
        hvd.barrier()
        arrays.clear()
        hvd.barrier()
        assert _bytes_used() == 0
        hvd.barrier()


@on_ranks(2)
def test_arrays_outlive_the_runtime_that_they_came_from() -> None:
    hvd.init()
    old = hvd.empty(50_000)
    old[:] = 7
    hvd.shutdown()
    assert (old == 7).all()
    hvd.init()
    new = hvd.empty(50_000)
    for _ in range(3):
        for name, array in (("old", old), ("new", new)):
            array[:] = hvd.rank()
            hvd.allreduce_(array, name=name, op=hvd.Max)
            assert (array == hvd.size() - 1).all()


@on_ranks(2, env=WITH_LANE)
def test_running_out() -> None:
    """Without shared memory empty() warns once, with the cause, and returns an ordinary array."""

    def refuse(offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    told = hear_log()
    hvd.init()
    arena = current().arena
    assert isinstance(arena, Arena)
    arena.claim = refuse
    for _ in range(2):
        array = hvd.empty((1000, 1000))
        array[:] = 1
        assert not arena.holds(array.ctypes.data)
        hvd.allreduce_(array, name="ordinary", op=hvd.Sum)
        assert (array == hvd.size()).all()
    (text,) = told
    assert text.endswith("No space left on device (this array needs 3.8 MiB of it)")
