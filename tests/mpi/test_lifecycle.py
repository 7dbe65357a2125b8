"""init() and shutdown() under mpiexec; fork; the interpreter's exit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pyhvd as hvd
from tests.conformance.cases import SECONDS, outcome
from tests.conformance.endings import ENDINGS
from tests.mpi.harness import on_ranks, run_mpi
from tests.mpi.launch import ROOT


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_a_rank_that_is_alone_by_mistake(launcher: str) -> None:
    variables = {
        "torchrun": {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "2"},
        "srun": {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
    }[launcher]
    command = [sys.executable, "-c", "import pyhvd as hvd; hvd.init(); print(hvd.size())"]
    environment = {**os.environ, **variables, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"pyhvd.errors.TransportError: {launcher} has started 2 processes, but "), last
    environment["PYHVD_ALLOW_ALONE"] = "1"
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=60)
    assert done.stdout == "1\n"


@on_ranks(2, 4)
def test_endings() -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    for ending in ENDINGS.values():
        ending(world.Get_rank(), world.Get_size())
        assert not hvd.is_initialized(), ending.__name__
        world.Barrier()
        if world.Get_rank() == 0:
            print(ending.__name__, flush=True)
    assert not MPI.Is_finalized()


def _place() -> tuple[Any, ...]:
    calls = (hvd.rank, hvd.size, hvd.local_rank, hvd.local_size, hvd.cross_rank, hvd.cross_size)
    world = hvd.global_process_set
    return (
        *(call() for call in calls),
        *(hvd.is_initialized(), hvd.is_homogeneous(), hvd.mpi_threads_supported()),
        *(world.rank(), world.size(), world.included()),
    )


def _in_child(place: tuple[Any, ...]) -> int:
    """Check what pyhvd answers and refuses in a forked child; return an exit code."""
    calls: tuple[Callable[[], Any], ...] = (
        hvd.init,
        hvd.barrier,
        lambda: hvd.allreduce(np.ones(1)),
        lambda: hvd.broadcast_object(1),
    )
    for code, call in enumerate(calls, 1):
        error = outcome(call)
        if not isinstance(error, hvd.NotInitializedError) or "fork" not in str(error):
            print("child:", code, repr(error), flush=True)
            return code
    if _place() != place:
        print("child:", _place(), "parent:", place, flush=True)
        return 90
    hvd.shutdown()
    error = outcome(hvd.init)  # would connect to the parent's ranks
    return 0 if isinstance(error, hvd.NotInitializedError) else 91


@on_ranks(2)
def test_a_forked_child_does_not_wait() -> None:
    _fork_while_it_waits()


@on_ranks(2, env={"PYHVD_FAST_LANE": "0"})
def test_a_forked_child_does_not_wait_without_a_lane() -> None:
    _fork_while_it_waits()


def _fork_while_it_waits() -> None:
    hvd.init()
    pending = hvd.allgather_async(np.ones(2), name="pending") if hvd.rank() else None
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        error = outcome(pending.result) if pending is not None else RuntimeError("fork")
        os._exit(0 if isinstance(error, RuntimeError) and "fork" in str(error) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    if pending is None:
        pending = hvd.allgather_async(np.ones(2), name="pending")
    assert pending.result(SECONDS).tolist() == [1.0] * 4


@on_ranks(2)
def test_a_signal_in_the_middle_of_shutdown() -> None:
    """The signal's handler calls shutdown() too, while the other rank is late."""
    hvd.init()
    late = hvd.allreduce_async(np.ones(1), name=f"alone.{hvd.rank()}")
    told, heard, go = threading.Event(), threading.Event(), threading.Event()

    def keep(_: hvd.Handle) -> None:
        """Block the background thread, so that shutdown() waits for it."""
        told.set()
        go.wait(SECONDS)

    late.add_done_callback(keep)

    def end(*_: object) -> None:
        heard.set()
        threading.Timer(0.1, go.set).start()
        hvd.shutdown()

    def interrupt() -> None:
        told.wait(SECONDS)
        os.kill(os.getpid(), signal.SIGUSR1)
        # Python runs no handler of a signal that came just before a thread began to wait for a lock.
        for _ in range(100):
            if heard.wait(0.2):
                break
            os.kill(os.getpid(), signal.SIGUSR1)

    signal.signal(signal.SIGUSR1, end)
    sender = threading.Thread(target=interrupt)
    sender.start()
    hvd.barrier()
    hvd.shutdown()
    sender.join(SECONDS)
    assert go.is_set()
    assert isinstance(late.exception(), hvd.ShutDownError)
    assert not hvd.is_initialized()


