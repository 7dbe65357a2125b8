"""Which addresses could connect hosts, in which order, and the variables of the ranks."""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from pyhvd.job.agent.host_facts import describe_network
from pyhvd.job.messages import HostNetwork, Interface
from pyhvd.job.network.network_plans import (
    NetworkPlan,
    Wish,
    describe,
    parse_wishes,
    plans_of,
    unfulfilled,
    wishes_for,
)

LOOPBACK = Interface("lo", "127.0.0.1/8")


def network(*addresses: str, namespace: str = "", speed: int = 0) -> HostNetwork:
    """Return a network whose interfaces are given as ``eth0 10.0.0.1/24``."""
    found = [Interface(each.split()[0], each.split()[1], speed) for each in addresses]
    return HostNetwork(namespace, [LOOPBACK, *found])


def plans(hosts: Sequence[HostNetwork], *texts: str) -> list[tuple[str, ...]]:
    """Return the addresses of each plan, for wishes that hold for all hosts."""
    return [plan.addresses for plan in plans_of(hosts, [list(parse_wishes(texts))] * len(hosts))]


def test_a_common_subnet_whatever_the_names() -> None:
    hosts = [
        network("eth0 192.168.1.1/24", "ib0 10.0.0.1/16"),
        network("data 10.0.0.2/16", "x 172.20.0.1/24"),
    ]
    found = plans_of(hosts, [[], []])
    assert (found[0].title, found[0].addresses) == ("subnet 10.0.0.0/16", ("10.0.0.1", "10.0.0.2"))
    assert [each.name for each in found[0].chosen] == ["ib0", "data"]


def test_ipv4_before_ipv6_and_faster_before_slower() -> None:
    def host(number: int) -> HostNetwork:
        interfaces = [
            Interface("slow", f"fd00:1::{number}/64", 1000),
            Interface("slow", f"10.1.0.{number}/24", 1000),
            Interface("fast", f"10.2.0.{number}/24", 10_000 if number == 1 else 25_000),
            Interface("uneven", f"10.3.0.{number}/24", 100 if number == 1 else 100_000),
        ]
        return HostNetwork("", interfaces)

    assert plans([host(1), host(2)]) == [
        ("10.2.0.1", "10.2.0.2"),
        ("10.1.0.1", "10.1.0.2"),
        ("10.3.0.1", "10.3.0.2"),
        ("10.2.0.1", "10.3.0.2"),  # the fastest of each host
        ("fd00:1::1", "fd00:1::2"),
    ]


@pytest.mark.parametrize("name", ["docker0", "br-1a2b3c", "veth12", "virbr0", "cni0", "flannel.1"])
def test_bridges_of_containers_are_for_hosts_without_anything_else(name: str) -> None:
    hosts = [network(f"{name} 172.17.0.{k}/16", f"eth0 10.{k}.0.1/24") for k in (1, 2)]
    assert plans(hosts) == [("10.1.0.1", "10.2.0.1")]
    hosts[1] = network(f"{name} 172.17.0.2/16")
    assert plans(hosts) == [("10.1.0.1", "172.17.0.2")]
    hosts[0] = network(f"{name} 172.17.0.1/16")
    assert plans(hosts) == [("172.17.0.1", "172.17.0.2")]
    assert plans([network(f"{name} 172.17.0.{k}/16", "eth0 10.0.0.9/24") for k in (1, 2)], name) == [
        ("172.17.0.1", "172.17.0.2")
    ]


def test_an_address_that_two_hosts_have_cannot_connect_them() -> None:
    hosts = [network("br0 192.168.122.1/24", f"eth0 10.0.0.{k}/24", namespace=str(k)) for k in (1, 2)]
    assert plans(hosts) == [("10.0.0.1", "10.0.0.2")]
    shared = [network("eth0 10.0.0.1/24", namespace="one")] * 2
    assert plans(shared) == [("10.0.0.1", "10.0.0.1")]


def test_routed_hosts_are_connected_by_one_name_or_by_the_best_of_each() -> None:
    hosts = [network("aux 10.9.0.1/32", "eth0 10.0.1.1/24"), network("eth0 10.0.2.1/24", "bux 10.8.0.1/32")]
    assert plans(hosts) == [("10.0.1.1", "10.0.2.1"), ("10.9.0.1", "10.0.2.1")]


def test_the_users_order_comes_first_and_other_interfaces_are_left_out() -> None:
    hosts = [network(f"eth0 10.0.0.{k}/24", f"eth1 10.1.0.{k}/24", f"eth2 fd00::{k}/64") for k in (1, 2)]
    both = [("10.1.0.1", "10.1.0.2"), ("10.0.0.1", "10.0.0.2")]
    assert plans(hosts, "eth1") == both[:1]
    assert plans(hosts, "eth1,eth0") == both
    assert plans(hosts, "eth1", "eth0") == both
    assert plans(hosts, "10.1.0.0/24, 10.0.0.0/24") == both
    assert plans(hosts, "fd00::/16,eth0") == [("fd00::1", "fd00::2"), both[1]]


def test_wishes_for_single_hosts() -> None:
    wishes = parse_wishes(["h1=ib0,h2=ib1", "eth0"])
    assert wishes == (Wish("ib0", "h1"), Wish("ib1", "h2"), Wish("eth0"))
    assert wishes_for(["h1"], wishes) == [Wish("ib0", "h1")]
    assert wishes_for(["h3", "10.0.0.3"], wishes) == [Wish("eth0")]
    assert wishes_for([""], wishes) == [Wish("eth0")]
    hosts = [network("ib0 10.0.0.1/24", "ib1 10.0.1.1/24"), network("ib0 10.0.0.2/24", "ib1 10.0.1.2/24")]
    found = plans_of(hosts, [wishes_for([name], wishes) for name in ("h1", "h2")])
    assert [plan.addresses for plan in found] == [("10.0.0.1", "10.0.1.2")]


