"""The trial's test of the links between hosts: one pair of hosts after another, by the links alone.

The lowest ranks of two hosts open links as a process set of their own would, and reduce through them. In a
round, disjoint pairs measure at the same time; the rounds are those of a round-robin tournament. With many
hosts there are only the first rounds, so that each host meets MOST_ROUNDS others.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from pyhvd.backends.base import Pieces
from pyhvd.backends.shm import make_backend
from pyhvd.config import Config, port_range
from pyhvd.dtypes import Code, ReduceOp
from pyhvd.native.shared_memory import Window
from pyhvd.tools.doctor.trial_facts import LinkFacts
from pyhvd.transport.hosts import HostsFabric
from pyhvd.transport.links import LinkOptions
from pyhvd.transport.world import World

MOST_ROUNDS = 7
_CONNECT_S = 4.0
_SMALL_ROUNDS = 100
_LARGE_ROUNDS = 3
_LARGE_S = 0.1
_LEAST, _MOST = 1 << 20, 64 << 20
_FIRST_TAG = 2


def rounds_of(hosts: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of disjoint pairs in which each two hosts meet once, by the circle method."""
    circle = [*hosts, *([-1] * (len(hosts) % 2))]
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = [tuple(sorted(pair)) for pair in zip(circle[:half], circle[: half - 1 : -1], strict=True)]
        yield sorted((low, high) for low, high in pairs if low >= 0)
        circle.insert(1, circle.pop())


def measure_links(world: World, config: Config, meet: Callable[[], None]) -> list[LinkFacts]:
    """Return this rank's measurements, each on the lower rank of a pair of hosts. Collective.

    Parameters
    ----------
    world : World
        The ranks.
    config : Config
        Rank 0's configuration.
    meet : callable
        Returns when all ranks have called it; ranks that wait in it leave the cores to the others.
    """
    found = []
    rank, hosts = world.topology.rank, sorted(set(world.topology.hosts))
    for tag, pairs in enumerate(itertools.islice(rounds_of(hosts), MOST_ROUNDS), _FIRST_TAG):
        mine = next((pair for pair in pairs if rank in pair), None)
        link = None if mine is None else _measure_pair(world, config, mine, tag)
        if link is not None and link.ranks[0] == rank:
            found.append(link)
        meet()
    return found


def _measure_pair(world: World, config: Config, pair: tuple[int, int], tag: int) -> LinkFacts | None:
    """Return the measurement of two ranks; None if they get no links. Collective of the two."""
    interfaces = tuple(each.strip() for each in config.link_interfaces.split(",") if each.strip())
    backend = make_backend(
        world.fabric.subset(pair, tag),
        pair,
        pair,
        world.open_window,
        LinkOptions(interfaces, _CONNECT_S, "tcp", ports=port_range(config.link_ports)),
        Pieces(config.chunk_size, config.staging_size),
        config.chunk_size,
        agreement=False,
    )
    fabric = backend.fabric
    try:
        if not isinstance(fabric, HostsFabric):
            return None
        here = fabric.rank
        addresses = fabric.addresses(1 - here)
        small, large = np.zeros(1, np.float32), np.zeros(_LEAST // 4, np.float32)
        reduce = partial(_reduce, fabric.window)
        latency = statistics.median(time_calls(_SMALL_ROUNDS, reduce, small))
        _, second = time_calls(2, reduce, large)
        large = np.zeros(_bytes_for(fabric.window, second) // 4, np.float32)
        seconds = statistics.median(time_calls(_LARGE_ROUNDS, reduce, large))
        return LinkFacts(pair, addresses, latency, large.nbytes, seconds)
    finally:
        fabric.close()


def _bytes_for(window: Window, seconds: float) -> int:
    """Return for how many bytes a reduction takes about _LARGE_S, if it took so long for the fewest."""
    slowest = np.array([seconds])
    _reduce(window, slowest)
    return min(max(int(_LEAST * _LARGE_S / slowest[0]), _LEAST), _MOST) // 4 * 4


def time_calls(rounds: int, call: Callable[..., object], *args: object) -> list[float]:
    """Return how long (s) each of some calls takes."""
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        call(*args)
        times.append(time.perf_counter() - begun)
    return times


def _reduce(window: Window, array: np.ndarray[tuple[int], np.dtype[np.floating]]) -> None:
    """Replace an array by the maximum over both ranks."""
    where = np.array([array.__array_interface__["data"][0]], np.int64)
    starts = np.array([0, array.size], np.int64)
    code = Code.FLOAT64 if array.itemsize == 8 else Code.FLOAT32
    if not window.allreduce(where, where, starts, code, ReduceOp.MAX, 1.0, 1.0):
        raise RuntimeError("a link between two hosts has failed during its measurement")
