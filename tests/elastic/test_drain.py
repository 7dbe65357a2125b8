"""Hosts that shall go: no step is lost. The hosts are this one, under several names."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.elastic.jobs import Ended, check_finished, finish, start, wait_for_step
from tests.many_hosts import LOCAL
from tests.waiting import wait_until

_HOSTS = ("-H", "east:1,west:1", "--launch-agent", LOCAL)
_FLAGS = (*_HOSTS, "-n", "2", "--min-np", "1")
_SLOWLY = {"STEP_S": "0.08"}
_IN_SLURM = {**_SLOWLY, "SLURM_JOB_ID": "4711"}


def agent_of(job: subprocess.Popen[str], host: str) -> int:
    """Return the process of a host's agent, by its variable and its command."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables, words = path.read_bytes(), path.with_name("cmdline").read_bytes()
            parent = int(path.with_name("stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        wanted = f"PYHVD_HOST_SALT={host}".encode() in variables.split(b"\0")
        if wanted and b"pyhvd.job.agent.host_agent" in words.split(b"\0") and is_below(parent, job.pid):
            return int(path.parent.name)
    raise AssertionError(f"no agent of host {host}")


def processes() -> list[int]:
    """Return the processes of this machine."""
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def is_below(pid: int, ancestor: int) -> bool:
    """Return whether a process is a descendant of another one, or that one."""
    with contextlib.suppress(OSError):  # one of them has ended
        while pid > 1:
            if pid == ancestor:
                return True
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return False


def check_drained(ended: Ended, host: str, why: str) -> None:
    """Check that one host has left, and no step was taken twice."""
    check_finished(ended)
    assert [line.words[3] for line in ended.of("begin")] == ["2", "1"], ended
    left_at = int(ended.of("begin")[1].words[0])  # in its commit, so before the line of the step
    steps = [int(line.words[0]) for line in ended.of("step")]
    assert steps == [step for step in range(1, 41) if step != left_at], ended
    assert f"pyhvd: host {host} is drained: {why}" in ended.err.splitlines(), ended


def test_sigterm_to_an_agent_drains_its_host(tmp_path: Path) -> None:
    """Here to that of rank 0, whose host is the oldest: its commit goes to the other host."""
    job = start(tmp_path, flags=_FLAGS, env=_SLOWLY)
    wait_for_step(job, tmp_path, 3)
    agent = agent_of(job, "east")
    os.kill(agent, signal.SIGTERM)
    wait_for_step(job, tmp_path, 5, generation=1)
    wait_until(lambda: not Path(f"/proc/{agent}").exists())
    check_drained(finish(job, tmp_path), "east", "its agent got SIGTERM")


def test_sigterm_to_every_process_of_a_slurm_step_drains_its_host(tmp_path: Path) -> None:
    """As `sbatch --signal=TERM@90` sends it: guardians and ranks go on until the ranks may leave."""
    job = start(tmp_path, flags=_FLAGS, env=_IN_SLURM)
    wait_for_step(job, tmp_path, 3)
    agent = agent_of(job, "west")
    for pid in [pid for pid in processes() if is_below(pid, agent)]:
        os.kill(pid, signal.SIGTERM)
    check_drained(finish(job, tmp_path), "west", "its agent got SIGTERM")


def test_in_slurm_too_sigterm_to_the_launcher_ends_the_job(tmp_path: Path) -> None:
    job = start(tmp_path, flags=_FLAGS, env=_IN_SLURM)
    wait_for_step(job, tmp_path, 3)
    job.terminate()
    ended = finish(job, tmp_path)
    assert ended.code == 143, ended
    assert ended.err.splitlines()[-1] == "pyhvd: ended by SIGTERM"


def test_a_preemption_command_that_succeeds_drains_its_host(tmp_path: Path) -> None:
    """On the other host it cannot be run."""
    command = f"if test $PYHVD_HOST_SALT = west; then test -e {tmp_path}/taken; else /nowhere; fi"
    job = start(tmp_path, flags=[*_FLAGS, "--preemption-command", command], env=_SLOWLY)
    wait_for_step(job, tmp_path, 3)
    (tmp_path / "taken").touch()
    ended = finish(job, tmp_path)
    check_drained(ended, "west", "the preemption command has succeeded")
    told = f"pyhvd: host east: the preemption command cannot be run (code 127): {command}"
    assert ended.err.splitlines().count(told) == 1, ended


def test_a_user_drains_a_host_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # other jobs of this user may run

    def drain(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pyhvd", "elastic", "drain", *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    nothing = drain("west")
    assert (nothing.returncode, nothing.stdout) == (1, "")
    assert nothing.stderr == (
        "pyhvd elastic: no such elastic job of yours runs here: use the host on which pyhvdrun runs\n"
    )
    job = start(tmp_path, flags=_FLAGS, env=_SLOWLY)
    wait_for_step(job, tmp_path, 3)
    wrong = drain("north")
    assert wrong.returncode == 1
    assert wrong.stderr == "pyhvd elastic: host north is none of the job's hosts: east, west\n"
    done = drain("west", "--job", str(job.pid))
    assert done.stdout == "host west is drained: its ranks leave at their next commit or check\n", done
    ended = finish(job, tmp_path)
    check_drained(ended, "west", "the user has asked for it")
    assert not list(tmp_path.glob("pyhvd/*.socket"))


def test_in_a_job_that_is_not_elastic_sigterm_ends_the_agent(tmp_path: Path) -> None:
    job = start(tmp_path, flags=_HOSTS, env=_SLOWLY)
    wait_for_step(job, tmp_path, 3)
    os.kill(agent_of(job, "west"), signal.SIGTERM)
    ended = finish(job, tmp_path)
    assert ended.code == 1, ended
    assert "west" in ended.err.splitlines()[-1], ended
