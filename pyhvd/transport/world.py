"""A world: the ranks that were started together, and the transport between them.

:mod:`pyhvd.transport.mpi.world` makes worlds of processes, :mod:`pyhvd.transport.inprocess` of threads.
Making a world is collective.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pyhvd.transport.arena import Arena, NoArena
from pyhvd.transport.control import Bell, ControlTransport
from pyhvd.transport.fabric import Fabric
from pyhvd.transport.shm import OpenWindow


@dataclass(frozen=True, slots=True)
class Topology:
    """This rank's place in the world, on its node, and among the ranks with the same local rank."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    homogeneous: bool


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
    """

    topology: Topology
    fabric: Fabric
    connect: Callable[[Bell | None], ControlTransport]
    members: Callable[[object], tuple[int, ...]]
    abort: Callable[[], None]
    threads: bool
    open_window: OpenWindow
    open_arena: Callable[[Fabric], Arena | NoArena]
