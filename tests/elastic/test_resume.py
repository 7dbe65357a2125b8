"""A job that is suspended, or lost with its launcher, goes on in a later run."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.elastic.jobs import Ended, check_finished, finish, start, wait_for_step
from tests.elastic.test_drain import agent_of
from tests.many_hosts import LOCAL

pytest.importorskip("fsspec")

_HOSTS = ("-H", "east:1,west:1", "--launch-agent", LOCAL, "-n", "2", "--min-np", "1")


def begin(folder: Path, *flags: str, first: int = 0) -> subprocess.Popen[str]:
    """Start a run, and wait until it has taken steps."""
    resume = ("--elastic-store", "store", "--elastic-resume", "resume")
    job = start(folder, flags=[*_HOSTS, *resume, *flags], env={"STEP_S": "0.08"})
    wait_for_step(job, folder, 3, generation=first)
    return job


def check_suspended(ended: Ended, why: str) -> int:
    """Check how a run has ended; return the commit from which the next one goes on."""
    assert ended.code == os.EX_TEMPFAIL, ended
    assert any(line.startswith(f"pyhvd: {why}") for line in ended.err.splitlines()), ended
    told, _, commit = ended.err.splitlines()[-1].rpartition(" ")
    assert told.startswith("pyhvd: the job is suspended: the next run with --elastic-resume /"), ended
    return int(commit)


def test_sigterm_suspends_a_job_without_loss(tmp_path: Path) -> None:
    """Only the last commit is stored; the next run takes each step that is left, and leaves nothing."""
    job = begin(tmp_path, "--elastic-store-every", "1000")
    job.terminate()
    commit = check_suspended(finish(job, tmp_path), "the launcher got SIGTERM")
    assert (tmp_path / "resume").stat().st_mode & 0o777 == 0o600
    ended = finish(begin(tmp_path, first=1), tmp_path)
    check_finished(ended)
    assert [int(line.words[0]) for line in ended.of("begin")] == [0, commit]
    assert [int(line.words[0]) for line in ended.of("step") if line.generation == 1] == list(
        range(commit + 1, 41)
    )
    assert "pyhvd: generation 1: 2 ranks on 2 hosts: the job is resumed" in ended.err.splitlines(), ended
    assert list((tmp_path / "store").iterdir()) == []
    assert not (tmp_path / "resume").exists()


def test_a_job_whose_hosts_are_all_drained_is_suspended(tmp_path: Path) -> None:
    job = begin(tmp_path)
    for host in ("east", "west"):
        os.kill(agent_of(job, host), signal.SIGTERM)
    assert check_suspended(finish(job, tmp_path), "host west is drained") >= 3


def test_the_run_after_a_lost_launcher_goes_on_from_the_store(tmp_path: Path) -> None:
    job = begin(tmp_path)
    job.kill()
    finish(job, tmp_path)
    ended = finish(begin(tmp_path, first=1), tmp_path)
    assert ended.code == 0, ended
    begun = [int(line.words[0]) for line in ended.of("begin")]
    assert begun[1] > 0, ended
    assert ended.wrong_values() == []