@pytest.mark.parametrize(
    "text", ["", "eth0,", "=eth0", "h1=", "10.0.0.0/33", "a name", "sixteen_letters_", "a/b"]
)
def test_wishes_that_mean_nothing(text: str) -> None:
    with pytest.raises(ValueError, match="expected an interface, a subnet, or one for a host"):
        parse_wishes([text])


def test_a_host_without_a_wanted_interface() -> None:
    host = network("eth0 10.0.0.1/24")
    assert unfulfilled(host, []) == unfulfilled(host, [Wish("eth0")]) == ""
    assert (
        unfulfilled(host, [Wish("ib0"), Wish("10.1.0.0/16")])
        == "no interface ib0 or 10.1.0.0/16 is up there; it has eth0 10.0.0.1/24"
    )
    assert unfulfilled(network(), [Wish("lo")]) == "no interface lo is up there; it has no address"
    assert "no interface but loopback" in unfulfilled(network(), [])
    assert describe(network()) == "no address"


def test_each_rank_gets_its_own_hosts_interface() -> None:
    plan = NetworkPlan("", (Interface("ib0", "10.0.0.1/24"), Interface("br1", "10.0.1.2/24", 0, bridge=True)))
    expected = {
        "UCX_NET_DEVICES": "ib0,mlx5_0:1",
        "FI_TCP_IFACE": "ib0",
        "NCCL_SOCKET_IFNAME": "=ib0",
        "OMPI_MCA_btl_tcp_if_include": "ib0",
        "PYHVD_LINK_INTERFACES": "10.0.0.0/24,10.0.1.0/24",
    }
    assert plan.variables(0, ["mlx5_0:1"]) == expected
    variables = plan.variables(1, [])
    assert (variables["UCX_NET_DEVICES"], variables["UCX_TCP_BRIDGE_ENABLE"]) == ("br1", "y")
    plan = NetworkPlan("", (Interface("eth0", "fd00::1/64"),) * 2)
    variables = plan.variables(0, [])
    assert (variables["UCX_TCP_AF_PRIO"], variables["NCCL_SOCKET_FAMILY"]) == ("inet6,inet", "AF_INET6")


_ADDRESSES = st.builds(
    lambda net, host, prefix: f"{net}{host}/{prefix}",
    st.sampled_from(["10.0.0.", "10.0.1.", "192.168.7."]),
    st.integers(1, 9),
    st.sampled_from([16, 24, 32]),
) | st.builds(lambda net, host: f"fd00:{net}::{host}/64", st.integers(1, 2), st.integers(1, 9))
_INTERFACES = st.builds(
    Interface,
    st.sampled_from(["eth0", "eth1", "ib0", "docker0", "br-x"]),
    _ADDRESSES,
    st.sampled_from([0, 1000, 10_000]),
)
_NETWORKS = st.builds(
    HostNetwork,
    st.sampled_from(["", "a", "b"]),
    st.lists(_INTERFACES, max_size=5).map(lambda found: [LOOPBACK, *found]),
)
_WISHES = st.lists(
    st.sampled_from([Wish("eth0"), Wish("10.0.0.0/16"), Wish("docker0"), Wish("lo")]), max_size=2
)


@given(st.lists(st.tuples(_NETWORKS, _WISHES), min_size=2, max_size=4))
def test_plans_keep_the_rules(hosts: list[tuple[HostNetwork, list[Wish]]]) -> None:
    networks, wishes = [each[0] for each in hosts], [each[1] for each in hosts]
    found = plans_of(networks, wishes)
    assert len(found) <= 8
    assert len({plan.addresses for plan in found}) == len(found)
    for plan in found:
        assert LOOPBACK not in plan.chosen
        assert len({ipaddress.ip_address(address).version for address in plan.addresses}) == 1
        for each, host, wished in zip(plan.chosen, networks, wishes, strict=True):
            assert each in host.interfaces
            assert not wished or any(wish.matches(each) for wish in wished)
    # If each host can use IPv4, and no address is another host's too, there is a plan.
    usable = [
        [each for each in host.interfaces if each != LOOPBACK and (not w or any(x.matches(each) for x in w))]
        for host, w in hosts
    ]
    own = [{each.cidr.partition("/")[0] for each in host.interfaces} for host in networks]
    apart = sum(map(len, own)) - len(hosts) + 1 == len(set().union(*own))
    plain = [
        [each for each in found if "." in each.cidr and each.name.startswith(("eth", "ib"))]
        for found in usable
    ]
    if apart and all(plain):
        assert found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="agents need Linux")
def test_what_an_agent_tells_of_its_interfaces(tmp_path: Path) -> None:
    net, ports = tmp_path / "net", tmp_path / "rdma"
    (net / "lo" / "bridge").mkdir(parents=True)
    (net / "lo" / "speed").write_text("2500\n")
    for device, number, state in (
        ("mlx5_1", 1, "4: ACTIVE"),
        ("mlx5_0", 2, "4: ACTIVE"),
        ("mlx5_0", 1, "1: DOWN"),
    ):
        (ports / device / "ports" / str(number)).mkdir(parents=True)
        (ports / device / "ports" / str(number) / "state").write_text(state)
    found = describe_network(net, ports)
    assert Interface("lo", "127.0.0.1/8", 2500, True) in found.interfaces
    assert found.rdma == ["mlx5_0:2", "mlx5_1:1"]
    assert found.namespace.endswith(str(os.stat("/proc/self/ns/net").st_ino))
    (net / "lo" / "speed").write_text("-1\n")
    assert Interface("lo", "127.0.0.1/8", 0, True) in describe_network(net, tmp_path / "none").interfaces
