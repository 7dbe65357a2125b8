"""pyhvdrun on two simulated hosts over ssh: training, and failures of Open MPI's parts.

Other failures are in test_job_faults.py.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts import sshd
from tests.hosts.job_faults import on_open_mpi
from tests.hosts.sshd import Site
from tests.many_hosts import PATIENCE_S, Launcher, end_of, start_waiting

pytestmark = pytest.mark.timeout(120)

_NAMES = ("east", "west")
_HOSTS = "east:2,west:2"
_GONE_S = 5.0


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    yield from sshd.east_and_west(tmp_path_factory)


@pytest.fixture
def launcher(site: Site, tmp_path: Path) -> Iterator[Launcher]:
    yield site.launcher(tmp_path)
    assert site.wait_until_gone(_GONE_S) == []
    assert list(site.sshd.temporary.iterdir()) == []


def test_training_on_two_hosts(launcher: Launcher) -> None:
    program = """
        import os, numpy as np, pyhvd as hvd
        hvd.init()
        weights = hvd.broadcast(np.full(8, float(hvd.rank())), root_rank=0)
        for step in range(20):
            weights -= 0.1 * hvd.allreduce(weights - hvd.rank())
        where = os.uname().nodename, os.environ["HOROVOD_HOSTNAME"]
        print(*where, hvd.rank(), hvd.local_rank(), hvd.cross_rank(), f"{weights[0]:.2f}")
        open(f"ended.{hvd.rank()}", "w").close()
    """
    ended = launcher.run(launcher.script(program), hosts=_HOSTS)
    assert time.time() - max((launcher.folder / f"ended.{rank}").stat().st_mtime for rank in range(4)) < 2
    assert ended.code == 0, ended
    assert sorted(ended.out.splitlines()) == [
        "[0]<stdout>:east east 0 0 0 1.32",
        "[1]<stdout>:east east 1 1 0 1.32",
        "[2]<stdout>:west west 2 0 1 1.32",
        "[3]<stdout>:west west 3 1 1 1.32",
    ]


def test_a_job_ends_with_its_ranks(launcher: Launcher) -> None:
    ended = launcher.run("-c", "import time; print(time.time())", hosts="east:1,west:1")
    assert ended.code == 0, ended
    now = time.time()
    assert now - max(float(line.partition(":")[2]) for line in ended.out.splitlines()) < 1.5


def test_the_launchers_own_host_and_a_host_with_two_names(site: Site, launcher: Launcher) -> None:
    program = """
        import numpy as np, pyhvd as hvd
        hvd.init()
        total = hvd.allreduce(np.ones(4), op=hvd.Sum)[0]
        print(hvd.rank(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(), total)
    """
    address = site.bed.hosts["east"].address
    site.sshd.trust([*_NAMES, address])
    hosts = f"head:1,east:1,west:1,{address}:2"
    ended = launcher.run(launcher.script(program), hosts=hosts)
    assert ended.code == 0, ended
    assert sorted(ended.out.splitlines()) == [
        "[0]<stdout>:0 0 1 0 3 5.0",
        "[1]<stdout>:1 0 3 1 3 5.0",
        "[2]<stdout>:2 1 3 0 1 5.0",
        "[3]<stdout>:3 2 3 0 1 5.0",
        "[4]<stdout>:4 0 1 2 3 5.0",
    ]
    assert f"pyhvd: east and {address} are one host" in ended.err


_KILLED = "was killed by SIGKILL"
_FOLLOWS = r"mpiexec exited with code|rank \d of 4 on host \w+ "


@pytest.mark.parametrize(
    ("programs", "on_west", "text"),
    [
        (["mpiexec", "prterun"], False, f"mpiexec {_KILLED}"),
        (["prted"], True, f"mpiexec's daemon on host west {_KILLED}"),
        # mpiexec ends the job; MPI may end a rank first.
        (["pyhvd.job.mpi.openmpi.launch_agent"], False, _FOLLOWS),
        (["pyhvd.job.mpi.openmpi.rank_proxy"], True, _FOLLOWS),
    ],
)
def test_a_part_of_open_mpi_is_killed(
    site: Site, launcher: Launcher, programs: list[str], on_west: bool, text: str
) -> None:
    if not on_open_mpi():
        pytest.skip("MPICH needs no mpiexec")
    job = start_waiting(launcher, _HOSTS)
    begin = time.monotonic()
    victims = site.running(site.west if on_west else site.bed.head, *programs)
    os.kill(victims[0], signal.SIGKILL)
    ended = end_of(job)
    by_mpi = re.search(r"^pyhvd: rank .* exited with code (\d+)", ended.err, re.MULTILINE)
    assert ended.code == (int(by_mpi[1]) if by_mpi else 1), ended
    assert re.search(f"^pyhvd: .*({text})", ended.err, re.MULTILINE), ended
    assert time.monotonic() - begin < 4
    assert site.wait_until_gone(_GONE_S) == []


@pytest.mark.parametrize(
    ("lost", "text"),
    [
        ("requests", "A daemon was unable to complete a TCP connection"),
        ("answers", "Its daemons there must be able to connect to any port of this host, head"),
    ],
)
def test_a_daemon_that_cannot_reach_the_launcher(
    site: Site, launcher: Launcher, lost: str, text: str
) -> None:
    """West's kernel refuses to send requests; the head drops its answers, as a firewall does."""
    if not on_open_mpi():
        pytest.skip("MPICH has no daemons")
    here, there, port = site.west, site.bed.head, "sport"
    if lost == "answers":
        here, there, port = there, here, "dport"
    four, six = (address.split("/")[0] for address in there.addresses[0])
    rules = [
        ("-4", "rule", "add", "pref", "10", "to", four, "ipproto", "tcp", port, "22", "table", "main"),
        ("-4", "rule", "add", "pref", "11", "to", four, "blackhole"),
        ("-6", "rule", "add", "pref", "11", "to", six, "blackhole"),
    ]
    for rule in rules:
        here.do("ip", *rule)
    try:
        ended = launcher.run("--start-timeout", "6", "-c", "pass", hosts=_HOSTS)
    finally:
        for rule in rules:
            here.do("ip", *rule[:2], "delete", *rule[3:5])
    assert ended.code == 1, ended
    assert text in ended.err, ended
    assert site.wait_until_gone(_GONE_S) == []


def test_ctrl_c_while_mpiexec_starts(site: Site, launcher: Launcher) -> None:
    if not on_open_mpi():
        pytest.skip("MPICH needs no mpiexec")
    job = launcher.start("-c", "pass", hosts=_HOSTS)
    until = time.monotonic() + PATIENCE_S
    while not site.running(site.west, "prted") and time.monotonic() < until:
        time.sleep(0.001)
    begin = time.monotonic()
    job.send_signal(signal.SIGINT)
    ended = end_of(job)
    assert (ended.code, ended.last) == (130, "pyhvd: ended by SIGINT"), ended
    assert time.monotonic() - begin < 5
    assert site.wait_until_gone(_GONE_S) == []
