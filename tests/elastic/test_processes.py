"""Faults from outside, of elastic jobs on this host: processes are killed and stopped, hosts flap."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pyhvd.job.errors import LaunchError
from pyhvd.job.mpi.flavour import find_library
from pyhvd.job.mpi.rank_env import MPICH
from pyhvd.job.process.segments import segments_of
from tests.elastic.jobs import ROOT, check_finished
from tests.elastic.running import ONE_HOST, TWO_NAMES, Ground, RunningJob, kill
from tests.elastic.trials import try_job
from tests.many_hosts import LOCAL

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="agents need Linux")

_PATIENCE_S = 30.0
_STEP_S = 0.05
Start = Callable[..., RunningJob]


@pytest.fixture(scope="module", autouse=True)
def mpich() -> None:
    try:
        family = find_library().family
    except LaunchError as exc:
        pytest.skip(str(exc))
    if family != MPICH:
        pytest.skip("elastic jobs need MPICH or Intel MPI")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A function that starts a job, and returns when some steps are committed."""
    jobs: list[RunningJob] = []

    def begin(*faults: str, ground: Ground = ONE_HOST, steps: int = 3, step_s: float = _STEP_S) -> RunningJob:
        jobs.append(ground.start(tmp_path, faults, step_s))
        assert jobs[-1].wait(lambda: len(jobs[-1].steps()) >= steps, _PATIENCE_S), jobs[-1].lines
        return jobs[-1]

    yield begin
    left = [line for job in jobs for line in job.left(1.0)]
    for job in jobs:
        job.kill()
    assert left == []


def wait_for_generation(job: RunningJob, number: int) -> None:
    assert job.wait(lambda: job.steps(generation=number), _PATIENCE_S), job.lines


def test_a_killed_zygote_is_replaced_by_commands(start: Start) -> None:
    """Those ranks that commands have started stay; then ranks that it has forked end with it, or stay."""
    job = start(step_s=0.1, steps=15)
    kill(job.zygotes())
    kill(job.ranks()[1:2])
    wait_for_generation(job, 1)
    ended = job.finish(_PATIENCE_S)
    check_finished(ended)
    assert ended.generations == 2


def test_ranks_go_on_without_the_zygote_that_has_forked_them(start: Start) -> None:
    """They end with it, or stay; the job goes on."""
    job = start(step_s=0.1, steps=15)
    kill(job.ranks()[1:2])
    wait_for_generation(job, 1)
    kill(job.zygotes())
    check_finished(job.finish(_PATIENCE_S))


def test_ranks_of_a_host_whose_agent_is_killed_are_left_out(start: Start) -> None:
    job = start(ground=TWO_NAMES)
    kill(job.agents("west"))
    wait_for_generation(job, 1)
    ended = job.finish(_PATIENCE_S)
    check_finished(ended)
    assert [line.words[3] for line in ended.of("begin")][:2] == ["4", "2"]
    assert "host west" in ended.err


def test_two_ranks_at_once_are_one_restart(start: Start) -> None:
    check_one_restart(start(), lambda job: job.ranks()[1:3])


def test_all_ranks_of_a_host_are_one_restart(start: Start) -> None:
    check_one_restart(start(ground=TWO_NAMES), lambda job: job.ranks("west"))


def test_ranks_that_are_killed_together_leave_no_shared_memory(start: Start) -> None:
    """No guardian can ask them which files they had; the files have no names any more."""
    job = start()
    assert [segments_of(rank) for rank in job.ranks()] == [set()] * 4
    check_finished(job.finish(_PATIENCE_S))


def test_a_rank_on_each_of_two_hosts_is_one_restart(start: Start) -> None:
    check_one_restart(start(ground=TWO_NAMES), lambda job: [job.ranks("east")[1], job.ranks("west")[0]])


def check_one_restart(job: RunningJob, victims: Callable[[RunningJob], list[int]]) -> None:
    kill(victims(job))
    ended = job.finish(_PATIENCE_S)
    check_finished(ended)
    assert ended.generations == 2, ended
    assert [line.words[3] for line in ended.of("begin")] == ["4", "4"]


