"""A job whose rank fails ends within 2 s, with the right code, and prints the first failure last."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.mpi.run_support import (
    LIBRARY,
    Ended,
    bare,
    bare_command,
    launcher_command,
    parent_of,
    pyhvdrun,
    read_pids,
    script,
    started,
)
from tests.waiting import wait_gone

RANK = 'import os; rank = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")))\n'
# All ranks have started; ranks that do not fail would run for a minute.
TOGETHER = RANK + (
    "import sys, time\nfrom mpi4py import MPI\n"
    "MPI.COMM_WORLD.Barrier(); open(__file__ + '.together', 'w').close()\n"
)

WITHIN_S = 4.0  # 2 s, and a margin for a busy machine, after all ranks have started
OTHERS = {
    "sleep": "time.sleep(60)",
    "compute": "while True: pass",
    "collective": "MPI.COMM_WORLD.allreduce(1)",
}


def run_both(launched: bool, ranks: int, *arguments: object) -> Ended:
    return pyhvdrun("-n", ranks, *arguments) if launched else bare(ranks, *arguments)


def took(ended: Ended, path: str) -> float:
    """Return the seconds from the barrier at the start of a script (TOGETHER) to the job's end."""
    return ended.at - os.stat(f"{path}.together").st_mtime


def is_last(ended: Ended, line: str, launched: bool) -> bool:
    """Return whether the line is last; after it Open MPI's own mpiexec prints a banner for codes but 1."""
    if launched or ended.code == 1 or LIBRARY.family != "Open MPI":
        return ended.last == line
    return line in ended.err.splitlines()


both = pytest.mark.parametrize("launched", [True, False], ids=["pyhvdrun", "mpiexec"])


@both
@pytest.mark.parametrize("others", OTHERS)
def test_exception_in_one_rank_ends_the_job(tmp_path: Path, launched: bool, others: str) -> None:
    path = script(
        tmp_path,
        TOGETHER + f"def f():\n    raise ValueError('boo')\nif rank == 1:\n    f()\n{OTHERS[others]}\n",
    )
    ended = run_both(launched, 3, path)
    assert ended.code == 1
    assert took(ended, path) < WITHIN_S
    assert is_last(ended, "ValueError: boo", launched), ended.err
    assert ended.err.count("Traceback") == 1
    said = [line for line in ended.err.splitlines() if "OMP_NUM_THREADS" not in line]
    assert said[0].startswith("pyhvd: rank 1 of 3 on host "), ended.err
    assert said[0].endswith(" failed:")
    assert said[2] == f'  File "{path}", line 8, in <module>'  # no frame of pyhvd above it
    assert "BAD TERMINATION" not in ended.out + ended.err


@both
def test_exception_before_mpi_was_asked_for(tmp_path: Path, launched: bool) -> None:
    path = script(tmp_path, RANK + "import time\nif rank == 1: raise ValueError('early')\ntime.sleep(60)\n")
    ended = run_both(launched, 3, path)
    assert ended.code == 1
    assert ended.seconds < 15  # the others would run for a minute; the time of the start is unknown
    # Rank 0 may start only now, and print its settings.
    said = [line for line in ended.err.splitlines() if "OMP_NUM_THREADS" not in line]
    assert said[-1] == "ValueError: early", ended.err


@both
def test_exception_after_finalize(tmp_path: Path, launched: bool) -> None:
    path = script(
        tmp_path, TOGETHER + "MPI.Finalize()\nif rank == 1: raise ValueError('late')\ntime.sleep(60)\n"
    )
    ended = run_both(launched, 2, path)
    assert (ended.code, ended.last) == (1, "ValueError: late")
    assert took(ended, path) < WITHIN_S


@pytest.mark.any_mpi
@both
def test_exit_handlers_run_but_cannot_hold_the_job(tmp_path: Path, launched: bool) -> None:
    path = script(
        tmp_path,
        TOGETHER
        + "import atexit, threading\n"
        + "atexit.register(time.sleep, 60)\natexit.register(print, 'handler ran')\n"
        + "if rank == 1: raise ValueError('boo')\ntime.sleep(60)\n",
    )
    ended = run_both(launched, 2, path)
    assert (ended.code, ended.last) == (1, "ValueError: boo")
    assert "handler ran" in ended.out
    assert took(ended, path) < WITHIN_S


