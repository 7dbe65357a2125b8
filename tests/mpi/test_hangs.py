"""Hang reports of real jobs: ranks that sleep, that are stopped, that hold the GIL; and the example."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.mpi.launch import ROOT
from tests.mpi.run_support import bare, launcher_command, pyhvdrun, run, script

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked at in /proc")

ENDING = """\
    import ctypes, os, signal, sys, time
    import numpy as np, pyhvd as hvd

    def idle():
        {idle}

    hvd.init()
    for _ in range(3):
        hvd.allreduce(np.ones(4), name="x")
    if hvd.rank() == {late}:
        idle()
    try:
        hvd.allreduce(np.ones(4), name="x")
    except hvd.StallError as exc:
        os.write(1, f"rank {{hvd.rank()}}: {{exc.missing}}, {{sorted(exc.stacks)}}\\n".encode())
        raise
"""
SHORT = ("--stall-check-warning-time-seconds", 0.5, "--stall-check-shutdown-time-seconds", 1)


@pytest.mark.any_mpi
@pytest.mark.parametrize("lane", ["0", "1"])
def test_the_example_shows_who_is_where(lane: str) -> None:
    example = str(ROOT / "examples" / "hang.py")
    ended = pyhvdrun(
        "-n", 4, "--stall-check-warning-time-seconds", 2, example, env={"PYHVD_FAST_LANE": lane}, cwd=ROOT
    )
    assert ended.code == 0, ended.err
    assert ended.out == "all ranks have ended\n"
    assert ended.err.count("have not submitted") == 1
    assert "rank 3 on host " in ended.err
    assert "has not submitted 'grad/w1', 'grad/w2': it is at examples/hang.py:" in ended.err
    assert " in load_batch: time.sleep(seconds)\n" in ended.err
    # Rank 0 inspects every half second.
    assert re.search(r"submitted by ranks 0-2 \(waiting for \d+ s\)", ended.err)


def test_the_flags_reach_the_ranks_under_a_foreign_mpiexec(tmp_path: Path) -> None:
    path = script(tmp_path, ENDING.format(idle="time.sleep(60)", late=1))
    ended = bare(2, *SHORT, path)
    assert ended.code != 0
    assert "it is at" in ended.err
    assert " in idle" in ended.err


STOPPED = "os.kill(os.getpid(), signal.SIGSTOP)"
HOLDING = "ctypes.PyDLL(None).sleep(60)"
# The other ranks wait for this one after they mark tensors ready on the fast path.
KEEPING = f"from pyhvd.engine import context; context.current().fast_path.keep_lock(); {STOPPED}"


@pytest.mark.any_mpi
@pytest.mark.parametrize(
    ("late", "idle", "said"),
    [
        pytest.param(0, "time.sleep(60)", "it is at script.py:5 in idle", marks=pytest.mark.slow),
        (2, "time.sleep(60)", "it is at script.py:5 in idle"),
        (2, STOPPED, "its process is stopped (by SIGSTOP or Ctrl-Z): kill -CONT"),
        pytest.param(
            2, KEEPING, "its process is stopped (by SIGSTOP or Ctrl-Z): kill -CONT", marks=pytest.mark.slow
        ),
        (0, KEEPING, "its process is stopped (by SIGSTOP or Ctrl-Z): kill -CONT"),
        (2, HOLDING, "does not answer within 2 s, and its process sleeps: it is blocked, perhaps while it"),
        # Rank 0 cannot report: the others find out.
        (0, STOPPED, "its process is stopped (by SIGSTOP or Ctrl-Z): kill -CONT"),
        (0, HOLDING, "its process sleeps"),
    ],
)
def test_the_error_says_what_is_known(tmp_path: Path, late: int, idle: str, said: str) -> None:
    path = script(tmp_path, ENDING.format(idle=idle, late=late))
    ended = run(launcher_command("-n", 3, *SHORT, path), cwd=tmp_path)
    assert ended.code == 1, ended.err
    shown = ended.err.rstrip().rpartition("StallError: ")[2]  # the last output
    assert f"rank {late} on host " in shown, ended.err
    assert said in shown
    told = [line for line in ended.out.splitlines() if ": {'x': " in line]
    assert told, ended.out
    assert all(line.endswith(f"{{'x': [{late}]}}, [{late}]") for line in told), ended.out


SILENT = """\
    import ctypes, os, signal, subprocess, time
    import numpy as np, pyhvd as hvd

    two = hvd.ProcessSet([1, 2])
    hvd.init(process_sets=[two])
    for _ in range(3):
        hvd.allreduce(np.ones(4), name="all")
    hvd.barrier()
    if hvd.rank() == 0:
        time.sleep(0.2)
        subprocess.Popen(["sh", "-c", f"sleep 5; kill -CONT {{os.getpid()}}"])
        {silent}
    else:
        time.sleep(0.4)
    here = hvd.global_process_set if {name!r} == "all" else two
    if hvd.rank() in here.ranks:
        hvd.allreduce(np.ones(4), name={name!r}, process_set=here)
    hvd.barrier()
