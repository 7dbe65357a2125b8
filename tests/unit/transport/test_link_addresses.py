"""Addresses of this host, and the order in which a peer's addresses are tried."""

from __future__ import annotations

import socket

import pytest

from pyhvd.transport.link_addresses import HostAddress, candidates, host_addresses


def addresses(*cidrs: str) -> list[HostAddress]:
    return [HostAddress("eth0", cidr) for cidr in cidrs]


def test_the_loopback_interface_is_found() -> None:
    assert HostAddress("lo", "127.0.0.1/8") in host_addresses()
    assert {each.nic for each in host_addresses()} <= {name for _, name in socket.if_nameindex()}


def test_every_address_can_be_bound() -> None:
    for each in host_addresses():
        ip = each.interface.ip
        with socket.socket(socket.AF_INET6 if ip.version == 6 else socket.AF_INET) as bound:
            bound.bind((str(ip), 0))


@pytest.mark.parametrize("wanted", ["lo", "127.0.0.1", "127.0.0.0/8", "127.1.0.0/8"])
def test_addresses_are_chosen_by_interface_and_by_subnet(wanted: str) -> None:
    chosen = host_addresses([wanted])
    assert HostAddress("lo", "127.0.0.1/8") in chosen
    assert {each.nic for each in chosen} == {"lo"}


def test_nothing_matches_an_unknown_interface() -> None:
    assert host_addresses(["nosuch0"]) == []
    assert host_addresses(["nosuch0", "lo"]) == host_addresses(["lo"])


def test_addresses_in_a_common_subnet_come_first() -> None:
    mine = addresses("10.1.0.1/16", "192.168.7.1/24", "fd00:1::1/64")
    theirs = addresses("10.2.0.2/16", "fd00:2::2/64", "192.168.7.2/24", "fd00:1::2/64")
    assert candidates(mine, theirs, same_network=False) == [
        "192.168.7.2",
        "fd00:1::2",
        "10.2.0.2",
        "fd00:2::2",
    ]


def test_addresses_that_would_reach_this_host_are_left_out() -> None:
    mine = addresses("127.0.0.1/8", "10.0.0.1/24", "172.17.0.1/16", "::1/128")
    theirs = addresses("127.0.0.1/8", "172.17.0.1/16", "::1/128", "10.0.0.2/24")
    assert candidates(mine, theirs, same_network=False) == ["10.0.0.2"]


def test_ranks_of_one_network_namespace_prefer_loopback() -> None:
    both = addresses("10.0.0.1/24", "127.0.0.1/8", "::1/128")
    assert candidates(both, both, same_network=True) == ["127.0.0.1", "::1", "10.0.0.1"]


def test_without_a_usable_address_there_are_no_candidates() -> None:
    assert candidates(addresses("10.0.0.1/24"), addresses("127.0.0.1/8"), same_network=False) == []
