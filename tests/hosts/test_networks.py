"""pyhvdrun on hosts with several networks: which one the ranks use, and what is said if none does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.bed import bed, why_not
from tests.hosts import sshd
from tests.hosts.sshd import Site, Sshd
from tests.many_hosts import Ended, Launcher, end_of
from tests.mpi.launch import mpi_version

pytestmark = pytest.mark.timeout(120)

_HOSTS = "east:1,west:1"
# Prints the interface that carries most bytes: of links, and of MPI.
_PROGRAM = """
    import os, numpy as np, pyhvd as hvd
    from pathlib import Path
    def carrier(move):
        def sent():
            return {nic.name: int((nic / "statistics/tx_bytes").read_text()) for nic in nics}
        nics = [nic for nic in Path("/sys/class/net").iterdir() if nic.name != "lo"]
        before = sent()
        move()
        after = sent()
        most = max(after, key=lambda nic: after[nic] - before[nic])
        assert after[most] - before[most] >= 4 << 20
        return most
    hvd.init()
    values = np.ones(2 << 20, np.float32)
    def by_mpi():
        from mpi4py import MPI
        MPI.COMM_WORLD.Sendrecv(values, 1 - hvd.rank(), recvbuf=np.empty_like(values))
    print(carrier(lambda: hvd.allreduce(values)), carrier(by_mpi), os.environ.get("NCCL_SOCKET_IFNAME"))
"""


def make_site(folder: Path, stack: ExitStack, nics: int = 1, ipv4: bool = True) -> Site:
    if not mpi_version().startswith("MPICH"):
        pytest.skip("pyhvdrun starts ranks of MPICH on many hosts")
    if reason := why_not() or sshd.why_not():
        pytest.skip(reason)
    made = stack.enter_context(bed(["east", "west"], folder, nics, ipv4))
    return Site(made, Sshd(made, folder, stack))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Two networks; ssh uses the first. On the second, west's interface has another name than east's."""
    with ExitStack() as stack:
        made = make_site(tmp_path_factory.mktemp("site"), stack, nics=2)
        for state in (("down",), ("name", "data1"), ("up",)):
            made.west.do("ip", "link", "set", "dev", "data1" if state == ("up",) else "eth1", *state)
        yield made


@pytest.fixture
def launcher(site: Site, tmp_path: Path) -> Launcher:
    return site.launcher(tmp_path)


def run(launcher: Launcher, *arguments: str) -> Ended:
    return launcher.run(*arguments, launcher.script(_PROGRAM), hosts=_HOSTS)


def used(ended: Ended) -> list[str]:
    """Return which interfaces the ranks of a job have used, in rank order; it has ended well."""
    assert ended.code == 0, ended
    return sorted(line for line in ended.out.splitlines() if line.startswith("["))


_FIRST = [f"[{rank}]<stdout>:eth0 eth0 =eth0" for rank in range(2)]
_SECOND = ["[0]<stdout>:eth1 eth1 =eth1", "[1]<stdout>:data1 data1 =data1"]


def test_the_first_network_that_works(launcher: Launcher) -> None:
    ended = run(launcher, "--verbose")
    assert used(ended) == _FIRST
    assert "pyhvd: subnet 10.99.0.0/24: east eth0 10.99.0.2/24, west eth0 10.99.0.3/24" in ended.err


@pytest.mark.parametrize("wish", ["10.99.1.0/24", "eth1,data1", "east=eth1,west=data1"])
def test_a_network_that_the_user_names(launcher: Launcher, wish: str) -> None:
    ended = run(launcher, "--network-interfaces", wish)
    assert used(ended) == _SECOND


def test_a_dead_network_that_looks_right_and_interfaces_of_other_names(
    site: Site, launcher: Launcher
) -> None:
    site.bed.separate(0)
    try:
        ended = run(launcher)
    finally:
        site.bed.separate(0, False)
    assert used(ended) == _SECOND


def test_hosts_that_do_not_reach_each_other(site: Site, launcher: Launcher) -> None:
    for nic in range(2):
        site.bed.separate(nic)
    try:
        ended = run(launcher, "--network-interfaces", "10.99.0.0/24")
    finally:
        for nic in range(2):
            site.bed.separate(nic, False)
    assert ended.code == 1, ended
    assert ended.out == ""
    lines = ended.err.splitlines()
    assert lines[:5] == [
        "pyhvd: no network connects all hosts: MPI's ranks could not reach each other",
        "pyhvd: subnet 10.99.0.0/24: east eth0 10.99.0.2, west eth0 10.99.0.3",
        "pyhvd:   from \\ to  east  west",
        "pyhvd:   east       -     no",
        "pyhvd:   west       no    -",
    ], ended
    # The kernel knows sooner if it has to look for the neighbour.
    assert re.fullmatch(
        r"pyhvd:   east to west 10\.99\.0\.3: (no answer within 5 s|No route to host)", lines[5]
    )
    assert "--network-interfaces eth0, 10.0.0.0/24 or h1=eth0,h2=ib0" in ended.last


