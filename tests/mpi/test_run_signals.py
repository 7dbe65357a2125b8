"""Ctrl-C, SIGTERM and the death of the launcher: every rank ends, and no process or file is left."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest

from pyhvd.job.process.private_folder import PrivateFolder
from tests.mpi.run_support import (
    TIMEOUT_S,
    bare_command,
    interrupt,
    launcher_command,
    parent_of,
    read_pids,
    script,
    started,
)
from tests.waiting import wait_gone

READY = """
import os, signal, sys, time
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
def ready():
    os.write(1, b"pid %d\\n" % os.getpid())
"""
RUNS = READY + "ready()\ntime.sleep(60)\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("others", ["time.sleep(60)", "while True: pass"])
def test_signal_to_the_launcher_ends_the_job(
    tmp_path: Path, number: signal.Signals, code: int, others: str
) -> None:
    with started(launcher_command("-n", 3, script(tmp_path, READY + f"ready()\n{others}\n"))) as job:
        pids = read_pids(job, 3)
        ended, seconds = interrupt(job, number)
        assert ended.code == code
        assert seconds < 4.5  # less than the grace
        assert ended.last == f"pyhvd: ended by {number.name}"
        assert ended.err.count("Traceback") == (number == signal.SIGINT)
        assert "BAD TERMINATION" not in ended.out + ended.err
        wait_gone(pids)


def test_every_rank_may_clean_up_after_ctrl_c(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        READY
        + "try:\n    ready()\n    time.sleep(60)\n"
        + "except KeyboardInterrupt:\n"
        + "    time.sleep(0.3 * MPI.COMM_WORLD.rank)\n    os.write(1, b'cleaned up\\n')\n    raise\n",
    )
    with started(launcher_command("-n", 3, path)) as job:
        read_pids(job, 3)
        ended, _ = interrupt(job, signal.SIGINT)
    assert ended.code == 130
    assert ended.out.count("cleaned up") == 3
    assert ended.err.count("Traceback") == 1
    assert "was interrupted" in ended.err


@pytest.mark.parametrize("twice", [False, True], ids=["grace", "second"])
def test_ranks_that_ignore_signals_are_killed(tmp_path: Path, twice: bool) -> None:
    """The launcher kills them 5 s after the signal, or at a second signal; meanwhile it names them."""
    path = script(
        tmp_path,
        READY
        + "signal.signal(signal.SIGINT, signal.SIG_IGN)\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        + "ready()\ntime.sleep(60)\n",
    )
    with started(launcher_command("-n", 2, path)) as job:
        pids = read_pids(job, 2)
        if twice:
            assert job.stderr is not None
            job.send_signal(signal.SIGINT)
            while "are still stopping" not in job.stderr.readline():
                pass
        ended, seconds = interrupt(job, signal.SIGINT)
        assert ended.code == 130
        assert seconds < (3.5 if twice else 8)  # 4 s of the grace were left
        wait_gone(pids)
    if not twice:
        assert "pyhvd: ranks 0-1 are still stopping" in ended.err


def test_handled_signals_pass_through(tmp_path: Path) -> None:
    """A rank that handles SIGUSR1 gets it once, however it was sent."""
    path = script(
        tmp_path,
        READY
        + "got = []\nsignal.signal(signal.SIGUSR1, lambda *_: got.append(1))\nready()\n"
        + "while not got: time.sleep(0.01)\n"
        + "MPI.COMM_WORLD.Barrier()\nos.write(1, b'got %d\\n' % len(got))\n",
    )
    with started(launcher_command("-n", 2, path)) as job:
        read_pids(job, 2)
        job.send_signal(signal.SIGUSR1)
        out, err = job.communicate(timeout=TIMEOUT_S)
    assert job.returncode == 0, err
    assert out.count("got 1\n") == 2


def test_killed_launcher_leaves_nothing_behind(tmp_path: Path) -> None:
    # A private directory with a short path: paths of sockets are limited.
    with tempfile.TemporaryDirectory(prefix="killed-") as own:
        with started(launcher_command("-n", 2, script(tmp_path, RUNS)), {"TMPDIR": own}) as job:
            pids = read_pids(job, 2)
            supervisors = [parent_of(pid) for pid in pids]
            mpiexec = [parent_of(pid) for pid in supervisors]
            assert list(Path(own).glob("pyhvd-*"))
            job.kill()
            wait_gone([*pids, *supervisors, *mpiexec])
        PrivateFolder(own).close()  # as the next job does
        assert list(Path(own).glob("pyhvd-*")) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_to_mpiexec_ends_the_ranks(tmp_path: Path, number: signal.Signals) -> None:
    with started(bare_command(2, script(tmp_path, RUNS))) as job:
        pids = read_pids(job, 2)
        ended, _ = interrupt(job, number)
        assert ended.code != 0
        wait_gone(pids)
        assert ended.err.count("Traceback") <= 1


def test_killed_mpiexec_leaves_no_rank_behind(tmp_path: Path) -> None:
    with started(bare_command(2, script(tmp_path, RUNS))) as job:
        pids = read_pids(job, 2)
        supervisors = [parent_of(pid) for pid in pids]
        job.kill()
        wait_gone([*pids, *supervisors])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_one_rank_that_handles_it_holds_nothing_up(
    tmp_path: Path, number: signal.Signals
) -> None:
    """The rank's supervisor gets the signal too if a batch system signals all processes of a host."""
    path = script(
        tmp_path,
        f"import os, signal, sys, time\nsignal.signal({int(number)}, lambda *_: sys.exit(0))\n"
        "os.write(1, b'pid %d\\n' % os.getpid()); time.sleep(60)\n",
    )
    with started(launcher_command("-n", 2, path)) as job:
        pids = read_pids(job, 2)
        for pid in pids:
            os.kill(parent_of(pid), number)
        _, err = job.communicate(timeout=TIMEOUT_S)
        assert job.returncode == 0, err
        wait_gone(pids)


@pytest.mark.parametrize("launched", [True, False], ids=["pyhvdrun", "mpiexec"])
def test_a_job_under_nohup_outlives_its_terminal(tmp_path: Path, launched: bool) -> None:
    go_on = tmp_path / "go on"
    path = script(
        tmp_path,
        READY
        + f"ready()\nwhile not os.path.exists({str(go_on)!r}): time.sleep(0.01)\nos.write(1, b'whole\\n')\n",
    )
    command = launcher_command("-n", 2, path) if launched else bare_command(2, path)
    nohup = ["sh", "-c", "trap '' HUP; exec \"$@\"", "sh"]
    with started([*nohup, *command]) as job:
        pids = read_pids(job, 2)
        if launched:
            job.send_signal(signal.SIGHUP)
        for pid in pids:
            os.kill(parent_of(pid), signal.SIGHUP)
        go_on.touch()
        out, err = job.communicate(timeout=TIMEOUT_S)
    assert (job.returncode, out) == (0, "whole\nwhole\n"), err


def test_signal_to_one_rank_ends_the_job(tmp_path: Path) -> None:
    with started(launcher_command("-n", 2, script(tmp_path, RUNS))) as job:
        pids = read_pids(job, 2)
        os.kill(pids[0], signal.SIGTERM)
        _, err = job.communicate(timeout=TIMEOUT_S)
        assert job.returncode == 143
        assert "was killed by SIGTERM (signal 15)" in err.rstrip().splitlines()[-1]
        wait_gone(pids)