"""
NOT_ANSWERING = (
    "its background thread does not answer within 2 s, and its process sleeps: it is blocked, perhaps"
)


@pytest.mark.any_mpi
@pytest.mark.parametrize("name", ["two", "all"])
@pytest.mark.parametrize(
    ("silent", "said"),
    [
        ("ctypes.PyDLL(None).sleep(5)", NOT_ANSWERING),
        (STOPPED, "its process is stopped (by SIGSTOP or Ctrl-Z)"),
    ],
)
def test_one_waiting_rank_says_that_rank_0_does_not_answer(
    tmp_path: Path, silent: str, said: str, name: str
) -> None:
    """By default, which is without a shutdown time; and the job goes on when rank 0 does."""
    path = script(tmp_path, SILENT.format(silent=silent, name=name))
    ended = run(launcher_command("-n", 3, "--stall-check-warning-time-seconds", 0.5, path), cwd=tmp_path)
    assert ended.code == 0, ended.err
    told = re.findall(
        r"pyhvd\[([12])\] WARNING: rank \1 has waited for '(\w+)' for \d+ s: rank 0, which decides what runs,"
        r" does not answer\nrank 0 on host \S+ \(pid \d+\): (.+)",
        ended.err,
    )
    assert told, ended.err
    assert len({rank for rank, *_ in told}) == 1, "one rank of the host speaks"
    assert {each for _, each, _ in told} == {name}
    assert said in told[0][2]


INSIDE_WITHOUT_RANK_0 = """\
    import ctypes, time, numpy as np, pyhvd as hvd
    from pyhvd.backends.shm import ShmBackend

    two = hvd.ProcessSet([1, 2])
    hvd.init(process_sets=[two])
    hvd.barrier()
    if hvd.rank() == 0:
        time.sleep(5)
    if hvd.rank() == 2:
        reduce = ShmBackend.allreduce
        ShmBackend.allreduce = lambda *given: (ctypes.PyDLL(None).sleep(3), reduce(*given))
    if hvd.rank():
        hvd.allreduce(np.ones(4), name="x", process_set=two)
"""


@pytest.mark.any_mpi
def test_ranks_that_wait_in_the_window_without_rank_0(tmp_path: Path) -> None:
    path = script(tmp_path, INSIDE_WITHOUT_RANK_0)
    ended = run(launcher_command("-n", 3, "--stall-check-warning-time-seconds", 0.5, path), cwd=tmp_path)
    assert ended.code == 0, ended.err
    first, *rest = (line for line in ended.err.splitlines() if not line.startswith("pyhvd: OMP"))
    assert "pyhvd[1] WARNING: rank 1 has waited for 'x' for" in first, ended.err
    assert first.endswith("all ranks have submitted it, but some do not carry it out")
    assert any(re.fullmatch(r"rank 2 on host \S+ \(pid \d+\): its process sleeps", line) for line in rest)


INSIDE = """\
    import os, signal, numpy as np, pyhvd as hvd
    from pyhvd.backends.shm import ShmBackend

    hvd.init()
    hvd.barrier()
    if hvd.rank() == 2:
        ShmBackend.allreduce = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
    try:
        hvd.allreduce(np.ones(4), name="x")
    except hvd.StallError as exc:
        os.write(1, f"rank {hvd.rank()}: {exc.missing}, {sorted(exc.stacks)}\\n".encode())
        raise
"""


@pytest.mark.any_mpi
def test_a_rank_that_is_stopped_while_the_others_are_in_the_window(tmp_path: Path) -> None:
    """The first rank that gives up also releases the other rank, with the same facts."""
    ended = run(launcher_command("-n", 3, *SHORT, script(tmp_path, INSIDE)), cwd=tmp_path)
    assert ended.code == 1, ended.err
    shown = ended.err.rstrip().rpartition("StallError: ")[2]
    assert " has given up: rank " in shown, ended.err
    assert "'x'" in shown
    assert "all ranks have submitted it, but some do not carry it out" in shown
    assert "its process is stopped (by SIGSTOP or Ctrl-Z): kill -CONT" in shown
    told = [line for line in ended.out.splitlines() if ": {'x': " in line]
    assert told, ended.out
    assert all(line.endswith("{'x': [2]}, [2]") for line in told)
    assert "did not end well" not in ended.err


@pytest.mark.any_mpi
def test_a_timeline_that_a_rank_does_not_begin(tmp_path: Path) -> None:
    program = """\
        import os, signal, numpy as np, pyhvd as hvd

        hvd.init()
        hvd.allreduce(np.ones(4), name="x")
        if hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        hvd.start_timeline("t.json")
    """
    command = launcher_command("-n", 2, *SHORT, script(tmp_path, program))
    ended = run(command, env={"PYHVD_TIMELINE": "DYNAMIC"}, cwd=tmp_path)
    assert ended.code == 1, ended.err
    shown = ended.err.rstrip().rpartition("StallError: ")[2]
    assert "rank 0 has waited for 'timeline' for" in shown, ended.err
    assert "its process is stopped (by SIGSTOP or Ctrl-Z): kill -CONT" in shown