def test_a_network_that_begins_to_lose_large_packets(site: Site, launcher: Launcher) -> None:
    """The report names the ranks that wait for each other; the launcher, on another network, loses none."""
    program = """
        import os, time, numpy as np, pyhvd as hvd
        hvd.init()
        hvd.allreduce(np.ones(4), name="small")
        print("up", flush=True)
        while not os.path.exists("go"):
            time.sleep(0.01)
        hvd.allreduce(np.ones(4), name="small")
        hvd.allreduce(np.ones(1 << 20), name="large")
    """
    flags = ("--network-interfaces", "10.99.1.0/24", "--stall-check-warning-time-seconds", "2")
    job = launcher.start(*flags, launcher.script(program), hosts=_HOSTS)
    assert job.stdout is not None
    assert job.stderr is not None
    for _ in range(2):
        assert job.stdout.readline().endswith("up\n")
    # Offloaded segments, which are cut behind the bridge, would pass: TCP must cut them itself.
    sides = (site.bed.hosts["east"], "eth1"), (site.bed.hosts["west"], "data1")
    for host, nic in sides:
        host.do("ip", "link", "set", "dev", nic, "gso_max_segs", "1")
    site.bed.head.do("ip", "link", "set", "dev", "west.1", "mtu", "600")
    try:
        (launcher.folder / "go").touch()
        told = "".join(job.stderr.readline() for _ in range(3))
        job.terminate()
        ended = end_of(job)
    finally:
        site.bed.head.do("ip", "link", "set", "dev", "west.1", "mtu", "1500")
        for host, nic in sides:
            host.do("ip", "link", "set", "dev", nic, "gso_max_segs", "65535")
    assert "'large'" in told, told
    assert "rank 1 on host west" in told, told
    assert (ended.code, ended.last) == (143, "pyhvd: ended by SIGTERM")


def test_an_interface_that_a_host_lacks(launcher: Launcher) -> None:
    ended = run(launcher, "--network-interface", "eth1")
    assert ended.code == 1, ended
    assert ended.err.startswith("pyhvd: host west: no interface eth1 is up there; it has eth0 10.99.0.3/24,")


def test_the_users_own_variable_wins(launcher: Launcher) -> None:
    ended = run(launcher, "-x", "NCCL_SOCKET_IFNAME=^docker")
    assert used(ended) == [line.replace("=eth0", "^docker") for line in _FIRST]


def test_the_choice_is_left_to_mpi(launcher: Launcher) -> None:
    ended = run(launcher, "--network-interfaces", "any")
    assert [line.rpartition(" ")[2] for line in used(ended)] == ["None", "None"]


def test_ranks_listen_on_the_given_ports_alone(launcher: Launcher) -> None:
    program = """
        import numpy as np, pyhvd as hvd
        hvd.init()
        hvd.allreduce(np.ones(1 << 16))
        lines = [line.split() for line in open("/proc/net/tcp").read().splitlines()[1:]]
        pairs = [(int(line[1][-4:], 16), int(line[2][-4:], 16)) for line in lines if line[3] in ("01", "0A")]
        ports = [pair for pair in pairs if not {22, 2201, 2202} & {*pair}]  # of sshd
        hvd.barrier()
        print(len(ports) > 8, [pair for pair in ports if not {*pair} & {*range(20_000, 20_006)}])
    """
    ended = launcher.run("--port-range", "20000-20005", launcher.script(program), hosts="east:2,west:2")
    assert used(ended) == [f"[{rank}]<stdout>:True []" for rank in range(4)]
    assert "no links" not in ended.err


def test_ipv6_alone(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with ExitStack() as stack:
        site = make_site(tmp_path_factory.mktemp("ipv6"), stack, ipv4=False)
        ended = run(site.launcher(tmp_path))
        assert used(ended) == _FIRST


def test_hosts_with_a_router_between_them(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with ExitStack() as stack:
        site = make_site(tmp_path_factory.mktemp("routed"), stack, nics=2)
        head = site.bed.head
        head.do("bash", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        for number, host in enumerate(site.bed.hosts.values(), 1):
            head.do("ip", "address", "add", f"10.50.{number}.1/24", "dev", "bed1")
            host.do("ip", "address", "flush", "dev", "eth1")
            host.do("ip", "address", "add", f"10.50.{number}.2/24", "dev", "eth1")
            host.do("ip", "route", "add", "10.50.0.0/16", "via", f"10.50.{number}.1")
        for nic in range(2):
            site.bed.separate(nic)
        ended = run(site.launcher(tmp_path), "--verbose")
        assert used(ended) == [f"[{rank}]<stdout>:eth1 eth1 =eth1" for rank in range(2)]
        text = "pyhvd: interface eth1, IPv4: east eth1 10.50.1.2/24, west eth1 10.50.2.2/24"
        assert text in ended.err.splitlines(), ended
