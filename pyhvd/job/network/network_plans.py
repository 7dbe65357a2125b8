"""Which network interfaces could connect the hosts of a job, the best choice first. Pure.

A plan has one address of each host. The order of plans:

1. As the user names the interfaces: the first named first.
2. Without bridges and cables of containers and virtual machines; a host uses these only if it has no others.
3. IPv4 before IPv6.
4. One subnet that all hosts are in; then one name that an interface has on all hosts; then each host's best
   address, for hosts that reach each other through routers.
5. Faster before slower, as the slowest host's interface is.
6. In the order of the first host's kernel.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

from pyhvd.job.messages import HostNetwork, Interface

_VIRTUAL = ("docker", "br-", "veth", "virbr", "cni", "flannel")
_NAME = re.compile(r"[^\s/:=,]{1,15}")
_MOST = 8
ANY = "any"
"""Stands for no choice and no probe, in place of names."""

_Subnet = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class Wish:
    """An interface that the user names.

    Attributes
    ----------
    what : str
        Its name, or an address or subnet that contains its address.
    host : str
        The host that is meant; empty for all hosts without a wish of their own.
    """

    what: str
    host: str = ""

    def matches(self, interface: Interface) -> bool:
        """Return whether an interface is meant."""
        subnet = _subnet(self.what)
        if subnet is None:
            return interface.name == self.what
        return ipaddress.ip_interface(interface.cidr).ip in subnet


@dataclass(frozen=True, slots=True)
class NetworkPlan:
    """An address of each host, which the others may reach.

    Attributes
    ----------
    title : str
        What the addresses have in common.
    chosen : tuple of Interface
        In the order of the hosts.
    """

    title: str
    chosen: tuple[Interface, ...]

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses, in the order of the hosts."""
        return tuple(each.cidr.partition("/")[0] for each in self.chosen)

    def variables(self, host: int, rdma: Sequence[str]) -> dict[str, str]:
        """Return the variables by which a host's ranks use the plan.

        RDMA ports stay MPI's to choose: `rdma` are the host's, and the plan is about TCP.
        """
        own = self.chosen[host]
        subnets = {ipaddress.ip_interface(each.cidr).network for each in self.chosen}
        found = {
            "UCX_NET_DEVICES": ",".join([own.name, *rdma]),
            "FI_TCP_IFACE": own.name,
            "NCCL_SOCKET_IFNAME": f"={own.name}",
            "OMPI_MCA_btl_tcp_if_include": own.name,
            "PYHVD_LINK_INTERFACES": ",".join(sorted(map(str, subnets))),
        }
        if own.bridge:
            found["UCX_TCP_BRIDGE_ENABLE"] = "y"
        if _version(own) == 6:
            found |= {"UCX_TCP_AF_PRIO": "inet6,inet", "NCCL_SOCKET_FAMILY": "AF_INET6"}
        return found


@dataclass(frozen=True, slots=True)
class _Candidate:
    """An address that a host could use; `wish` is the place of the wish that it fulfils."""

    interface: Interface
    wish: int
    virtual: bool

    @property
    def version(self) -> int:
        return _version(self.interface)

    @property
    def order(self) -> tuple[int, bool, int, int]:
        return self.wish, self.virtual, self.version, -self.interface.speed


def port_variables(ports: range) -> dict[str, str]:
    """Return the variables by which ranks listen on these ports alone; 0 is any port."""
    first, last = ports[0], ports[-1]
    if not first:
        return {}
    return {
        "UCX_TCP_PORT_RANGE": f"{first}-{last}",
        "FI_TCP_PORT_LOW_RANGE": str(first),
        "FI_TCP_PORT_HIGH_RANGE": str(last),
        "OMPI_MCA_btl_tcp_port_min_v4": str(first),
        "OMPI_MCA_btl_tcp_port_range_v4": str(len(ports)),
        "PYHVD_LINK_PORTS": f"{first}-{last}",
    }


def parse_wishes(texts: Iterable[str]) -> tuple[Wish, ...]:
    """Return the wishes of ``--network-interfaces`` and ``--network-interface``.

    Raises
    ------
    ValueError
        An entry is no name, address or subnet.
    """
    wishes = []
    for entry in (entry.strip() for text in texts for entry in text.split(",")):
        host, equals, what = entry.rpartition("=")
        if (equals and not host) or not (_NAME.fullmatch(what) or _subnet(what)):
            raise ValueError(
                f"{entry!r}: expected an interface, a subnet, or one for a host: eth0, 10.0.0.0/24, h1=ib0"
            )
        wishes.append(Wish(what, host))
    return tuple(wishes)


