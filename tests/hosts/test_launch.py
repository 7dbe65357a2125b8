"""pyhvd.launch and pyhvd.Hosts on two simulated hosts over ssh."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyhvd.job.connections import DRIVER_SILENT_S
from tests.hosts import test_many_hosts as many_hosts
from tests.hosts.sshd import Site
from tests.many_hosts import Ended, end_of

pytestmark = pytest.mark.timeout(120)
site = many_hosts.site

_SILENT_S = 5.0
_AGENT_ENDS_S = 25.0
_BEGIN = """
import os, sys, time
import numpy as np, pyhvd as hvd

def rank():
    return int(os.environ["HOROVOD_RANK"])

def reduce(size=4):
    hvd.init()
    return hvd.rank(), os.uname().nodename, float(hvd.allreduce(np.ones(size), op=hvd.Sum)[0])

HOSTS = "east:2,west:2"
"""
_RESULTS = [(number, "east" if number < 2 else "west", 4.0) for number in range(4)]


class Programs:
    """Runs programs on the head, which call launch."""

    def __init__(self, site: Site, folder: Path) -> None:
        self._site = site
        self._folder = folder

    def start(self, program: str) -> subprocess.Popen[str]:
        (self._folder / "program.py").write_text(_BEGIN + textwrap.dedent(program))
        inside = ["env", f"--chdir={self._folder}", sys.executable, "program.py"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", **self._site.sshd.variables}
        return subprocess.Popen(
            self._site.bed.head.command(inside),
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, program: str) -> Ended:
        return end_of(self.start(program))


@pytest.fixture
def programs(site: Site, tmp_path: Path) -> Iterator[Programs]:
    yield Programs(site, tmp_path)
    assert site.wait_until_gone(_AGENT_ENDS_S) == []


def test_a_function_on_two_hosts(programs: Programs) -> None:
    ended = programs.run("print(hvd.launch(reduce, hosts=HOSTS))")
    assert (ended.code, ended.out, ended.err) == (0, f"{_RESULTS}\n", "")


def test_a_rank_that_raises(programs: Programs) -> None:
    ended = programs.run("""
        def fail():
            reduce()
            if rank() == 2:
                raise LookupError("not here")
            time.sleep(1000)

        try:
            hvd.launch(fail, hosts=HOSTS)
        except hvd.RankFailedError as error:
            print(error)
            print(error.rank, error.host, repr(error.__cause__))
    """)
    assert (ended.code, ended.err) == (0, ""), ended
    assert ended.out.splitlines() == [
        "rank 2 of 4 on host west failed: LookupError: not here",
        "2 west LookupError('not here')",
    ]


def test_a_rank_that_ends_before_init(programs: Programs) -> None:
    """Within 2 s of its end; the ranks of both hosts wait for it in MPI_Init."""
    ended = programs.run("""
        def work(path):
            if rank() == 3:
                open(path, "w").close()
            else:
                hvd.init()

        try:
            hvd.launch(work, ["when"], hosts=HOSTS)
        except hvd.RankFailedError as exc:
            print(exc, exc.rank, exc.host, time.time() - os.stat("when").st_mtime < 4, sep="|")
    """)
    text, *others = ended.out.rstrip().split("|")
    assert text.startswith("rank 3 of 4 on host west ended without calling init(), and rank"), ended
    assert text.endswith(" for it there: every rank must call pyhvd.init(), or none")
    assert others == ["3", "west", "True"]
    assert ended.err == ""


def test_the_second_call_has_the_same_agents(programs: Programs) -> None:
    ended = programs.run("""
        def agent():
            # The parent of this rank is its guardian, whose parent is the agent.
            with open(f"/proc/{os.getppid()}/stat") as file:
                return os.uname().nodename, int(file.read().rpartition(")")[2].split()[1])

        with hvd.Hosts(HOSTS) as hosts:
            first = hosts.launch(agent)
            assert [hosts.launch(agent) for _ in range(4)] == [first] * 4
            assert len(set(first)) == 2
            assert len(hosts.launch(reduce)) == 4
    """)
    assert (ended.code, ended.err) == (0, ""), ended


def test_a_result_of_64_mib_over_ssh(programs: Programs) -> None:
    ended = programs.run("""
        results = hvd.launch(lambda: np.full(1 << 23, rank()), hosts=HOSTS)
        print([int(each.min()) for each in results], [int(each.max()) for each in results])
    """)
    assert (ended.code, ended.out, ended.err) == (0, "[0, 1, 2, 3] [0, 1, 2, 3]\n", "")


def test_hosts_that_cannot_be_reached(programs: Programs) -> None:
    ended = programs.run("""
        try:
            hvd.launch(rank, hosts="east:1,nowhere.invalid:1", start_timeout=2)
        except hvd.LaunchError as error:
            print(error)
    """)
    assert ended.code == 0, ended
    assert "host nowhere.invalid: ssh: Could not resolve hostname nowhere.invalid" in ended.out
    assert "(start_timeout, ssh_port)" in ended.out


_KEEP = """
with hvd.Hosts(HOSTS) as hosts:
    hosts.launch(rank)
    print("kept", flush=True)
    input()
    print(hosts.launch(reduce), flush=True)
