"""The harness itself: what it must notice, and what it must show."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.mpi.harness import on_ranks, run_function, run_mpi


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


def test_skip_by_all_ranks_is_a_skip() -> None:
    with pytest.raises(pytest.skip.Exception, match="no such device"):
        _skip_everywhere(nranks=2)


def _rank() -> int:
    from mpi4py import MPI

    rank: int = MPI.COMM_WORLD.rank
    return rank


def _fail_on_rank_1() -> None:
    number = 41 + _rank()
    if _rank() == 1:
        assert number == 0, "the reason"
    time.sleep(60)


def test_failing_rank_is_named_and_ends_the_job() -> None:
    report = run_function(2, _fail_on_rank_1, timeout=20)
    assert report.outcome == "failed"
    assert report.seconds < 10
    assert "rank 1 of 2 failed:" in report.text
    assert 'assert number == 0, "the reason"' in report.text
    assert "number = 42" in report.text
    assert "rank 0 of 2 was stopped" in report.text


def _fail_before_mpi() -> None:
    if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
        raise ValueError("too early")
    time.sleep(60)


def test_failure_before_mpi_init_ends_the_job() -> None:
    report = run_function(2, _fail_before_mpi, timeout=20)
    assert report.seconds < 10
    assert "ValueError: too early" in report.text


def _hang() -> None:
    helper = threading.Thread(target=time.sleep, args=(60,), daemon=True)
    helper.start()
    if _rank() == 0:
        time.sleep(60)  # hanging line of rank 0
    threading.Event().wait()  # hanging line of rank 1


def test_hang_shows_all_stacks_within_the_timeout() -> None:
    report = run_function(2, _hang, timeout=6)
    assert report.outcome == "failed"
    assert report.timed_out
    assert report.seconds < 10
    lines = Path(__file__).read_text().splitlines()
    for rank in range(2):
        number = next(i for i, line in enumerate(lines, 1) if line.endswith(f"# hanging line of rank {rank}"))
        assert f'test_harness.py", line {number} in _hang' in report.stacks[rank]
        assert report.stacks[rank].count("most recent call first") >= 2
        assert f"rank {rank} of 2 was still in the test" in report.text


def _miss_finalize() -> None:
    if _rank() == 0:
        time.sleep(60)


def test_hang_of_the_others_in_finalize_is_noticed() -> None:
    report = run_function(2, _miss_finalize, timeout=6)
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
    report = run_function(2, end, timeout=20)  # type: ignore[arg-type]
    assert report.outcome == "failed"
    assert "rank 1 of 2 died without a result" in report.text
    assert report.returncode != 0
    assert report.seconds < 10


def test_sys_exit_is_a_failure() -> None:
    report = run_function(2, _exit_with_3, timeout=20)
    assert report.outcome == "failed"
    assert "SystemExit: 3" in report.text


def _skip_on_rank_0() -> None:
    if _rank() == 0:
        pytest.skip("alone")


def test_skip_by_some_ranks_only_is_a_failure() -> None:
    report = run_function(2, _skip_on_rank_0, timeout=20)
    assert report.outcome == "failed"
    assert "only ranks [0] of 2 skipped" in report.text


def _leave_a_child() -> None:
    import subprocess

    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    # With the rank's own stdout it would keep mpiexec waiting for the end of the output.
    quiet = subprocess.DEVNULL
    child = subprocess.Popen(command, start_new_session=True, stdout=quiet, stderr=quiet)
    print("child", child.pid, flush=True)
    child.returncode = 0  # leave it running without a ResourceWarning


def test_nothing_survives_the_job() -> None:
    report = run_function(1, _leave_a_child, timeout=20)
    assert report.outcome == "passed", report.text
    status = Path("/proc", report.output.split()[1], "status")
    # Gone, or killed and not yet reaped by whoever inherited it.
    assert not status.exists() or "State:\tZ" in status.read_text()


def test_run_mpi_returns_code_and_output(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    # One write per line: ranks share the pipe, and print() may write in pieces.
    script.write_text("import os\nfrom mpi4py import MPI\nos.write(1, b'size %d\\n' % MPI.COMM_WORLD.size)\n")
    run = run_mpi(2, [sys.executable, str(script)])
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == ["size 2"] * 2


def test_run_mpi_shows_stacks_of_a_hang(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from mpi4py import MPI\nimport time\ndef stuck():\n    time.sleep(60)\nstuck()\n")
    run = run_mpi(2, [sys.executable, str(script)], timeout=5)
    assert run.timed_out
    assert run.stderr.count("line 4 in stuck") == 2
    assert run.seconds < 10