@on_ranks(2)
def test_fork() -> None:
    """In a forked child ranks and sizes answer, and collectives raise; its parent continues meanwhile."""
    hvd.init()
    place = _place()
    pending = hvd.allreduce_async(np.ones(2), op=hvd.Sum, name="before the fork") if hvd.rank() else None
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = _in_child(place)
        finally:
            os._exit(code)
    if pending is None:
        pending = hvd.allreduce_async(np.ones(2), op=hvd.Sum, name="before the fork")
    assert pending.result(SECONDS).tolist() == [2.0, 2.0]
    for step in range(50):
        assert hvd.allreduce(np.full(2, step), op=hvd.Sum, name="while").tolist() == [2 * step] * 2
    until = time.monotonic() + SECONDS
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
        assert time.monotonic() < until, "the child hangs"
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(ended[1]) == 0
    assert hvd.allreduce(np.ones(1), op=hvd.Sum).tolist() == [2.0]


@on_ranks(2, cleanup=False)
def test_leaving_without_shutdown() -> None:
    """The interpreter's exit shuts down."""
    hvd.init()
    assert hvd.allreduce(np.ones(1), op=hvd.Sum).tolist() == [2.0]


@on_ranks(2)
def test_topology() -> None:
    from mpi4py import MPI

    hvd.init()
    world = MPI.COMM_WORLD
    assert (hvd.rank(), hvd.size()) == (world.rank, world.size)
    assert (hvd.local_rank(), hvd.local_size()) == (world.rank, world.size)
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.is_homogeneous()
    assert hvd.mpi_threads_supported() == (MPI.Query_thread() == MPI.THREAD_MULTIPLE)
    # The program's messages and pyhvd's do not mix.
    handles = [hvd.allreduce_async(np.full(1000, i), op=hvd.Sum, name=f"mixed.{i}") for i in range(20)]
    assert world.allreduce(1) == world.size
    assert [handle.result(SECONDS)[0] for handle in handles] == [i * world.size for i in range(20)]


SCRIPTS = {
    "exit while the other one waits": (
        "import sys, numpy as np, pyhvd as hvd\n"
        "hvd.init()\n"
        "if hvd.rank() == 1: sys.exit(0)\n"
        "try:\n    hvd.allreduce(np.ones(1), name='left alone')\n"
        "except hvd.ShutDownError as exc: print('told', exc.rank, flush=True)\n"
    ),
    "pending at the end": (
        "import numpy as np, pyhvd as hvd\n"
        "hvd.init()\n"
        "h = hvd.allreduce_async(np.ones(1), name='never') if hvd.rank() == 0 else None\n"
        "hvd.barrier()\n"
        "hvd.shutdown()\n"
        "if h is not None: print('told', h.exception().rank >= 0, flush=True)\n"
    ),
    "mpi4py.rc.initialize is False": (
        "import mpi4py\n"
        "mpi4py.rc.initialize = False\n"
        "mpi4py.rc.thread_level = 'serialized'\n"
        "from mpi4py import MPI\n"
        "import numpy as np, pyhvd as hvd\n"
        "hvd.init([0, 1])\n"
        "assert MPI.Query_thread() == MPI.THREAD_SERIALIZED\n"
        "text = 'told 1' * hvd.rank()\n"
        "key = MPI.Comm.Create_keyval(delete_fn=lambda *_: print(text, end='', flush=True))\n"
        "MPI.COMM_SELF.Set_attr(key, 1)\n"  # deleted by MPI_Finalize
        "assert hvd.allreduce(np.ones(1), op=hvd.Sum)[0] == 2\n"
        "hvd.shutdown(); hvd.init()\n"
    ),
    "MPI ends and begins in the program": (
        "import mpi4py\n"
        "mpi4py.rc(initialize=False, finalize=False)\n"
        "import numpy as np, pyhvd as hvd\n"
        "hvd.init()\n"
        "from mpi4py import MPI\n"
        "assert hvd.allreduce(np.ones(1), op=hvd.Sum)[0] == 2\n"
        "rank = hvd.rank()\n"
        "hvd.shutdown()\n"
        "MPI.Finalize()\n"
        "try:\n    hvd.init()\n"
        "except hvd.TransportError as exc: print('told 1' * rank if 'MPI_Finalize' in str(exc) else exc)\n"
    ),
    "an error that nobody looks at": (
        "import numpy as np, pyhvd as hvd\n"
        "hvd.init()\n"
        "hvd.allreduce_async(np.ones(2 + hvd.rank()), name='bad')\n"
        "hvd.barrier()\n"
        "if hvd.rank() == 0: print('told', True, flush=True)\n"
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_clean_exits(name: str) -> None:
    run = run_mpi(2, [sys.executable, "-c", SCRIPTS[name]], env={"PYTHONPATH": str(ROOT)})
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() in ("told 1", "told True")
