"""A world: the ranks that were started together, as pyhvd sees them before it negotiates anything.

Owns: the parts that the engine is built on, and how they are made for ranks that are threads of one process
(for MPI see :mod:`pyhvd.transport.mpi.world`). Every call that builds a world is collective.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from pyhvd.backends.base import Fabric
from pyhvd.backends.shm import OpenWindow
from pyhvd.transport.arena import Arena, NoArena
from pyhvd.transport.control import Bell, ControlTransport, InProcessTransport, Mailbox
from pyhvd.transport.inprocess import Meeting, ThreadFabric, open_thread_arena, open_thread_window


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


class ThreadWorlds:
    """The shared part of ``size`` ranks that are threads of one process.

    Parameters
    ----------
    size : int
        Number of ranks.
    timeout : float
        Seconds after which a rank that waits for another one gives up.
    """

    def __init__(self, size: int, timeout: float) -> None:
        self._size = size
        self._timeout = timeout
        self._lock = threading.Lock()
        self._meetings: list[Meeting] = []
        self._boxes: list[list[Mailbox]] = []
        self._turns = [0] * size

    def world(self, rank: int) -> World:
        """Return one rank's next world: the n-th calls of all ranks belong together."""
        with self._lock:
            turn = self._turns[rank]
            self._turns[rank] += 1
            if turn == len(self._meetings):
                self._meetings.append(Meeting(self._size, self._timeout))
                self._boxes.append([Mailbox() for _ in range(self._size)])
            meeting, boxes = self._meetings[turn], self._boxes[turn]
        fabric = ThreadFabric(meeting, rank)
        return World(
            topology=Topology(rank, self._size, rank, self._size, 0, 1, True),
            fabric=fabric,
            exchange=fabric.exchange_objects,
            connect=lambda bell: InProcessTransport(rank, boxes, bell),
            members=_no_communicators,
            abort=meeting.abort,
            threads=True,
            open_window=open_thread_window,
            open_arena=open_thread_arena,
        )

    def abort(self) -> None:
        """Let no rank wait for another any longer."""
        with self._lock:
            meetings = list(self._meetings)
        for meeting in meetings:
            meeting.abort()


def _no_communicators(comm: object) -> tuple[int, ...]:
    raise ValueError(f"ranks that are threads have no MPI communicators, so {comm!r} means nothing to them")
