"""The harness itself: the failures that it must detect, and the texts that it must show."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

from tests.mpi.harness import JobReport, SharedJobs, on_ranks, run_function, run_mpi
from tests.mpi.launch import ROOT
from tests.waiting import runs, wait_gone


@on_ranks(1, 2, 4)
def test_ranks_form_one_world(nranks: int) -> None:
    from mpi4py import MPI

    assert MPI.COMM_WORLD.size == nranks
    assert MPI.COMM_WORLD.allreduce(1) == nranks


@on_ranks(2)
@pytest.mark.parametrize("factor", [2, 3])
def test_parameters_below(factor: int) -> None:
    from mpi4py import MPI

    assert MPI.COMM_WORLD.allreduce(factor) == 2 * factor


@pytest.mark.parametrize("kind", [int, complex])
@on_ranks(2, env={"PYHVD_HARNESS_TEST": "here"})
def test_parameters_above_fixtures_and_environment(kind: type, tmp_path: Path) -> None:
    assert kind in (int, complex)
    assert tmp_path.is_dir()
    assert os.environ["PYHVD_HARNESS_TEST"] == "here"
    with pytest.raises(ValueError, match="literal"):
        int("x")


@on_ranks(2, cleanup=False)
def test_exit_without_clean_up() -> None:
    from mpi4py import MPI

    assert MPI.COMM_WORLD.size == 2


@on_ranks(2)
def _skip_everywhere() -> None:
    pytest.skip("no such device")


def test_skip_by_all_ranks_is_a_skip(shared_jobs: SharedJobs) -> None:
    with pytest.raises(pytest.skip.Exception, match="no such device"):
        _skip_everywhere(nranks=2, shared_jobs=shared_jobs)


def _rank() -> int:
    from mpi4py import MPI

    rank: int = MPI.COMM_WORLD.rank
    return rank


# Ranks sleep this long until they are ended; a job that took less was ended by the harness.
LONG_S = 300.0
# Hanging ranks have this long to start and to reach the line where they hang.
HANG_S = 8.0


def _fail_on_rank_1() -> None:
    number = 41 + _rank()
    if _rank() == 1:
        assert number == 0, "the reason"
    time.sleep(LONG_S)


def test_failing_rank_is_named_and_ends_the_job() -> None:
    report = run_function(2, _fail_on_rank_1)
    assert report.outcome == "failed"
    assert not report.timed_out
    assert "rank 1 of 2 failed:" in report.text
    assert 'assert number == 0, "the reason"' in report.text
    assert "number = 42" in report.text
    assert "rank 0 of 2 was stopped" in report.text


def _fail_before_mpi() -> None:
    if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
        raise ValueError("too early")
    time.sleep(LONG_S)


def test_failure_before_mpi_init_ends_the_job() -> None:
    report = run_function(2, _fail_before_mpi)
    assert not report.timed_out
    assert "ValueError: too early" in report.text


def _hang() -> None:
    helper = threading.Thread(target=time.sleep, args=(LONG_S,), daemon=True)
    helper.start()
    if _rank() == 0:
        time.sleep(LONG_S)  # hanging line of rank 0
    threading.Event().wait()  # hanging line of rank 1


@pytest.mark.any_mpi
def test_hang_shows_all_stacks_within_the_timeout() -> None:
    _check_stacks(run_function(2, _hang, timeout=HANG_S))


def _check_stacks(report: JobReport) -> None:
    assert report.outcome == "failed"
    assert report.timed_out
    assert report.seconds < LONG_S / 2
    lines = Path(__file__).read_text().splitlines()
    for rank in range(2):
        number = next(i for i, line in enumerate(lines, 1) if line.endswith(f"# hanging line of rank {rank}"))
        assert f'test_harness.py", line {number} in _hang' in report.stacks[rank]
        assert report.stacks[rank].count("most recent call first") >= 2
        assert f"rank {rank} of 2 was still in the test" in report.text


def _miss_finalize() -> None:
    if _rank() == 0:
        time.sleep(LONG_S)


@pytest.mark.slow
@pytest.mark.any_mpi
def test_hang_of_the_others_in_finalize_is_noticed() -> None:
    report = run_function(2, _miss_finalize, timeout=HANG_S)
    assert report.timed_out
    assert "rank 1 of 2 had returned from the test" in report.text
    assert "_finalize" in report.stacks[1]


def _exit_with_3() -> None:
    _rank()
    sys.exit(3)


def _vanish_with_3() -> None:
    if _rank() == 1:
        os._exit(3)


def _killed() -> None:
    if _rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("end", [_vanish_with_3, _killed])
def test_dead_rank_is_noticed(end: object) -> None:
    report = run_function(2, end)  # type: ignore[arg-type]
    assert report.outcome == "failed"
    assert "rank 1 of 2 died without a result" in report.text
    assert report.returncode != 0
    assert not report.timed_out


def test_sys_exit_is_a_failure() -> None:
    report = run_function(2, _exit_with_3)
    assert report.outcome == "failed"
    assert "SystemExit: 3" in report.text


def _skip_on_rank_0() -> None:
    if _rank() == 0:
        pytest.skip("alone")


def test_skip_by_some_ranks_only_is_a_failure() -> None:
    report = run_function(2, _skip_on_rank_0)
    assert report.outcome == "failed"
    assert "only ranks [0] of 2 skipped" in report.text


def _leave_a_child() -> None:
    command = [sys.executable, "-c", f"import time; time.sleep({LONG_S})"]
    # With the rank's own stdout it would keep mpiexec waiting for the end of the output.
    quiet = subprocess.DEVNULL
    child = subprocess.Popen(command, start_new_session=True, stdout=quiet, stderr=quiet)
    print("child", child.pid, flush=True)
    child.returncode = 0  # leave it running without a ResourceWarning


def test_nothing_survives_the_job() -> None:
    report = run_function(1, _leave_a_child)
    assert report.outcome == "passed", report.text
    assert not runs(int(report.output.split()[1]))


def test_run_mpi_returns_code_and_output(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    # One write per line: ranks share the pipe, and print() may write in pieces.
    script.write_text("import os\nfrom mpi4py import MPI\nos.write(1, b'size %d\\n' % MPI.COMM_WORLD.size)\n")
    run = run_mpi(2, [sys.executable, str(script)])
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == ["size 2"] * 2


@pytest.mark.slow
@pytest.mark.any_mpi
def test_run_mpi_shows_stacks_of_a_hang(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from mpi4py import MPI\nimport time\ndef stuck():\n    time.sleep(300)\nstuck()\n")
    run = run_mpi(2, [sys.executable, str(script)], timeout=HANG_S)
    assert run.timed_out
    assert run.stderr.count("line 4 in stuck") == 2
    assert run.seconds < LONG_S / 2


# -- cases that share a job -------------------------------------------------------------------------


def _print_pid() -> None:
    # One write: the ranks share the file.
    os.write(1, b"rank %d is %d\n" % (_rank(), os.getpid()))


def _pids(report: JobReport) -> list[str]:
    assert report.outcome == "passed", report.text
    return sorted(line for line in report.output.splitlines() if line.startswith("rank "))


def test_cases_of_one_rank_count_share_a_job(shared_jobs: SharedJobs) -> None:
    first = _pids(shared_jobs.run(2, _print_pid))
    assert len(first) == 2
    assert _pids(shared_jobs.run(2, _print_pid)) == first
    assert len(_pids(shared_jobs.run(3, _print_pid))) == 3
    assert _pids(shared_jobs.run(2, _print_pid, env={"PYHVD_CYCLE_TIME": "2"})) == first
    # MPI reads this one when the process starts.
    assert _pids(shared_jobs.run(2, _print_pid, env={"MPIR_CVAR_ANY": "1"})) != first


def test_a_failure_names_its_case_and_the_next_case_gets_a_fresh_job(shared_jobs: SharedJobs) -> None:
    before = _pids(shared_jobs.run(2, _print_pid))
    report = shared_jobs.run(2, _fail_on_rank_1)
    assert report.outcome == "failed"
    assert not report.timed_out
    assert "rank 1 of 2 failed:" in report.text
    assert "in _fail_on_rank_1" in report.text
    assert "number = 42" in report.text
    assert "is " + before[0].split()[-1] not in report.text, "output of the case before"
    assert not set(_pids(shared_jobs.run(2, _print_pid))) & set(before)


def test_a_hang_shows_all_stacks_and_the_next_case_gets_a_fresh_job(shared_jobs: SharedJobs) -> None:
    before = _pids(shared_jobs.run(2, _print_pid))
    _check_stacks(shared_jobs.run(2, _hang, timeout=HANG_S / 2))
    assert not set(_pids(shared_jobs.run(2, _print_pid))) & set(before)


def test_a_rank_that_dies_in_a_shared_job_is_noticed(shared_jobs: SharedJobs) -> None:
    report = shared_jobs.run(2, _killed)
    assert report.outcome == "failed"
    assert "rank 1 of 2 died without a result" in report.text
    assert len(_pids(shared_jobs.run(2, _print_pid))) == 2


def _change_everything(folder: str) -> None:
    import pyhvd as hvd

    hvd.init()
    os.environ["PYHVD_CYCLE_TIME"] = "7"
    os.environ.pop("HOME", None)
    os.chdir(folder)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    warnings.filterwarnings("ignore", message="left by a case")
    logger = logging.getLogger("pyhvd")
    logger.setLevel(logging.CRITICAL)
    logger.addHandler(logging.NullHandler())


def _find_nothing_changed(folder: str) -> None:
    import pyhvd as hvd

    assert not hvd.is_initialized()
    assert "PYHVD_CYCLE_TIME" not in os.environ
    assert os.environ.get("HOME") == HOME
    assert os.getcwd() != folder
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    assert "left by a case" not in str(warnings.filters)
    logger = logging.getLogger("pyhvd")
    assert logger.level != logging.CRITICAL
    assert not any(type(handler) is logging.NullHandler for handler in logger.handlers)


HOME = os.environ.get("HOME")


def test_a_case_leaves_nothing_to_the_next_one(shared_jobs: SharedJobs, tmp_path: Path) -> None:
    for case in (_print_pid, _change_everything, _find_nothing_changed):
        arguments = {} if case is _print_pid else {"folder": str(tmp_path)}
        report = shared_jobs.run(2, case, arguments)
        assert report.outcome == "passed", report.text


def _patch_pyhvd(monkeypatch: pytest.MonkeyPatch, undone: bool) -> None:
    from pyhvd.backends import host
    from pyhvd.transport.mpi import fabric

    assert host.FLAT > 1
    monkeypatch.setattr(host, "FLAT", 1)
    if not undone:
        fabric.LARGEST = 1


def test_patches_are_undone_or_reported(shared_jobs: SharedJobs, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        report = shared_jobs.run(1, _patch_pyhvd, {"monkeypatch": monkeypatch, "undone": True})
        assert report.outcome == "passed", report.text
    report = shared_jobs.run(1, _patch_pyhvd, {"monkeypatch": monkeypatch, "undone": False})
    assert report.outcome == "failed"
    assert "the test has left pyhvd.transport.mpi.fabric.LARGEST patched" in report.text


def _die_afterwards() -> None:
    _rank()
    threading.Timer(0.2, os._exit, (3,)).start()


def test_a_job_that_ends_between_its_cases_is_reported() -> None:
    jobs = SharedJobs()
    report = jobs.run(1, _die_afterwards)
    assert report.outcome == "passed", report.text
    until = time.monotonic() + 30
    while any(job.is_running() for job in jobs._jobs.values()) and time.monotonic() < until:
        time.sleep(0.02)
    assert len(_pids(jobs.run(1, _print_pid))) == 1
    with pytest.raises(AssertionError, match="after 1 cases"):
        jobs.close()


USER = """
import os, signal
from tests.mpi.harness import SharedJobs
from tests.mpi.test_harness import _print_pid

jobs = SharedJobs()
print(jobs.run(2, _print_pid).output, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_no_rank_outlives_a_killed_pytest() -> None:
    done = subprocess.run([sys.executable, "-c", USER], cwd=ROOT, capture_output=True, text=True, timeout=60)
    pids = [int(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("rank ")]
    assert len(pids) == 2, done.stderr
    wait_gone(pids)
