"""Ranks that compute while they hold the GIL: the other ranks continue, and nothing is lost."""

from __future__ import annotations

import ctypes
import os
import resource
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import time

import numpy as np
import pytest

import pyhvd as hvd
from tests.mpi.harness import on_ranks


def _hold_the_gil(seconds: float) -> None:
    """Hold the GIL, as a long computation in one bytecode instruction does."""
    ctypes.PyDLL(None).poll(None, 0, int(seconds * 1000))


def _hold_the_gil_until(file: int, seconds: float) -> bool:
    """Hold the GIL until a file is readable, or the time is over; return whether the file was readable."""
    asked = struct.pack("ihh", file, select.POLLIN, 0)
    poll = ctypes.PyDLL(None).poll
    return bool(poll(ctypes.create_string_buffer(asked, len(asked)), 1, int(seconds * 1000)) > 0)


@on_ranks(3)
def test_a_set_goes_on_while_a_rank_outside_it_is_busy() -> None:
    pair = hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[pair])
    path = hvd.broadcast_object(os.path.join(tempfile.mkdtemp(), "over") if hvd.rank() == 0 else None)
    if hvd.rank() == 0:
        os.mkfifo(path)
    hvd.barrier()
    told = tell = os.open(path, os.O_RDWR)  # opened for both directions, so that open() does not wait
    hvd.barrier()
    if hvd.rank() == 1:
        assert _hold_the_gil_until(told, 30.0), "the pair waited for a rank that is no member"
    else:
        for _ in range(450):
            assert hvd.allreduce(np.ones(2), name="a", op=hvd.Sum, process_set=pair)[0] == 2.0
        if hvd.rank() == 0:
            os.write(tell, b".")
    hvd.barrier()
    if hvd.rank() == 0:
        shutil.rmtree(os.path.dirname(path))


# In many containers MPI cannot read the sender's memory; for long messages the sender must then be in MPI.
_ALL_BY_THE_SENDER = {"OMPI_MCA_smsc": "^cma", "MPIR_CVAR_CH4_CMA_ENABLE": "0"}


@on_ranks(3, env=_ALL_BY_THE_SENDER)
def test_ranks_that_wait_for_one_with_an_older_list_to_come_do_not_wait_for_ever() -> None:
    """Rank 0 waits for rank 1, rank 1 for rank 2, rank 2 for the rest of a long list that rank 0 sends."""
    late, early = hvd.ProcessSet([1, 2]), hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[late, early])
    hvd.barrier()
    handles = []
    time.sleep([1.2, 0.6, 0.0][hvd.rank()])
    if hvd.rank() < 2:
        handles.append(hvd.allreduce_async(np.ones(3), name="short", process_set=early))
        handles[0].flush()
    if hvd.rank() > 0:
        handles.append(hvd.allreduce_async(np.ones(3), name="long" * 500_000, process_set=late))
        handles[-1].flush()
    if hvd.rank() == 2:
        time.sleep(0.3)
        _hold_the_gil(2.0)
    assert all(handle.result(30.0)[0] == 1.0 for handle in handles)


@on_ranks(2)
def test_messages_for_a_busy_rank_are_found_when_it_is_back() -> None:
    hvd.init()
    for _ in range(3):
        if hvd.rank() == 1:
            _hold_the_gil(1.0)
        handles = [hvd.allreduce_async(np.ones(8), name=f"t{i}", op=hvd.Sum) for i in range(300)]
        assert all(handle.result()[0] == 2.0 for handle in handles)


@pytest.mark.slow
@pytest.mark.any_mpi
@on_ranks(2)
def test_a_busy_rank_is_not_given_up_when_another_shuts_down() -> None:
    hvd.init()
    hvd.barrier()
    if hvd.rank() == 1:
        _hold_the_gil(12.0)
    hvd.shutdown()


def _compete(core: int) -> subprocess.Popen[bytes]:
    """Start a program that computes on a core until it is killed, or its stdin ends."""
    program = f"import os, select, sys; os.sched_setaffinity(0, {{{core}}})\n"
    program += "while not select.select([sys.stdin], [], [], 0)[0]: sum(range(1000))"
    return subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="pins threads to a core")
@on_ranks(2)
def test_a_rank_that_polls_and_computes_keeps_its_share_of_the_core() -> None:
    """done() in vain offers the core to ranks that have yet to submit, but not all of the time."""
    hvd.init()
    hvd.allreduce(np.ones(2), name="polled", op=hvd.Sum)
    hvd.barrier()
    if hvd.rank() == 1:
        time.sleep(2.0)
    handle = hvd.allreduce_async(np.ones(2), name="polled", op=hvd.Sum)
    if hvd.rank() == 0:
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(cores)})
        competitor = _compete(min(cores))
        before, until = time.thread_time(), time.monotonic() + 1.5
        while not handle.done() and time.monotonic() < until:
            sum(range(300))
        mine = time.thread_time() - before
        competitor.kill()
        competitor.communicate()
        os.sched_setaffinity(0, cores)
        others = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert mine > (others.ru_utime + others.ru_stime) / 5
    assert handle.result(30.0)[0] == 2.0
