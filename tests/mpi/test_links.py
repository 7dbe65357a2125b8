"""Links between processes: the secret goes over MPI, and descriptors pass between processes."""

from __future__ import annotations

import os
import socket
import time

from mpi4py import MPI

from pyhvd.transport.link_layout import Layout
from pyhvd.transport.links import LinkOptions, Links, open_links
from pyhvd.transport.mpi.fabric import MpiFabric
from tests.mpi.harness import on_ranks


@on_ranks(4)
def test_processes_share_what_the_first_of_their_host_has_connected() -> None:
    """Hosts of 3 and 1 ranks: each local rank uses the one agreement connection, and wakes the next rank."""
    comm = MPI.COMM_WORLD.Dup()
    fabric = MpiFabric(comm)
    rank = comm.Get_rank()
    links = open_links(fabric, Layout(fabric.rank, [0, 0, 0, 1], agreement=True), LinkOptions(timeout=30.0))
    assert isinstance(links, Links), links
    peer = links.agreement[1 - links.layout.host]
    rails = [row[1 - links.layout.host] for row in links.rails]
    assert peer is not None
    assert [rail is not None for rail in rails] == [rank in (k, 3) for k in range(3)]
    until = time.monotonic() + 30.0
    for sender in range(3):
        if rank == sender:
            peer.sendall(b"%d" % rank)
        if rank == 3:
            rail = rails[sender]
            assert rail is not None
            rail.sendall(receive(peer, until))
        if rank == sender:
            rail = rails[sender]
            assert rail is not None
            assert receive(rail, until) == b"%d" % rank
        comm.Barrier()
    if links.layout.local_size > 1:
        os.eventfd_write(links.bells[(rank + 1) % 3], 1 + rank)
    comm.Barrier()
    if links.layout.local_size > 1:
        assert os.eventfd_read(links.bells[rank]) == 1 + (rank - 1) % 3
    links.close()
    comm.Free()


def receive(peer: socket.socket, until: float) -> bytes:
    """Return what arrives first on a socket that does not block."""
    while time.monotonic() < until:
        try:
            return peer.recv(64)
        except BlockingIOError:
            time.sleep(1e-3)
    raise AssertionError("nothing has arrived")
