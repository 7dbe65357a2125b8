"""A job whose rank fails ends within 2 s, with the right code, and prints the first failure last."""

from __future__ import annotations

import ast
import math
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from pyhvd.run.launchers.local import _LocalJob
from pyhvd.run.options import Options
from tests.mpi.run_support import (
    LIBRARY,
    MPIEXEC,
    Ended,
    bare,
    bare_command,
    bare_environment,
    launcher_command,
    parent_of,
    pyhvdrun,
    read_pids,
    run,
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
    """Return the seconds to the job's end from the barrier at the start of a script (TOGETHER).

    A script that does more before it fails sets the file's time again.
    """
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


BEFORE_INIT = """
import pathlib, time
arrived = pathlib.Path(__file__ + ".arrived")
if rank == 1:
    while not arrived.exists(): time.sleep(0.01)
    ACT
arrived.touch()
IMPORT
import pyhvd as hvd
hvd.init()
"""


@pytest.mark.parametrize(
    ("seconds", "act", "text"),
    [
        (
            60,
            "raise SystemExit",
            "ended without calling init(), and rank 0 waits for it there: every rank must call pyhvd.init(),"
            " or none",
        ),
        (
            2,
            "time.sleep(100)",
            "has not called init() within the start timeout of 2 s, and rank 0 waits for it there",
        ),
    ],
    ids=["ends", "sleeps"],
)
@pytest.mark.parametrize("initialize", ["import", "init()"])
def test_a_rank_that_does_not_come_to_init_is_named(
    tmp_path: Path, initialize: str, seconds: int, act: str, text: str
) -> None:
    """The others wait in MPI_Init, which the import of mpi4py.MPI has called, or init() itself."""
    imports = "import mpi4py; mpi4py.rc.initialize = False" if initialize == "init()" else ""
    path = script(tmp_path, RANK + BEFORE_INIT.replace("ACT", act).replace("IMPORT", imports))
    ended = pyhvdrun("-n", 2, "--start-timeout", seconds, path)
    assert ended.code == 1, ended.err
    assert time.time() - os.stat(f"{path}.arrived").st_mtime < 2 + 2 + WITHIN_S
    assert ended.last == f"pyhvd: rank 1 of 2 on host {socket.gethostname()} {text}"


def test_a_rank_that_is_late_may_be_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a start timeout of the user's the job goes on."""
    job = _LocalJob([], {}, str(tmp_path), Options([], num_proc=2))
    with job._listener:
        job._entrance.enter(1, 0.0)
        for now in (29.9, 30.0, 40.0):
            job._check_entrance(now)
    assert job._end_at == math.inf
    assert capsys.readouterr().err == (
        f"pyhvd: rank 0 of 2 on host {socket.gethostname()} has not called init() within the start timeout of"
        " 30 s, and rank 1 waits for it there; the job goes on, as no start timeout was given that would end"
        " it\n"
    )


@both
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_just_goes_while_pyhvd_is_up_has_failed(
    tmp_path: Path, launched: bool, rank: int
) -> None:
    """Hydra kills the other ranks of such a rank, and may return 0; the launcher still reports a failure.

    The time counts from the failure, because imports and init() take seconds on a busy machine.
    """
    path = script(
        tmp_path,
        TOGETHER + "import numpy as np, pyhvd as hvd\nhvd.init(); hvd.allreduce(np.ones(3), name='x')\n"
        f"if rank == {rank}: os.utime(__file__ + '.together'); os._exit(0)\n"
        "hvd.allreduce(np.ones(3), name='x')\n",
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


FORKS = """
import os, sys, time
import numpy as np
FIRST
import pyhvd as hvd
hvd.init()
def ends(act):
    pid = os.fork()
    if pid == 0:
        act()
        return "in a child"
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
acts = [lambda: sys.exit(3), lambda: sys.exit("the helper has ended"), sys.exit]
acts += [lambda: 1 / 0, int]
codes = []
for act in acts:
    codes.append(ends(act))
    if codes[-1] == "in a child":
        break
else:
    total = hvd.allreduce(np.ones(2), op=hvd.Sum, name="x").tolist()
    print(f"rank {hvd.rank()}: {codes} {total}\\n", end="", flush=True)
"""


@pytest.mark.parametrize("how", ["pyhvdrun", "mpiexec", "python", "python, MPI first"])
def test_how_a_forked_child_ends_is_its_parents_affair(tmp_path: Path, how: str) -> None:
    """A child that leaves by Python's own end is not taken for its rank, and does not end MPI."""
    path = script(tmp_path, FORKS.replace("FIRST", "from mpi4py import MPI" if "first" in how else ""))
    if how.startswith("python"):
        ended = run([MPIEXEC, "-n", "2", sys.executable, path], bare_environment())
    else:
        ended = run_both(how == "pyhvdrun", 2, path)
    assert ended.code == 0, ended.err
    assert sorted(line for line in ended.out.splitlines() if line) == [
        f"rank {rank}: [3, 1, 0, 1, 0] [2.0, 2.0]" for rank in range(2)
    ]
    assert ended.err.count("the helper has ended") == 2, ended.err
    for words in ("ZeroDivisionError", "division by zero"):  # two ranks write at the same time
        assert ended.err.count(words) == 2, ended.err
    assert ended.err.count("pyhvd:") == ("python" not in how), ended.err  # OMP_NUM_THREADS


@pytest.mark.parametrize("first", ["", "from mpi4py import MPI\n"], ids=["pyhvd", "MPI"])
def test_a_failure_under_mpi4pys_own_runner_ends_the_job(tmp_path: Path, first: str) -> None:
    """A rank that mpi4py aborts does not wait for the others in MPI_Finalize; its forked child is no rank."""
    path = script(
        tmp_path,
        first + "import os, time, pyhvd as hvd\nhvd.init(); hvd.shutdown()\npid = os.fork()\n"
        "if pid == 0: raise ValueError('in the child')\n"
        "assert os.waitpid(pid, 0)[1] == 256; print('reaped', flush=True)\n"
        "from mpi4py import MPI; MPI.COMM_WORLD.Barrier()\n"
        "if MPI.COMM_WORLD.rank: raise ValueError('boo')\ntime.sleep(60)\n",
    )
    ended = run([MPIEXEC, "-n", "2", sys.executable, "-m", "mpi4py.run", path], bare_environment())
    assert ended.code == 1, ended.err
    assert ended.seconds < 30
    assert ended.out.count("reaped") == 2, ended.out
    assert ended.err.count("ValueError: boo") == 1, ended.err


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
def test_a_member_that_is_killed_while_the_others_make_a_set_is_named(tmp_path: Path, launched: bool) -> None:
    path = script(
        tmp_path,
        "import os, time\nimport pyhvd as hvd\nfrom pyhvd.api.process_sets import found_process_set\n"
        "hvd.init()\n"
        "if hvd.rank() == 1: time.sleep(0.5); os.kill(os.getpid(), 9)\nfound_process_set([0, 1, 2], 'key')\n",
    )
    ended = run_both(launched, 3, path)
    assert ended.code == 137
    assert "rank 1 of 3" in ended.err
    assert "was killed by SIGKILL" in ended.err


@pytest.mark.any_mpi
@both
def test_a_crash_inside_of_mpi_names_the_line_or_the_function(
    tmp_path: Path, launched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Open MPI prints a stack of its own, and UCX does if it may; else Python's line is known."""
    path = script(
        tmp_path,
        TOGETHER
        + "import ctypes, resource\nresource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        + "buffer = (ctypes.c_char * 4096).from_address(1 << 40)\ndef step():\n"
        + "    MPI.COMM_WORLD.Send([buffer, 4096, MPI.BYTE], dest=0)\n"
        + "if rank == 1: step()\nMPI.COMM_WORLD.Recv(bytearray(4096), source=1)\n",
    )
    killed = "was killed by SIGSEGV (signal 11)"
    [line] = [line for line in run_both(launched, 2, path).err.splitlines() if killed in line]
    if LIBRARY.family != "Open MPI":
        assert f"{killed} at {path}:" in line
        assert line.endswith(" in step: MPI.COMM_WORLD.Send([buffer, 4096, MPI.BYTE], dest=0)")
    if launched:  # else nobody but mpiexec reads the rank's stderr
        monkeypatch.setenv("UCX_HANDLE_ERRORS", "bt")
        ended = run_both(launched, 2, path)
        assert ended.code == 139
        assert f"{killed}; set PYTHONFAULTHANDLER=1 to see where; in MPI_Send: " in ended.last
        assert "0x10000000000" in ended.last


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


_SEGMENTS = """
from pyhvd.job.process.segments import segments_of
found = MPI.COMM_WORLD.allgather(sorted(segments_of(os.getpid())))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/dev/shm is Linux's")
@both
@pytest.mark.parametrize("how", ["os._exit(1)", "sys.exit(1)", "os.kill(os.getpid(), 9)"])
def test_a_rank_that_ends_between_mpi_init_and_init_leaves_no_shared_memory(
    tmp_path: Path, launched: bool, how: str
) -> None:
    ends = f"if rank == 1:\n    print(sum(found, []), flush=True); {how}\ntime.sleep(60)\n"
    ended = run_both(launched, 2, script(tmp_path, TOGETHER + _SEGMENTS + ends))
    assert ended.code != 0
    made = ast.literal_eval(ended.out.splitlines()[0])
    if LIBRARY.family != "Open MPI":  # its ranks make files when they need them
        assert made, "MPICH has its file"
    assert [path for path in made if os.path.exists(path)] == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/dev/shm is Linux's")
@both
def test_a_rank_that_is_killed_while_it_opens_the_window_leaves_no_file(
    tmp_path: Path, launched: bool
) -> None:
    path = script(
        tmp_path,
        RANK
        + """
import pyhvd as hvd

def die(file, _):
    path = file if isinstance(file, str) else os.readlink(f"/proc/self/fd/{file}")
    print(path, flush=True)
    os.kill(os.getpid(), 9)

os.truncate = die
hvd.init()
""",
    )
    ended = run_both(launched, 2, path)
    assert ended.code == 137
    made = ended.out.splitlines()[0]
    assert made.startswith("/dev/shm/")
    assert not os.path.exists(made)
