"""Commits outside of the hosts: every host that holds the state is lost, and the job goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.elastic.demo import ranks_of
from tests.elastic.jobs import Ended, check_finished, finish, run, start, wait_for_step
from tests.elastic.work import agent_of
from tests.many_hosts import LOCAL, Launcher

pytest.importorskip("fsspec")

_SPARE = ("-H", "east:1,west:1", "--launch-agent", LOCAL, "-n", "1", "--min-np", "1", "--max-np", "1")

_STORE_THAT_IS_A_FILE = """
import numpy as np, pyhvd as hvd

hvd.init()
state = hvd.elastic.ObjectState(step=0)

@hvd.elastic.run
def train(state):
    for durable in (False, True):
        hvd.allreduce(np.ones(4), name="first")
        state.step += 1
        try:
            state.commit(durable=durable)
        except hvd.elastic.StoreError as exc:
            print(f"rank {hvd.rank()}: {'Not a directory' in str(exc)}", flush=True)

train(state)
"""


def lose_all_holders(folder: Path, *flags: str, step: int = 5, env: Mapping[str, str] = {}) -> Ended:
    """Kill the agent of the only host that has had ranks; the other host is a spare."""
    job = start(folder, flags=[*_SPARE, *flags], env={"STEP_S": "0.05", **env})
    wait_for_step(job, folder, step)
    os.kill(agent_of(ranks_of(job.pid)[0]), signal.SIGKILL)
    return finish(job, folder)


def test_the_job_goes_on_from_the_store(tmp_path: Path) -> None:
    """No step that ranks have waited for is lost, and no file is left."""
    ended = lose_all_holders(tmp_path, "--elastic-store", "folder/store", env={"DURABLE": "1"})
    check_finished(ended)
    assert ended.generations == 2
    begun = int(ended.of("begin")[1].words[0])
    assert begun >= 5
    assert f"pyhvd: commit {begun} comes from the store" in ended.err.splitlines(), ended
    assert list((tmp_path / "folder/store").iterdir()) == []


def test_steps_since_the_last_stored_commit_are_taken_again(tmp_path: Path) -> None:
    flags = ("--elastic-store", f"file://{tmp_path}/store", "--elastic-store-every", "4")
    ended = lose_all_holders(tmp_path, *flags)
    assert ended.code == 0, ended
    begun = int(ended.of("begin")[1].words[0])
    assert begun % 4 == 0
    steps = [int(line.words[0]) for line in ended.of("step") if line.generation == 1]
    assert steps == list(range(begun + 1, 41)), ended
    assert float(ended.of("end")[0].words[1]) == sum(range(1, 41))


def test_without_a_stored_commit_the_job_ends(tmp_path: Path) -> None:
    flags = ("--elastic-store", f"{tmp_path}/store", "--elastic-store-every", "1000")
    ended = lose_all_holders(tmp_path, *flags, step=28)  # the launcher hears of commits with the beats
    assert ended.code == 1, ended
    last = ended.err.splitlines()[-1]
    assert last.startswith("pyhvd: every host that held commit "), ended
    assert last.endswith("and the store cannot provide it: the store has no commit of this job"), ended


def test_a_store_that_cannot_be_written_to(tmp_path: Path) -> None:
    """Each rank gets the error of the commit that waits; the launcher tells of the others."""
    (tmp_path / "file").touch()
    launcher = Launcher(tmp_path)
    script = launcher.script(_STORE_THAT_IS_A_FILE)
    flags = ("--min-np", "2", "--elastic-store", f"{tmp_path}/file/store")
    ended = launcher.run(*flags, script, hosts="h1:1,h2:1")
    assert ended.code == 0, ended
    said = sorted(line.partition(":")[2] for line in ended.out.splitlines())
    assert said == ["rank 0: True", "rank 1: True"], ended
    assert "pyhvd: host h1: commits are not stored: " in ended.err, ended


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("nosuch://folder", "nosuch://folder: cannot be opened: "),
        ("", "this job has no store: give pyhvdrun --elastic-store"),
    ],
)
def test_an_error_says_what_is_wrong_with_the_store(tmp_path: Path, url: str, told: str) -> None:
    flags = ["-n", "1", "--min-np", "1", *(["--elastic-store", url] if url else [])]
    ended = run(tmp_path, flags=flags, env={"DURABLE": "1"})
    assert ended.code == 1
    assert told in ended.err, ended
