"""Where ranks run on Ray: bundles of a placement group, node by node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from pyhvd.ray.discovery import live_nodes, node_names
from pyhvd.ray.errors import StartTimeoutError
from pyhvd.ray.settings import WorkerShape


@dataclass(frozen=True)
class NodeShare:
    """The part of a job on one node.

    Attributes
    ----------
    name : str
        The node's name in messages.
    bundles : dict of int to int
        The number of ranks of each bundle there, by its index.
    """

    name: str
    bundles: dict[int, int]

    @property
    def slots(self) -> int:
        """The number of ranks."""
        return sum(self.bundles.values())


class Placement:
    """A placement group, the caller's own or a new one, and the nodes of its bundles.

    Parameters
    ----------
    shape : WorkerShape
        The ranks.
    use_current : bool
        Whether to use the group in which the caller runs, if it runs in one.
    patience : float
        The time limit for Ray to make a new group, in seconds.

    Raises
    ------
    StartTimeoutError
        Ray has not made the group in time.
    ValueError
        The caller's group has too few resources.
    """

    def __init__(self, shape: WorkerShape, *, use_current: bool, patience: float) -> None:
        current = get_current_placement_group() if use_current else None
        self._owned = current is None
        self.group = _make(shape, patience) if current is None else current
        try:
            bundles = self.group.bundle_specs
            chosen = _choose(shape, bundles)
            nodes = placement_group_table(self.group)["bundles_to_node_id"]
            self.shares = _by_node(chosen, nodes)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Remove the group, if it is not the caller's."""
        if self._owned:
            remove_placement_group(self.group)


def _make(shape: WorkerShape, patience: float) -> PlacementGroup:
    if shape.hosts is None:
        bundles, strategy = [shape.resources(1)] * shape.workers, "PACK"
    else:
        bundles, strategy = [shape.resources(shape.workers)] * shape.hosts, "STRICT_SPREAD"
    group = placement_group(bundles, strategy=strategy)
    try:
        if not group.wait(patience):
            raise StartTimeoutError(
                f"Ray has not placed {bundles} by {strategy} within {patience:g} s: has the cluster enough"
                f" resources? It has {_shown(ray.available_resources())} free of"
                f" {_shown(ray.cluster_resources())}. Ask for fewer, or raise placement_group_timeout_s of"
                " create_settings()"
            )
    except BaseException:
        remove_placement_group(group)
        raise
    return group


def _shown(resources: Mapping[str, float]) -> dict[str, float]:
    return {name: resources.get(name, 0.0) for name in ("CPU", "GPU")}


def _choose(shape: WorkerShape, bundles: Sequence[Mapping[str, float]]) -> dict[int, int]:
    """Return the number of ranks of each bundle, in the order of the bundles."""
    chosen: dict[int, int] = {}
    for index, bundle in enumerate(bundles):
        left = shape.size - sum(chosen.values())
        room = min(shape.room(bundle), left)
        if shape.hosts is not None:
            room = shape.workers if room >= shape.workers else 0
        if room:
            chosen[index] = room
    if sum(chosen.values()) < shape.size:
        raise ValueError(
            f"the current placement group has room for {sum(chosen.values())} of {shape.size} ranks: its"
            f" bundles are {list(bundles)}, and each rank needs {shape.resources(1)}. Make it larger, or pass"
            " use_current_placement_group=False"
        )
    return chosen


def _by_node(chosen: Mapping[int, int], nodes: Mapping[int, str]) -> list[NodeShare]:
    """Return the nodes in the order of their first bundles."""
    by_node: dict[str, dict[int, int]] = {}
    for index, workers in chosen.items():
        by_node.setdefault(nodes[index], {})[index] = workers
    names = node_names(live_nodes())
    return [NodeShare(names[node], bundles) for node, bundles in by_node.items()]
