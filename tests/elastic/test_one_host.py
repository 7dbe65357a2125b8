"""Faults of ranks on one host: training goes on from the last commit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.elastic.jobs import Ended, check_finished, run


def check_restarts(ended: Ended, more: int = 1) -> None:
    check_finished(ended)
    assert max(line.generation for line in ended.lines) == more, ended
    assert len(ended.of("killed")) >= more, ended


def test_without_a_fault_there_is_one_generation(tmp_path: Path) -> None:
    ended = run(tmp_path)
    check_finished(ended)
    assert ended.generations == 1
    assert ended.err == ""


@pytest.mark.parametrize("point", ["import", "handshake", "init", "sync", "func", "exchange", "committed"])
def test_a_killed_rank_is_started_again(point: str, tmp_path: Path) -> None:
    """Rank 0, then another one, and then all; generations that commit are between those that do not."""
    before_commit = point in ("import", "handshake", "init", "sync")
    faults = [point, "func", point, "func", point] if before_commit else [point] * 3
    ranks = ["0", "1", "2", "3", "all"] if before_commit else ["0", "2", "all"]
    ended = run(tmp_path, *(f"{each}:{number}:{ranks[number]}" for number, each in enumerate(faults)))
    check_restarts(ended, len(faults))


@pytest.mark.parametrize("point", ["copying", "before_seal", "after_seal"])
def test_a_rank_that_is_killed_in_a_commit(point: str, tmp_path: Path) -> None:
    """The commit counts if it was sealed, and then alone."""
    ended = run(tmp_path, f"{point}:0:0")
    check_restarts(ended)
    assert ended.of("begin")[1].words[0] == ("4" if point == "after_seal" else "3"), ended


@pytest.mark.parametrize("after_ms", [5, 20, 40])
def test_a_rank_that_is_killed_while_it_connects_with_the_others(after_ms: int, tmp_path: Path) -> None:
    """It may be before that, or after it."""
    check_restarts(run(tmp_path, f"wire-up:0:1:{after_ms}", f"wire-up:1:2:{after_ms}"), 2)


def test_ranks_that_die_together_leave_no_shared_memory(tmp_path: Path) -> None:
    """Here all have opened MPICH's file, and none has removed its name."""
    ended = run(tmp_path, "handshake:0:all")
    check_restarts(ended)
    made = {path for line in ended.of("killed") for path in line.words[3:]}
    assert any("mpich_shm" in path for path in made)
    assert [path for path in made if os.path.exists(path)] == []


def test_failure_callbacks_have_time(tmp_path: Path) -> None:
    ended = run(tmp_path, "func:0:2", env={"CALLBACKS": "1"})
    check_restarts(ended)
    assert sorted(ended.out.splitlines()) == [f"[{rank}]<stdout>:lost others" for rank in (0, 1, 3)]


def test_ranks_die_in_the_restart_too(tmp_path: Path) -> None:
    """Between three failures in a row there must be a new commit."""
    faults = ["func:0:1", "import:1:3", "copying:2:0", "callback:3:0", "func:4:2", "sync:5:0"]
    check_restarts(run(tmp_path, *faults), len(faults))


def test_a_rank_that_hangs_is_reported_and_ends_its_generation_if_asked(tmp_path: Path) -> None:
    times = {"PYHVD_STALL_CHECK_TIME_SECONDS": "1", "PYHVD_STALL_SHUTDOWN_TIME_SECONDS": "2"}
    ended = run(tmp_path, "func:0:2:hang", env=times)
    check_finished(ended)
    assert ended.generations == 2, ended
    assert "'gradient': not submitted by rank 2, submitted by ranks 0-1, 3" in ended.err, ended
    assert "failed: pyhvd.errors.StallError: " in ended.err.splitlines()[-1], ended


def test_a_rank_that_dies_after_its_return(tmp_path: Path) -> None:
    """The others may have returned too; then all of them come to the end twice, with the same values."""
    ended = run(tmp_path, "returned:0:1")
    assert ended.code == 0, ended
    ended.check_values()
    assert ended.of("end")[-1].words[:2] == ["40", "820"]
    assert ended.of("begin")[-1].words[0] == "40"


def test_a_rank_that_always_dies_ends_the_job(tmp_path: Path) -> None:
    ended = run(tmp_path, *(f"init:{generation}:2" for generation in range(5)))
    assert ended.code == 137, ended
    assert len(ended.of("killed")) == 3
    assert "rank 2 of 4" in ended.err.splitlines()[-1], ended
    assert "SIGKILL" in ended.err.splitlines()[-1], ended
