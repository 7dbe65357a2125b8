"""What this host has for ranks: its MPI, the directory, the script, and its network interfaces.

Chooses no interface: :mod:`pyhvd.job.network.network_plans` does, from what all hosts tell. Uses Linux.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from pyhvd.common.kernel import node_of
from pyhvd.job.errors import LaunchError
from pyhvd.job.messages import Facts, HostNetwork, Interface
from pyhvd.job.mpi.flavour import Flavour, find_library
from pyhvd.transport.link_addresses import host_addresses

_NET = Path("/sys/class/net")
_RDMA = Path("/sys/class/infiniband")


def gather(directory: str, script: str, library: Flavour | None = None) -> Facts:
    """Return what this host has for ranks that run in a directory, and read a script relative to it.

    `library` is its MPI, if that is known.
    """
    try:
        library = library or find_library()
    except LaunchError as exc:
        family, name = "", str(exc)
    else:
        family, name = library.family, library.name
    has_directory = os.path.isdir(directory) and os.access(directory, os.X_OK)
    digest = _digest(os.path.join(directory, script)) if script else ""
    return Facts(family, name, has_directory, digest, describe_network())


def _digest(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


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