@pytest.mark.any_mpi
def test_a_running_thread_cannot_hold_the_job(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        TOGETHER + "import threading\nthreading.Thread(target=time.sleep, args=(60,)).start()\n"
        "if rank == 1: raise ValueError('boo')\n",
    )
    ended = pyhvdrun("-n", 2, path)
    assert (ended.code, ended.last) == (1, "ValueError: boo")
    assert took(ended, path) < WITHIN_S


@pytest.mark.any_mpi
@both
def test_two_ranks_failing_show_one_traceback(tmp_path: Path, launched: bool) -> None:
    path = script(tmp_path, TOGETHER + "raise ValueError(f'rank {rank} is unhappy')\n")
    ended = run_both(launched, 4, path)
    assert ended.code == 1
    assert ended.err.count("Traceback") == 1
    assert ended.last.endswith("is unhappy")


SECONDARY = """
class RankFailedError(RuntimeError):
    pass
RankFailedError.__module__ = "pyhvd.errors"
"""


@pytest.mark.any_mpi
@both
def test_secondary_error_is_not_the_one_shown(tmp_path: Path, launched: bool) -> None:
    """Rank 0 gets rank 1's failure, and dies of it, before rank 1 ends."""
    path = script(
        tmp_path,
        TOGETHER
        + SECONDARY
        + "if rank == 0:\n"
        + "    try:\n        raise RankFailedError('rank 1 failed')\n"
        + "    except RankFailedError as exc:\n        raise RuntimeError('training stopped') from exc\n"
        + "time.sleep(0.3)\nraise ValueError('the cause')\n",
    )
    ended = run_both(launched, 2, path)
    assert (ended.code, ended.last) == (1, "ValueError: the cause")
    assert "training stopped" not in ended.err


@pytest.mark.any_mpi
@both
def test_secondary_error_alone_is_shown(tmp_path: Path, launched: bool) -> None:
    path = script(
        tmp_path, TOGETHER + SECONDARY + "if rank == 0: raise RankFailedError('alone')\ntime.sleep(60)\n"
    )
    ended = run_both(launched, 2, path)
    assert ended.code == 1
    assert ended.last.endswith("RankFailedError: alone")
    assert took(ended, path) < WITHIN_S


@both
@pytest.mark.parametrize(
    ("call", "code", "last"),
    [
        ("sys.exit(3)", 3, "called sys.exit(3)"),
        ("sys.exit('no data')", 1, "no data"),
        ("os._exit(4)", 4, "exited with code 4, without a Python exception"),
        ("raise KeyboardInterrupt", 130, "was interrupted"),
    ],
)
def test_exit_codes(tmp_path: Path, launched: bool, call: str, code: int, last: str) -> None:
    path = script(tmp_path, TOGETHER + f"if rank == 1: {call}\ntime.sleep(60)\n")
    ended = run_both(launched, 2, path)
    assert ended.code == code
    assert took(ended, path) < WITHIN_S
    [line] = [line for line in ended.err.splitlines() if line.endswith(last)]
    assert is_last(ended, line, launched), ended.err


@both
def test_exit_0_of_one_rank_ends_that_rank_only(tmp_path: Path, launched: bool) -> None:
    path = script(
        tmp_path, RANK + "import sys, time\nif rank == 1: sys.exit(0)\ntime.sleep(0.5)\nprint('ran on')\n"
    )
    ended = run_both(launched, 2, path)
    assert (ended.code, ended.out) == (0, "ran on\n"), ended.err


@both
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_just_goes_while_pyhvd_is_up_has_failed(
    tmp_path: Path, launched: bool, rank: int
) -> None:
    """Hydra kills the other ranks of such a rank, and may return 0; the launcher still reports a failure."""
    path = script(
        tmp_path,
        TOGETHER + "import numpy as np, pyhvd as hvd\nhvd.init(); hvd.allreduce(np.ones(3), name='x')\n"
        f"if rank == {rank}: os._exit(0)\nhvd.allreduce(np.ones(3), name='x')\n",
    )
    ended = run_both(launched, 2, path)
    assert ended.code == 1
    assert took(ended, path) < WITHIN_S
    assert ended.last.startswith(f"pyhvd: rank {rank} of 2 on host "), ended.err
    assert "exited with code 0 while pyhvd was up, without its exit handlers" in ended.last


