"""Reset TCP connections between hosts, as firewalls and failing NICs do: a rank's own ones, or MPI's."""

from __future__ import annotations

import socket
import subprocess

from pyhvd.engine.context import current
from pyhvd.transport.hosts import HostsFabric

CONNECTIONS = ("rail", "agreement", "control")


def _fabric() -> HostsFabric:
    fabric = current().runtime._executor.fabric
    assert isinstance(fabric, HostsFabric)
    return fabric


def own_ports() -> dict[str, list[int]]:
    """Return the local ports of this rank's connections for all ranks, by kind, in the order of the hosts."""
    links = _fabric()._links
    sockets: dict[str, list[socket.socket | None]] = {
        "rail": [peer for rail in links.rails for peer in rail],
        "agreement": links.agreement,
        "control": [links.control[rank] for rank in sorted(links.control)],
    }
    return {
        kind: [peer.getsockname()[1] for peer in peers if peer is not None] for kind, peers in sockets.items()
    }


def kill_sockets(*condition: str) -> list[str]:
    """Return the command that resets the TCP connections of its host that meet a condition of ss."""
    return ["ss", "--kill", "--tcp", "--numeric", "--no-header", *condition]


def reset_mpi() -> int:
    """On two hosts with a rank each, reset all connections between them but pyhvd's; return how many."""
    ours = [f":{port}" for ports in own_ports().values() for port in ports]
    others = [text for port in ours for text in ("and", "sport", "!=", port)]
    count = 0
    for network, head in (("10.99.0.0/24", "10.99.0.1"), ("fd99::/16", "[fd99::1]")):
        condition = ["dst", network, "and", "not", "dst", head, *others]
        done = subprocess.run(kill_sockets(*condition), check=True, capture_output=True, text=True)
        count += len(done.stdout.splitlines())
    return count