"""


@pytest.mark.any_mpi  # between calls there are agents alone
def test_a_host_that_is_cut_off_between_two_calls(site: Site, programs: Programs) -> None:
    """Its agent is given up; the next call starts another."""
    job = programs.start(_KEEP)
    assert job.stdout is not None
    assert job.stdout.readline() == "kept\n"
    site.bed.cut_off(site.west)
    try:
        time.sleep(_SILENT_S + 1.5)  # and a turn
    finally:
        site.bed.rejoin(site.west)
    _go_on(job)


@pytest.mark.any_mpi  # between calls there are agents alone
def test_a_caller_that_is_stopped_between_two_calls_has_the_same_agents(
    site: Site, programs: Programs
) -> None:
    job = programs.start(_KEEP)
    assert job.stdout is not None
    assert job.stdout.readline() == "kept\n"
    hosts = site.bed.hosts.values()
    before = [site.running(host, "pyhvd.job.agent.host_agent") for host in hosts]
    assert all(before)
    job.send_signal(signal.SIGSTOP)
    time.sleep(DRIVER_SILENT_S + 4.0)
    job.send_signal(signal.SIGCONT)
    time.sleep(2.0)  # the thread that keeps the agents judges them
    assert [site.running(host, "pyhvd.job.agent.host_agent") for host in hosts] == before
    _go_on(job)


def test_an_agent_that_is_killed_between_two_calls(site: Site, programs: Programs) -> None:
    job = programs.start(_KEEP)
    assert job.stdout is not None
    assert job.stdout.readline() == "kept\n"
    for agent in site.running(site.west, "pyhvd.job.agent.host_agent"):
        os.kill(agent, 9)
    _go_on(job)


def _go_on(job: subprocess.Popen[str]) -> None:
    out, err = job.communicate("\n", timeout=60)
    assert (job.returncode, out, err) == (0, f"{_RESULTS}\n", "")


@pytest.mark.any_mpi  # between calls there are agents alone
def test_a_caller_that_is_killed_between_two_calls(site: Site, programs: Programs) -> None:
    job = programs.start(_KEEP)
    assert job.stdout is not None
    assert job.stdout.readline() == "kept\n"
    job.kill()
    end_of(job)
    assert site.wait_until_gone(_SILENT_S) == []


def test_an_agent_that_is_killed_during_a_call(site: Site, programs: Programs) -> None:
    job = programs.start("""
        def wait():
            print("up", flush=True)
            time.sleep(1000)

        try:
            hvd.launch(wait, hosts=HOSTS)
        except hvd.RankFailedError as error:
            print(error.rank, error.host, error)
    """)
    assert job.stdout is not None
    for _ in range(4):
        assert job.stdout.readline().endswith("up\n")
    begin = time.monotonic()
    for agent in site.running(site.west, "pyhvd.job.agent.host_agent"):
        os.kill(agent, 9)
    ended = end_of(job)
    assert ended.out.startswith("2 west rank 2 of 4 on host west is lost: its agent is gone"), ended
    assert time.monotonic() - begin < 4