@both
def test_a_rank_that_has_shut_pyhvd_down_may_just_go(tmp_path: Path, launched: bool) -> None:
    """The job has one rank, because Hydra kills the others of a rank that ends without its exit handlers."""
    path = script(
        tmp_path,
        RANK + "import pyhvd as hvd\nfor _ in range(2): hvd.init(); hvd.barrier(); hvd.shutdown()\n"
        "from mpi4py import MPI\nMPI.Finalize()\nos._exit(0)\n",
    )
    ended = run_both(launched, 1, path)
    assert ended.code == 0, ended.err


@pytest.mark.any_mpi
def test_who_has_ended_before_a_rank_was_lost_is_named(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        RANK + "import time\nif rank == 0: os.write(1, b'pid %d\\n' % os.getppid()); os._exit(0)\n"
        "open(__file__ + '.pid', 'w').write(str(os.getpid())); os.write(1, b'pid 0\\n'); time.sleep(60)\n",
    )
    with started(launcher_command("-n", 2, path)) as job:
        wait_gone([pid for pid in read_pids(job, 2) if pid])
        rank = int(Path(f"{path}.pid").read_text())
        os.kill(parent_of(rank), signal.SIGKILL)
        _, err = job.communicate(timeout=10)
        wait_gone([rank])
    assert "rank 1 of 2 was lost: the process that watched it was killed (ended before it: rank 0; " in err


@both
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_killed_rank_is_named(tmp_path: Path, launched: bool, number: signal.Signals) -> None:
    path = script(tmp_path, TOGETHER + f"if rank == 1: os.kill(os.getpid(), {int(number)})\ntime.sleep(60)\n")
    ended = run_both(launched, 2, path)
    assert ended.code == 128 + number
    assert took(ended, path) < WITHIN_S
    [line] = [line for line in ended.err.splitlines() if line.startswith("pyhvd: rank 1 of 2 on host ")]
    assert f"was killed by {number.name} (signal {int(number)})" in line
    assert is_last(ended, line, launched), ended.err


@both
def test_killed_supervisor_takes_its_rank_along(tmp_path: Path, launched: bool) -> None:
    path = script(tmp_path, TOGETHER + "os.write(1, b'pid %d\\n' % os.getpid())\ntime.sleep(60)\n")
    command = launcher_command("-n", 2, path) if launched else bare_command(2, path)
    with started(command) as job:
        pids = read_pids(job, 2)
        os.kill(parent_of(pids[0]), signal.SIGKILL)
        _, err = job.communicate(timeout=10)
        assert job.returncode != 0
        wait_gone(pids)
    if launched:
        assert err.rstrip().endswith("was lost: the process that watched it was killed")


@pytest.mark.any_mpi
def test_what_a_failed_rank_started_ends_with_it(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        "import subprocess\nchild = subprocess.Popen(['sleep', '60'])\n"
        "print('pid', child.pid, flush=True)\nraise ValueError('boo')\n",
    )
    with started(launcher_command("-n", 1, path)) as job:
        pids = read_pids(job, 1)
        job.communicate(timeout=10)
        wait_gone(pids)


@pytest.mark.any_mpi
def test_own_excepthook_is_used(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        "import sys\nsys.excepthook = lambda kind, exc, tb: print('HOOK', exc, file=sys.stderr)\n"
        "raise ValueError('boo')\n",
    )
    ended = pyhvdrun("-n", 1, path)
    assert ended.last == "HOOK boo"
    assert "Traceback" not in ended.err


@pytest.mark.any_mpi
def test_syntax_error(tmp_path: Path) -> None:
    ended = pyhvdrun("-n", 1, script(tmp_path, "def f(:\n"))
    assert ended.code == 1
    assert ended.last == "SyntaxError: invalid syntax"
    assert "runpy" not in ended.err