def test_another_host_may_have_sealed_the_commit(start: Start) -> None:
    ended = start("before_seal:0:0:late", ground=TWO_NAMES).finish(_PATIENCE_S)
    check_finished(ended)
    assert [line.words[0] for line in ended.of("begin")] == ["0", "4"]


def test_the_host_with_the_newest_commit_is_lost(start: Start) -> None:
    """The job goes on from the commit before it, and says so."""
    job = start("copying:0:2:hang", ground=TWO_NAMES)
    assert job.wait(lambda: len(job.steps()) == 4, _PATIENCE_S), job.lines
    time.sleep(2.0)  # its agent tells the launcher of the commit
    kill(job.agents("east"))
    ended = job.finish(_PATIENCE_S)
    check_finished(ended)
    # The host that was lost may come back before the end.
    assert [line.words[0] for line in ended.of("begin")][:2] == ["0", "3"]
    assert "every host that held commit 4 is gone: ranks go on from commit 3" in ended.err


@pytest.mark.parametrize("fault", ["leaving:0:0", "leaving:0:1", "exit:0:0", "exit:0:1"])
def test_a_rank_is_killed_while_it_makes_room(fault: str, start: Start, tmp_path: Path) -> None:
    """The commit counts, and the next generation has the new host."""
    hosts, discover = tmp_path / "hosts", tmp_path / "discover"
    hosts.write_text("east:2\n")
    discover.write_text("#!/bin/sh\ncat hosts")
    discover.chmod(0o700)
    flags = ("--min-np", "2", "--launch-agent", LOCAL, "--host-discovery-script", str(discover))
    job = start(fault, ground=replace(TWO_NAMES, flags=flags), step_s=0.1)
    hosts.write_text("east:2\nwest:2\n")
    ended = job.finish(_PATIENCE_S)
    check_finished(ended)
    assert [line.generation for line in ended.of("begin")] == [0, 1], ended
    assert [line.words[3] for line in ended.of("begin")] == ["2", "4"], ended
    assert len(ended.of("killed")) == 1, ended


def test_a_stopped_launcher_is_waited_for(start: Start) -> None:
    job = start(ground=TWO_NAMES)
    job.launcher.send_signal(signal.SIGSTOP)
    time.sleep(10.0)
    job.launcher.send_signal(signal.SIGCONT)
    ended = job.finish(_PATIENCE_S)
    check_finished(ended)
    assert ended.generations == 1, ended


def test_a_stopped_rank_is_waited_for(start: Start) -> None:
    job = start()
    rank = job.ranks()[2:3]
    kill(rank, signal.SIGSTOP)
    time.sleep(3.0)
    kill(rank, signal.SIGCONT)
    ended = job.finish(_PATIENCE_S)
    check_finished(ended)
    assert ended.generations == 1


def test_the_same_exception_each_time_is_shown_once(start: Start) -> None:
    job = start(*(f"init:{generation}:2:raise" for generation in range(5)), steps=0)
    ended = job.finish(_PATIENCE_S)
    assert ended.code == 1, ended
    assert len(ended.of("raised")) == 3
    assert ended.err.splitlines()[-1] == "LookupError: at point init"
    assert ended.err.count("Traceback") == 1, ended.err


@pytest.mark.parametrize("in_a_restart", [False, True])
@pytest.mark.parametrize(
    ("numbers", "code"),
    [
        ([signal.SIGKILL], -signal.SIGKILL),
        ([signal.SIGINT], 130),
        ([signal.SIGINT, signal.SIGINT], 130),
        ([signal.SIGTERM], 143),
    ],
    ids=["launcher killed", "Ctrl-C", "Ctrl-C twice", "SIGTERM"],
)
def test_signals_end_the_job(
    numbers: list[signal.Signals], code: int, in_a_restart: bool, start: Start
) -> None:
    job = start()
    if in_a_restart:
        kill(job.ranks()[:1])
        time.sleep(0.1)
    for number in numbers:
        job.launcher.send_signal(number)
        time.sleep(0.05)
    # A rank that is just being started may miss the signal: it is killed 5 s later.
    assert job.finish(8.0).code == code


