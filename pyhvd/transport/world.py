"""A world: the ranks that were started together, as pyhvd sees them before it negotiates anything.

Owns: the parts that the engine is built on, and how they are made for ranks that are threads of one process
(for MPI see :mod:`pyhvd.transport.mpi.world`). Every call that builds a world is collective.
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
    """Where this rank stands: in the world, on its node, and among the ranks of its local rank."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    homogeneous: bool


@dataclass(slots=True)
class World:
    """What the engine is built on.

    Attributes
    ----------
    topology : Topology
        This rank's place.
    fabric : Fabric
        Moves arrays.
    exchange : callable
        ``exchange(payload)`` returns every rank's payload, in rank order; collective; used while starting.
    connect : callable
        ``connect(bell)`` returns the control transport; collective. The bell's addresses are the ranks;
        without one the transport sees to its own.
    members : callable
        ``members(comm)`` returns the ranks (of this world) of an mpi4py communicator.
    abort : callable
        ``abort()`` ends the world's other ranks where nothing else can.
    threads : bool
        Whether MPI_THREAD_MULTIPLE was granted.
    open_window : callable
        Makes memory that the ranks of a fabric share; see :mod:`pyhvd.backends.shm`.
    open_arena : callable
        Makes memory for arrays that the ranks of a fabric, all on one node, share; collective.
    """

    topology: Topology
    fabric: Fabric
    exchange: Callable[[bytes], list[bytes]]
    connect: Callable[[Bell | None], ControlTransport]
    members: Callable[[object], tuple[int, ...]]
    abort: Callable[[], None]
    threads: bool
    open_window: OpenWindow
    open_arena: Callable[[Fabric], Arena | NoArena]
