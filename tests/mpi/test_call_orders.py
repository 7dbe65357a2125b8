"""Barriers that a signal interrupts, or whose signal's handler calls another one; in forked children too."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest

import pyhvd as hvd
from tests.conformance.cases import outcome
from tests.mpi.harness import on_ranks

pytestmark = pytest.mark.any_mpi


def _send_later(number: int) -> None:
    threading.Timer(0.3, lambda: os.kill(os.getpid(), number)).start()


@on_ranks(2)
def test_the_barrier_after_an_interrupted_one_waits_for_its_end() -> None:
    """Rank 1 comes late, both to a barrier that goes by message and to one that is remembered."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    hvd.init()
    for before in (0, 3):
        for _ in range(before):
            hvd.barrier()
        if hvd.rank() == 0:
            _send_later(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                hvd.barrier()
            world.send("interrupted", 1)
        else:
            world.recv(source=0)
            hvd.barrier()  # the one that was interrupted
        hvd.barrier()
        assert hvd.allgather_object(before) == [before] * 2
    hvd.shutdown()


@on_ranks(2)
def test_a_barrier_within_another_one_comes_after_it() -> None:
    """A signal's handler calls it while the other rank is late."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    hvd.init()
    steps: list[str] = []

    def handle(*_: object) -> None:
        world.send("in the handler", 1)
        hvd.barrier()
        steps.append("handler")

    signal.signal(signal.SIGUSR1, handle)
    for before in (0, 3):
        for _ in range(before):
            hvd.barrier()
        if hvd.rank() == 0:
            _send_later(signal.SIGUSR1)
            hvd.barrier()
            steps.append("program")
        else:
            world.recv(source=0)
            hvd.barrier()
            hvd.barrier()
        assert hvd.allgather_object(before) == [before] * 2
    assert steps == ["handler", "program"] * 2 * (hvd.rank() == 0)
    hvd.shutdown()


@on_ranks(2)
def test_a_forked_child_has_no_order() -> None:
    """Its parent's barriers are remembered, and it raises in all the same."""
    hvd.init()
    for _ in range(3):
        hvd.barrier()
        hvd.allgather_object(1)
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        calls: list[Any] = [hvd.barrier, lambda: hvd.allgather_object(1), hvd.broadcast_object]
        wrong = [call for call in calls if not isinstance(outcome(call), hvd.NotInitializedError)]
        os._exit(len(wrong))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    hvd.barrier()
    hvd.shutdown()
