"""After a failure no rank hangs, and the cause is shown: uncaught errors, no memory, a broken backend."""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.native.shared_memory import limit_pool
from tests.conformance.cases import is_last, last, outcome
from tests.mpi.harness import on_ranks, run_function, run_mpi
from tests.mpi.launch import ROOT
from tests.mpi.run_support import pyhvdrun, script

WITHIN_S = 12.0

RAISING = """
import numpy as np, pyhvd as hvd, sys
hvd.init()
assert hvd.allreduce(np.ones(1), op=hvd.Sum)[0] == hvd.size()
if hvd.rank() == {bad}:
    raise KeyError("the root cause")
try:
    {call}
except hvd.RankFailedError as exc:
    sys.stderr.write(f"rank {{hvd.rank()}} learned: {{exc}} ({{exc.rank}})\\n")
    sys.stderr.flush()
    raise
"""
CALLS = {
    "waiting": "hvd.allreduce(np.ones(3), name='waits')",
    "joined": "hvd.join()",
    "submitting later": "import time; time.sleep(0.5); hvd.barrier()",
}


@pytest.mark.parametrize(
    ("bad", "call"), [(0, "waiting"), (1, "waiting"), (1, "joined"), (0, "submitting later")]
)
def test_uncaught_exception_under_plain_mpiexec(tmp_path: Path, call: str, bad: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(RAISING.format(bad=bad, call=CALLS[call]))
    run = run_mpi(3, [sys.executable, str(script)], env={"PYTHONPATH": str(ROOT)})
    assert not run.timed_out, run.stderr
    assert run.returncode != 0
    assert run.seconds < WITHIN_S
    assert "KeyError: 'the root cause'" in run.stderr
    told = [line for line in run.stderr.splitlines() if "learned: " in line]
    # mpiexec may end the job before the last rank has printed its line, but not before all others have.
    assert told, run.stderr
    for line in told:
        assert f"rank {bad} failed: KeyError: 'the root cause' ({bad})" in line


class _NoMemory:
    """A numpy that has no memory for an output of seven rows."""

    def __init__(self) -> None:
        self.full = True

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def empty(self, shape: Any, dtype: Any) -> Any:
        """Allocate an array, or raise MemoryError."""
        if self.full and shape and shape[0] == 7 * hvd.size():
            raise MemoryError("no room")
        return np.empty(shape, dtype)


@on_ranks(2, 4)
def test_no_memory_for_an_output_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyhvd import arrays

    hvd.init()
    allocator = _NoMemory()
    if is_last():
        monkeypatch.setattr(arrays, "np", allocator)
    for verb in (hvd.allgather, hvd.alltoall):
        rows = np.ones((7 * (hvd.size() if verb is hvd.alltoall else 1), 2))
        for name in ("large", "larger"):
            allocator.full = True
            good = hvd.allgather_async(np.ones(2), name="beside")
            error = outcome(lambda verb=verb, rows=rows, name=name: verb(rows, name=name))  # type: ignore[misc]
            assert isinstance(error, hvd.RankFailedError), repr(error)
            assert error.rank == last()
            assert "no memory" in str(error)
            assert "large" in str(error)
            assert isinstance(error.__cause__, MemoryError) == is_last()
            good.exception(10)
            hvd.barrier()
            allocator.full = False
            assert verb(rows, name=name).shape == (7 * hvd.size(), 2)
            hvd.barrier()


@on_ranks(2)
@pytest.mark.parametrize("verb", ["allgather", "alltoall", "allreduce", "reducescatter"])
def test_no_memory_for_a_remembered_output_on_one_rank(verb: str) -> None:
    """The rank does not leave the others waiting on the fast path."""
    hvd.init()
    rows, call = np.ones(8 << 20), getattr(hvd, verb)
    for _ in range(3):
        want = call(rows, name=verb).nbytes
    limit_pool(0)  # or the result would get the memory of the last one
    gc.collect()  # or memory of an earlier test, which its error holds, may become free in between
    limits = resource.getrlimit(resource.RLIMIT_AS)
    held = _use_up_memory(want, limits[1]) if is_last() else []
    error = outcome(lambda: call(rows, name=verb))
    resource.setrlimit(resource.RLIMIT_AS, limits)
    del held
    expected = MemoryError if is_last() and verb in ("allreduce", "reducescatter") else hvd.RankFailedError
    assert isinstance(error, expected), repr(error)
    assert "emory" in repr(error)
    assert call(rows, name=verb).nbytes == want
    hvd.barrier()


def _use_up_memory(nbytes: int, most: int) -> list[np.ndarray[Any, Any]]:
    """Limit this process so that it cannot allocate so many bytes; return what uses up the rest."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 20), most))
    held = []
    for _ in range(20):  # the heap may have room for some: glibc gives back freed memory late
        try:
            held.append(np.empty(nbytes, np.uint8))
        except MemoryError:
            return held
    raise AssertionError(f"{nbytes} bytes can be allocated again and again")


def _break_carrier(owner: type, verb: str, bad: int = 1) -> None:
    """Make a method fail on one rank."""

    def broken(*_: object) -> None:
        raise RuntimeError("the wire is cut")

    if hvd.rank() == bad:
        setattr(owner, verb, broken)


def _check_told(error: BaseException | None, bad: int = 1) -> None:
    assert isinstance(error, hvd.RankFailedError), repr(error)
    assert str(error) == f"rank {bad} failed: RuntimeError: the wire is cut"
    assert error.rank == bad
    assert "in broken" in str(error.__cause__)
    print(f"rank {hvd.rank()} was told", flush=True)


def _end_together(number: int, bad: int = 1) -> None:
    """Shut down on all ranks, last on the broken rank, whose shutdown ends the job."""
    from mpi4py import MPI

    if number != bad:
        hvd.shutdown()
        print(f"rank {number} has left", flush=True)
    MPI.COMM_WORLD.Barrier()
    if number == bad:
        hvd.shutdown()
    time.sleep(30)


def _broken_window(name: str, bad: int = 1) -> None:
    from pyhvd.backends.shm import ShmBackend

    hvd.init()
    number = hvd.rank()
    hvd.barrier()
    _break_carrier(ShmBackend, "allreduce", bad)
    error = outcome(lambda: hvd.allreduce(np.ones(2 if name == "flat" else 300_000), name=name))
    if number == bad:
        assert isinstance(error, hvd.InternalError), repr(error)
        assert "the wire is cut" in str(error)
        assert name in str(error)
    else:
        _check_told(error, bad)
    later = outcome(hvd.barrier)
    assert isinstance(later, hvd.HorovodInternalError)
    assert "the wire is cut" in str(later)
    _end_together(number, bad)


def _broken_coordinator(name: str) -> None:
    _broken_window(name, 0)


def _broken_set(name: str) -> None:
    """Rank 1 breaks while rank 0 is in a window with it; the other ranks get the error by message."""
    from pyhvd.backends.shm import ShmBackend

    pair = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[pair])
    number = hvd.rank()
    hvd.barrier()
    _break_carrier(ShmBackend, "allreduce")
    if number > 1:
        _check_told(outcome(hvd.barrier))
    else:
        array = np.ones(2 if name == "flat" else 300_000)
        error = outcome(lambda: hvd.allreduce(array, name=name, process_set=pair))
        if number == 0:
            _check_told(error)
        else:
            assert isinstance(error, hvd.InternalError)
    _end_together(number)


def _broken_engine(name: str) -> None:
    """Rank 1 breaks in a list that only rank 1 carries out; the others are in the fast path's next batch."""
    from pyhvd.engine.executor import Executor

    hvd.init(process_sets="dynamic")
    number = hvd.rank()
    alone = hvd.add_process_set([1])
    array = np.ones(2 if name == "flat" else 300_000)
    for _ in range(3):
        hvd.allreduce(array, name=name)
    hvd.barrier()
    entered, posted, run = threading.Event(), threading.Event(), Executor.run

    def broken(self: Executor, batch: Any) -> None:
        if batch[0].request.name != "alone":
            run(self, batch)
            return
        entered.set()
        assert posted.wait(20)
        time.sleep(0.1)  # usually the others sleep in the window by now; they get the error in any case
        raise RuntimeError("the wire is cut")

    Executor.run = broken  # type: ignore[method-assign]
    if number == 1:
        hvd.allreduce_async(np.ones(1), name="alone", process_set=alone).flush()
        assert entered.wait(20)
    handle = hvd.allreduce_async(array, name=name)
    assert type(handle) is hvd.Handle, "not on the fast lane"
    handle.flush()
    posted.set()
    error = handle.exception(20)
    if number == 1:
        assert isinstance(error, hvd.InternalError), repr(error)
        assert "the wire is cut" in str(error)
    else:
        _check_told(error)
    _end_together(number)


@pytest.mark.parametrize("size", ["flat", "chunks"])
@pytest.mark.parametrize(
    ("broken", "n"),
    [
        (_broken_window, 2),
        (_broken_window, 4),
        (_broken_coordinator, 3),
        (_broken_engine, 2),
        (_broken_engine, 4),
        (_broken_set, 4),
    ],
)
def test_a_rank_that_breaks_lets_the_others_out_of_the_window(
    broken: Callable[[str], None], size: str, n: int
) -> None:
    """The others get rank and cause of the failure, and can leave; that rank's shutdown ends the job."""
    report = run_function(n, broken, {"name": size}, timeout=25, env={"PYHVD_FAST_LANE": "1"})
    assert not report.timed_out, report.text
    assert not report.results, report.text
    assert report.returncode != 0
    assert report.seconds < WITHIN_S, report.text
    others = set(range(n)) - {0 if broken is _broken_coordinator else 1}
    for said in ("was told", "has left"):
        assert {rank for rank in range(n) if f"rank {rank} {said}" in report.output} == others, report.text


def _broken_messages() -> None:
    from pyhvd.transport.mpi.fabric import MpiFabric

    hvd.init()
    hvd.barrier()
    _break_carrier(MpiFabric, "allgather")
    error = outcome(lambda: hvd.allreduce(np.ones(2), name="cut"))
    assert hvd.rank() == 1, "the other ranks are inside MPI, and cannot be reached"
    assert isinstance(error, hvd.InternalError), repr(error)
    assert "the wire is cut" in str(error)
    assert "cut" in str(error)
    assert isinstance(outcome(hvd.barrier), hvd.HorovodInternalError)
    hvd.shutdown()


def test_without_a_window_a_rank_that_breaks_ends_the_job() -> None:
    """The broken rank gets an error; its shutdown ends the ranks that wait inside the collective."""
    report = run_function(2, _broken_messages, timeout=20, env={"PYHVD_FAST_LANE": "0"})
    assert report.seconds < WITHIN_S, report.text
    assert not report.timed_out, report.text
    assert report.returncode != 0
    assert "the wire is cut" in report.output


UNCAUGHT = """\
import numpy as np, pyhvd as hvd
from pyhvd.backends.shm import ShmBackend

def broken(*_):
    raise MemoryError("no room")

hvd.init()
hvd.barrier()
if hvd.rank() == 1:
    ShmBackend.allreduce = broken
hvd.allreduce(np.ones(3), name="cut")
"""


def test_the_first_failure_is_the_last_thing_on_the_screen(tmp_path: Path) -> None:
    path = script(tmp_path, UNCAUGHT)
    ended = pyhvdrun("-n", 4, path, env={"PYHVD_FAST_LANE": "1"})
    assert ended.code == 1, ended.err
    assert ended.last.endswith("InternalError: allreduce 'cut' failed on this rank: MemoryError: no room"), (
        ended.err
    )
    assert ended.seconds < WITHIN_S, ended.err


def test_an_error_of_any_class_is_told(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    text = RAISING.format(bad=1, call=CALLS["waiting"])
    script.write_text(
        text.replace('KeyError("the root cause")', "type('Odd', (Exception,), {})('caf\\u00e9')")
    )
    run = run_mpi(2, [sys.executable, str(script)], env={"PYTHONPATH": str(ROOT)})
    assert run.returncode not in (0, None), run.stderr
    assert "rank 0 learned: rank 1 failed: Odd: caf" in run.stderr


def _wait_interrupted(handle: hvd.Handle) -> None:
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    handle.wait()


def _interrupted_wait() -> None:
    hvd.init()
    for _ in range(2):
        hvd.allreduce(np.ones(2), name="again")
    hvd.barrier()
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(np.ones(2), name="again")
        assert type(handle) is hvd.Handle, "not on the fast lane"
        with pytest.raises(KeyboardInterrupt):
            _wait_interrupted(handle)
        hvd.barrier()
        assert handle.result().tolist() == [1.0, 1.0]
    else:
        hvd.barrier()
        hvd.allreduce(np.ones(2), name="again")
    hvd.shutdown()


def test_an_interrupt_ends_a_wait_on_the_fast_lane() -> None:
    """Ctrl-C interrupts a rank that makes progress on the fast path; the tensor still completes."""
    report = run_function(2, _interrupted_wait, timeout=20, env={"PYHVD_FAST_LANE": "1"})
    assert report.outcome == "passed", report.text
