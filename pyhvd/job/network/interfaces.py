"""The network interfaces of this host: what its agent tells of them, and addresses to listen on. Uses Linux.

Chooses nothing: :mod:`pyhvd.job.network.network_plans` does, from what all hosts tell.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pyhvd.common.kernel import node_of
from pyhvd.job.messages import HostNetwork, Interface
from pyhvd.transport.link_addresses import host_addresses

_NET = Path("/sys/class/net")
_RDMA = Path("/sys/class/infiniband")


def interface_addresses(nics: Iterable[str]) -> list[str]:
    """Return an address of each of some network interfaces, IPv4 if it has one; at least one address.

    Raises
    ------
    ValueError
        An interface does not exist, is down, or has no address; the text lists the interfaces.
    """
    known = host_addresses()
    addresses = []
    for nic in nics:
        found = [each.interface.ip for each in known if each.nic == nic]
        if not found:
            names = ", ".join(dict.fromkeys(each.nic for each in known))
            raise ValueError(
                f"nics: interface {nic!r} has no address or is down; this host's interfaces are {names}"
            )
        addresses.append(str(min(found, key=lambda ip: ip.version)))
    if not addresses:
        raise ValueError("nics is empty: name an interface, or leave nics out")
    return addresses


def describe_network(net: Path = _NET, rdma: Path = _RDMA) -> HostNetwork:
    """Return what an agent tells of its host's interfaces."""
    try:
        found = host_addresses()
    except OSError:
        found = []
    interfaces = []
    for each in found:
        name = each.nic.partition(":")[0]  # eth0:1 is a second address of eth0
        interfaces.append(Interface(name, each.cidr, _speed(net / name), (net / name / "bridge").is_dir()))
    return HostNetwork(node_of("net"), interfaces, _rdma_ports(rdma))


def _speed(folder: Path) -> int:
    """Return an interface's speed in Mbit/s; 0 if the kernel does not tell."""
    try:
        return max(0, int((folder / "speed").read_text()))
    except (OSError, ValueError):
        return 0


def _rdma_ports(folder: Path) -> list[str]:
    """Return the active RDMA ports, as UCX names them: ``mlx5_0:1``."""
    try:
        states = [state for state in sorted(folder.glob("*/ports/*/state")) if "ACTIVE" in state.read_text()]
    except OSError:
        return []
    return [f"{state.parts[-4]}:{state.parts[-2]}" for state in states]
