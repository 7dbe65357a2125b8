"""What crosses between this rank and other hosts: the counters of the C code, by the hosts' names.

Owns the numbers and the names of the job's hosts. The counters are in ``counters.h``: those of rails are this
rank's, those of agreement connections are its host's, so only the lowest rank of each host reports them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pyhvd.native.shared_memory import RailCounters
from pyhvd.transport.hosts import HostsFabric

if TYPE_CHECKING:
    from pyhvd.native.shared_memory import FastPath
    from pyhvd.transport.fabric import Fabric

RAIL, AGREEMENT = "rail", "agreement"
"""The two kinds of connections between hosts."""

_NS = 1e-9


HostCounts = defaultdict[str, dict[str, Any]]
"""Counters by field of :class:`~pyhvd.observe.metrics.Metrics`, and by host name."""


class HostMeter:
    """Counts what one rank sends to, receives from, and awaits of other hosts.

    Parameters
    ----------
    rank : int
        This rank.
    hosts : sequence of int
        By rank, the lowest rank of its host.
    names : sequence of str
        By rank, the name of its host.

    Attributes
    ----------
    names : tuple of str
        The hosts' names, in the order of their lowest ranks; hosts that share a name also have their lowest
        rank in it.
    """

    def __init__(self, rank: int, hosts: Sequence[int], names: Sequence[str]) -> None:
        lowest = sorted(set(hosts))
        taken = Counter(names[each] for each in lowest)
        self.names = tuple(
            names[each] if taken[names[each]] == 1 else f"{names[each]} (rank {each})" for each in lowest
        )
        self._numbers = [lowest.index(each) for each in hosts]
        self._here = self._numbers[rank]
        self._reports = hosts[rank] == rank
        self._rails = RailCounters(len(lowest))
        self._has_rails = False

    def watch(self, fabric: Fabric) -> None:
        """Count what a new fabric moves between hosts."""
        if isinstance(fabric, HostsFabric):
            fabric.count_in(self._rails, self._numbers)
            self._has_rails = True

    def read(self, fast_path: FastPath | None) -> HostCounts:
        """Return the counters; from any thread."""
        counts: HostCounts = defaultdict(dict)
        if self._has_rails:
            self._add_rails(counts)
        if fast_path is not None and self._reports:
            self._add_agreement(counts, fast_path.host_counts())
        return counts

    def _add_rails(self, counts: HostCounts) -> None:
        for host, (sent, received, last, slept) in enumerate(self._rails.read()):
            name = self.names[host]
            counts["late_exchanges"][name] = last
            if host != self._here:
                counts["link_sent_bytes"][name] = {RAIL: sent}
                counts["link_received_bytes"][name] = {RAIL: received}
                counts["link_wait_seconds"][name] = slept * _NS

    def _add_agreement(self, counts: HostCounts, agreement: Sequence[tuple[int, int, int, int]]) -> None:
        for host, (sent, received, late, awaited) in enumerate(agreement):
            name = self.names[host]
            counts["host_late_tensors"][name] = late
            if host != self._here:
                counts["link_sent_bytes"].setdefault(name, {})[AGREEMENT] = sent
                counts["link_received_bytes"].setdefault(name, {})[AGREEMENT] = received
                counts["host_awaited_seconds"][name] = awaited * _NS