def wishes_for(names: Container[str], wishes: Sequence[Wish]) -> list[Wish]:
    """Return the wishes for a host of these names: its own, or else those for all hosts."""
    own = [wish for wish in wishes if wish.host and wish.host in names]
    return own or [wish for wish in wishes if not wish.host]


def plans_of(networks: Sequence[HostNetwork], wishes: Sequence[Sequence[Wish]]) -> list[NetworkPlan]:
    """Return the plans for hosts with these networks and wishes, at most 8; see the module."""
    hosts = [_candidates(*each) for each in zip(networks, wishes, strict=True)]
    plans: dict[tuple[str, ...], NetworkPlan] = {}
    for _, title, found in sorted(_choices(hosts), key=_order):
        plan = NetworkPlan(title, tuple(each.interface for each in found))
        if _is_possible(networks, plan.addresses):
            plans.setdefault(plan.addresses, plan)
    return list(plans.values())[:_MOST]


def unfulfilled(network: HostNetwork, wishes: Sequence[Wish]) -> str:
    """Return what a host has instead of the interfaces that it should use; empty if it has one of these."""
    if _candidates(network, wishes):
        return ""
    wanted = " or ".join(wish.what for wish in wishes)
    if not wanted:
        return "no interface but loopback is up and has an address"
    return f"no interface {wanted} is up there; it has {describe(network)}"


def describe(network: HostNetwork) -> str:
    """Return a host's interfaces and their addresses, for a message."""
    found = [f"{each.name} {each.cidr}" for each in network.interfaces if not _is_loopback(each)]
    return ", ".join(found) or "no address"


def _candidates(network: HostNetwork, wishes: Sequence[Wish]) -> list[_Candidate]:
    """Return the addresses that a host could use, the best first."""
    found = []
    for each in network.interfaces:
        fulfilled = [place for place, wish in enumerate(wishes) if wish.matches(each)]
        if not _is_loopback(each) and (fulfilled or not wishes):
            virtual = not wishes and each.name.startswith(_VIRTUAL)
            found.append(_Candidate(each, min(fulfilled, default=0), virtual))
    found.sort(key=lambda each: each.order)
    return [each for each in found if each.virtual == found[0].virtual]


def _choices(hosts: Sequence[Sequence[_Candidate]]) -> Iterator[tuple[int, str, list[_Candidate]]]:
    """Yield the kind of a choice by rule 4 of the module, its title, and a candidate of each host."""
    for kind, title_of in enumerate((_by_subnet, _by_name, _by_version)):
        titled: list[dict[str, _Candidate]] = []
        for candidates in hosts:
            best: dict[str, _Candidate] = {}
            for each in candidates:
                best.setdefault(title_of(each), each)
            titled.append(best)
        for title in titled[0]:
            if all(title in best for best in titled):
                yield kind, title, [best[title] for best in titled]


def _by_subnet(each: _Candidate) -> str:
    return f"subnet {ipaddress.ip_interface(each.interface.cidr).network}"


def _by_name(each: _Candidate) -> str:
    return f"interface {each.interface.name}, IPv{each.version}"


def _by_version(each: _Candidate) -> str:
    return f"each host's best interface, IPv{each.version}"


def _order(choice: tuple[int, str, list[_Candidate]]) -> tuple[int, bool, int, int, int]:
    kind, _, found = choice
    wish, virtual = max(each.wish for each in found), any(each.virtual for each in found)
    return wish, virtual, found[0].version, kind, -min(each.interface.speed for each in found)


def _is_possible(networks: Sequence[HostNetwork], addresses: Sequence[str]) -> bool:
    """Return whether no address is that of two hosts, unless these are one as far as the network goes."""
    owners: dict[str, str] = {}
    for network, address in zip(networks, addresses, strict=True):
        if owners.setdefault(address, network.namespace) != network.namespace:
            return False
    return True


def _is_loopback(interface: Interface) -> bool:
    return ipaddress.ip_interface(interface.cidr).ip.is_loopback


def _version(interface: Interface) -> int:
    return ipaddress.ip_interface(interface.cidr).version


def _subnet(text: str) -> _Subnet | None:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None
