"""The nodes of a Ray cluster: their names as hosts of a job, and the ranks that each has room for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pyhvd.ray.settings import WorkerShape


class RayHostDiscovery:
    """Finds Ray's live nodes, and the number of ranks that each has room for; Horovod's class.

    Parameters
    ----------
    use_gpu : bool
        Whether ranks need GPUs.
    cpus_per_slot, gpus_per_slot : float
        What each rank needs.
    """

    def __init__(
        self,
        use_gpu: bool = False,  # noqa: FBT001, FBT002 - Horovod's
        cpus_per_slot: float = 1,
        gpus_per_slot: float = 1,
    ) -> None:
        self._shape = WorkerShape(1, None, cpus_per_slot, gpus_per_slot if use_gpu else 0)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the slots of each node that has some, by the node's name."""
        nodes = live_nodes()
        names = node_names(nodes)
        room = {names[node["NodeID"]]: self._shape.room(node["Resources"]) for node in nodes}
        return {name: slots for name, slots in room.items() if slots}


def live_nodes() -> list[Mapping[str, Any]]:
    """Return Ray's live nodes."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def find_node(name: str) -> str:
    """Return the id of a live node by its name, address or host name; raise OSError if there is none."""
    nodes = live_nodes()
    names = node_names(nodes)
    for node in nodes:
        if name in (names[node["NodeID"]], node["NodeManagerAddress"], node["NodeManagerHostname"]):
            return str(node["NodeID"])
    raise OSError(f"Ray has no live node {name}: its nodes are {', '.join(names.values())}")


def node_names(nodes: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return a name for each live node, by its id: its address, or host name and id if others have that."""
    addresses = [node["NodeManagerAddress"] for node in nodes]
    names = {}
    for node, address in zip(nodes, addresses, strict=True):
        alone = addresses.count(address) == 1
        names[node["NodeID"]] = address if alone else f"{node['NodeManagerHostname']}_{node['NodeID'][:8]}"
    return names
