"""A world over mpi4py: topology, control transport and fabric of a communicator.

Importing this module initialises MPI, unless the program has told mpi4py not to: then :func:`start_mpi` does.
So only ``init()`` imports it.
"""

from __future__ import annotations

import os
import sys
import time

import mpi4py
from mpi4py import MPI

from pyhvd.common import launcher_hooks
from pyhvd.errors import TransportError
from pyhvd.transport.control import Bell, ControlTransport
from pyhvd.transport.doorbell import Doorbell, host_id
from pyhvd.transport.mpi import ending
from pyhvd.transport.mpi.carrier import open_mpi_carrier
from pyhvd.transport.mpi.control import MpiTransport
from pyhvd.transport.mpi.fabric import MpiFabric, open_mpi_arena, open_mpi_window
from pyhvd.transport.tree import Tree
from pyhvd.transport.world import Topology, World


def start_mpi() -> None:
    """Call MPI_Init, with the thread level of ``mpi4py.rc``, if neither mpi4py nor the program has.

    Raises
    ------
    TransportError
        The program has called MPI_Finalize.
    """
    if MPI.Is_finalized():
        raise TransportError(
            "MPI_Finalize was called in this process, and MPI cannot start again: call MPI.Finalize() after"
            " the last hvd.shutdown(), and no hvd.init() after it"
        )
    if MPI.Is_initialized():
        return
    level = mpi4py.rc.thread_level if mpi4py.rc.threads else "single"
    launcher_hooks.before_mpi_init()
    MPI.Init_thread(getattr(MPI, f"THREAD_{level.upper()}"))
    launcher_hooks.after_mpi_init()
    ending.end_at_exit()


def mpi_world(comm: object, *, owned: bool = False) -> World:
    """Return the world of an mpi4py communicator, which is duplicated unless ``owned``.

    Raises
    ------
    TransportError
        MPI's thread level does not allow a background thread.
    """
    assert isinstance(comm, MPI.Intracomm)
    level = MPI.Query_thread()
    if level < MPI.THREAD_SERIALIZED:
        raise TransportError(
            "MPI was initialised with a thread level below MPI_THREAD_SERIALIZED, but pyhvd's background"
            " thread calls MPI: initialise it as mpi4py does, with mpi4py.rc.thread_level = 'multiple'"
        )
    if not owned:
        # mpi4py duplicates a communicator in its first reduction of objects, and holds the GIL until all of
        # its ranks have called that: no background thread, which others wait for, could run meanwhile.
        comm.allreduce(0)
    base = comm if owned else comm.Dup()
    topology = mpi_topology(base)
    tree = Tree.of(topology.rank, topology.hosts)

    def connect(given: Bell | None) -> ControlTransport:
        if given is not None:
            return MpiTransport(base.Dup(), given, range(base.Get_size()), tree)
        bell = Doorbell()
        mine = host_id()
        peers = base.allgather((mine, bell.address))
        bells = [address if host == mine else None for host, address in peers]
        return MpiTransport(base.Dup(), bell, bells, tree)

    def members(other: object) -> tuple[int, ...]:
        assert isinstance(other, MPI.Comm)
        ours, theirs = base.Get_group(), other.Get_group()
        ranks = MPI.Group.Translate_ranks(theirs, None, ours)
        return tuple(sorted(ranks))

    return World(
        topology=topology,
        fabric=MpiFabric(base),
        connect=connect,
        members=members,
        abort=_abort,
        threads=level == MPI.THREAD_MULTIPLE,
        open_window=open_mpi_window,
        open_arena=open_mpi_arena,
        open_mpi=open_mpi_carrier,
    )


_FORWARDING_SECONDS = 0.2


def _abort() -> None:
    """End all ranks, after a pause: MPICH's mpiexec would drop output that it has not yet forwarded.

    Where mpiexec cannot be reached, MPI's Abort returns, and MPI_Finalize would wait: this rank ends at once.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(_FORWARDING_SECONDS)
    MPI.COMM_WORLD.Abort(1)
    os._exit(1)


def mpi_topology(comm: MPI.Intracomm) -> Topology:
    """Return this rank's place among the ranks of a communicator. Collective."""
    local = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.Get_rank())
    try:
        lowest: int = local.bcast(comm.Get_rank())
        return Topology.of(comm.Get_rank(), comm.allgather(lowest))
    finally:
        local.Free()