def test_ctrl_c_while_the_last_ranks_of_a_generation_end(start: Start) -> None:
    """The launcher waits for an agent that is stopped, and serves no ranks."""
    job = start(ground=TWO_NAMES)
    agent = job.agents("west")
    kill(agent, signal.SIGSTOP)
    kill(job.ranks("east")[:1])
    time.sleep(1.5)
    job.launcher.send_signal(signal.SIGINT)
    time.sleep(0.2)
    kill(agent, signal.SIGCONT)
    ended = job.finish(5.0)
    assert ended.code == 130, ended
    assert ended.err.splitlines()[-1] == "pyhvd: ended by SIGINT"


_FLAPS = """
if [ -e there ]; then rm there; echo west:2; else touch there; fi
echo east:4
"""
_GOOD_FIRST = """
echo run >> runs
[ "$(wc -l < runs)" -gt 2 ] || exec echo east:4
"""


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (_FLAPS, ""),
        (_GOOD_FIRST + "sleep 100", "has not ended"),
        (_GOOD_FIRST + "echo '?:x y'", "no host is taken away"),
        (_GOOD_FIRST + "exit 1", "the last good result holds"),
        (_GOOD_FIRST + "exit 0", "no host was found"),
    ],
    ids=["flaps", "hangs", "rubbish", "fails", "nothing"],
)
@pytest.mark.slow
def test_discovery_that_fails_restarts_nothing(script: str, says: str, start: Start, tmp_path: Path) -> None:
    discover = tmp_path / "discover"
    discover.write_text(f"#!/bin/sh\n{script}")
    discover.chmod(0o700)
    flags = ("--min-np", "4", "--launch-agent", LOCAL, "--host-discovery-script", str(discover))
    job = start(ground=replace(TWO_NAMES, flags=flags), step_s=0.4 if says == "has not ended" else 0.15)
    ended = job.finish(_PATIENCE_S)
    check_finished(ended)
    assert ended.generations == 1, ended
    assert says in ended.err


@pytest.mark.parametrize("ground", [ONE_HOST, TWO_NAMES], ids=["one host", "two"])
def test_random_faults(ground: Ground) -> None:
    """`make test-elastic-faults` makes many more."""
    trial = try_job(ground, seed=5, steps=120)
    assert (trial.wrong, trial.log) == ([], "")


_HARD = """
import sys
from pyhvd.job.machines import membership
from pyhvd.run.__main__ import main

membership._LEAVE_S = 0.5
sys.exit(main())
"""
_HANGS = """
import time
import pyhvd as hvd

hvd.init()


@hvd.elastic.run
def train(state):
    while state.step < 4:
        hvd.barrier()
        state.step += 1
        state.commit()
        if hvd.elastic.generation() == 0 and state.step == 2:
            print("hangs", flush=True)
            time.sleep(100)


state = hvd.elastic.ObjectState(step=0)
train(state)
print(f"end {state.step} of {hvd.size()}", flush=True)
"""


def test_ranks_that_do_not_leave_are_killed(tmp_path: Path) -> None:
    """A host is gone, and its ranks make no commit within the time to leave."""
    (tmp_path / "launcher.py").write_text(_HARD)
    (tmp_path / "program.py").write_text(_HANGS)
    (tmp_path / "hosts").write_text("east:2\nwest:2\n")
    discover = tmp_path / "discover"
    discover.write_text("#!/bin/sh\ncat hosts")
    discover.chmod(0o700)
    flags = ("-n", "4", "--min-np", "2", "--launch-agent", LOCAL, "--host-discovery-script", str(discover))
    job = subprocess.Popen(
        [sys.executable, "launcher.py", *flags, "program.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert job.stdout is not None
    said = [job.stdout.readline() for _ in range(4)]
    (tmp_path / "hosts").write_text("east:2\n")
    try:
        out, err = job.communicate(timeout=_PATIENCE_S)
    finally:
        job.kill()
    assert job.returncode == 0, (said, out, err)
    ends = [line.rpartition(":")[2].split()[-4:] for line in out.splitlines() if "end" in line]
    assert ends == [["end", "4", "of", "2"]] * 2, (out, err)
    assert "host west left" in err
