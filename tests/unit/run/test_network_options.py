"""The options that choose network interfaces, and the variables that a rank gets for them."""

from __future__ import annotations

import pytest

from pyhvd.job.agent.rank_process import Program, rank_environment
from pyhvd.job.errors import LaunchError
from pyhvd.job.messages import Start
from pyhvd.job.network.network_choice import Wanted
from pyhvd.job.network.network_plans import Wish
from pyhvd.run.cli import parse
from pyhvd.run.hosts.hosts import Host, HostRanks, JobHosts
from pyhvd.run.launchers.many_hosts import wanted_network


def wanted(*arguments: str, cluster: str = "") -> Wanted:
    hosts = tuple(HostRanks(Host(f"h{k}", 1), range(k, k + 1), own=False) for k in range(2))
    options = parse([*arguments, "x.py"], under_mpiexec=False)
    return wanted_network(options, JobHosts(hosts, "ssh", cluster))


def test_the_flag_the_cluster_or_neither_names_interfaces() -> None:
    assert wanted() == Wanted()
    assert wanted("--network-interfaces", "h1=ib0, eth0", "--network-interface", "10.0.0.0/8") == Wanted(
        (Wish("ib0", "h1"), Wish("eth0"), Wish("10.0.0.0/8"))
    )
    assert wanted(cluster="eth0") == Wanted((Wish("eth0"),), "the interface that the cluster names")
    assert wanted("--network-interfaces", "ib0", cluster="eth0").wishes == (Wish("ib0"),)
    assert not wanted("--network-interfaces", "any", cluster="eth0").probe
    assert wanted("--verbose").show


def test_interfaces_that_are_named_wrongly(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        wanted("--network-interfaces", "eth0,10.0.0.0/33")
    assert "'10.0.0.0/33': expected an interface, a subnet, or one for a host" in capsys.readouterr().err
    with pytest.raises(LaunchError, match="names h9, which is not a host of this job"):
        wanted("--network-interfaces", "h1=ib0,h9=ib1")


def test_a_range_of_ports(capsys: pytest.CaptureFixture[str]) -> None:
    assert wanted("--port-range", "40000-40002").ports == range(40000, 40003)
    assert wanted("--port-range", "40000-40002", "--network-interfaces", "any").ports == range(40000, 40003)
    with pytest.raises(LaunchError, match="7-8 has 2 ports: give at least 3, which is 3 for each"):
        wanted("--port-range", "7-8")
    for text in ("40000", "40001-40000", "0-7", "1-65536", "a-b"):
        with pytest.raises(SystemExit):
            wanted("--port-range", text)
        assert f"expected two ports, such as 40000-40999, not '{text}'" in capsys.readouterr().err


def test_variables_that_the_user_or_the_host_has_set_win() -> None:
    program = Program("m", [], "/", [(b"USERS", b"user"), (b"BOTH", b"user")])
    start = Start(
        0, 1, 0, 1, {"OWN": "rank"}, defaults=dict.fromkeys(("OWN", "USERS", "HOSTS", "FREE"), "job")
    )
    found = rank_environment({"HOSTS": "host", "BOTH": "host"}, start, program)
    assert {name: value for name, value in found.items() if not name.startswith(("PMI", "MPI"))} == {
        "OWN": "rank",
        "USERS": "user",
        "HOSTS": "host",
        "BOTH": "user",
        "FREE": "job",
    }
