"""A world: the ranks that were started together, and the transport between them.

:mod:`pyhvd.transport.mpi.world` makes worlds of processes, :mod:`pyhvd.transport.inprocess` of threads.
Making a world is collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pyhvd.transport.arena import Arena
from pyhvd.transport.control import Bell, ControlTransport
from pyhvd.transport.fabric import Fabric, Unavailable
from pyhvd.transport.link_carrier import OpenMpi
from pyhvd.transport.link_layout import hosts_in_order
from pyhvd.transport.shm import OpenWindow


@dataclass(frozen=True, slots=True)
class Topology:
    """This rank's place in the world, on its host, and among the ranks with the same local rank.

    ``hosts`` has, by rank, the lowest rank of the rank's host.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    homogeneous: bool
    hosts: tuple[int, ...]

    @classmethod
    def of(cls, rank: int, host_of: Sequence[int]) -> Topology:
        """Return the place of a rank; ``host_of`` has, by rank, any number that tells the hosts apart."""
        hosts = {host_of[ranks[0]]: ranks for ranks in hosts_in_order(host_of)}
        here = hosts[host_of[rank]]
        local_rank = here.index(rank)
        peers = sorted(ranks[local_rank] for ranks in hosts.values() if local_rank < len(ranks))
        return cls(
            rank=rank,
            size=len(host_of),
            local_rank=local_rank,
            local_size=len(here),
            cross_rank=peers.index(rank),
            cross_size=len(peers),
            homogeneous=len({len(ranks) for ranks in hosts.values()}) == 1,
            hosts=tuple(hosts[host][0] for host in host_of),
        )


@dataclass(slots=True)
class World:
    """The transport of one rank: the engine is built on it.

    Attributes
    ----------
    topology : Topology
        This rank's place.
    fabric : Fabric
        Moves arrays.
    connect : callable
        ``connect(bell)`` returns the control transport; collective. The bell's addresses are the ranks.
        With None the transport makes bells of its own.
    members : callable
        ``members(comm)`` returns the ranks (of this world) of an mpi4py communicator.
    abort : callable
        ``abort()`` ends the world's other ranks by force.
    threads : bool
        Whether MPI_THREAD_MULTIPLE was granted.
    open_window : callable
        Makes memory that the ranks of a fabric share; see :data:`pyhvd.transport.shm.OpenWindow`.
    open_arena : callable
        ``open_arena(fabric)`` makes shared memory for the arrays of a node's ranks; collective.
    open_mpi : callable or None
        Opens MPI as a carrier of links; None: the ranks have no MPI.
    """

    topology: Topology
    fabric: Fabric
    connect: Callable[[Bell | None], ControlTransport]
    members: Callable[[object], tuple[int, ...]]
    abort: Callable[[], None]
    threads: bool
    open_window: OpenWindow
    open_arena: Callable[[Fabric], Arena | Unavailable]
    open_mpi: OpenMpi | None = None
