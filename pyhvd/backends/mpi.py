"""The fabric over mpi4py: any ranks, any MPI.

Owns a communicator of its own, so that nothing here can meet the program's own messages. Calls block, with
the GIL released, and are entered only once every rank is known to be ready; a loop of tests would have to
take the GIL back each time, which costs milliseconds while another thread runs Python.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence

from mpi4py import MPI

from pyhvd.arrays import Bytes
from pyhvd.backends.base import Fabric
from pyhvd.backends.shm import NoWindow, Segment, aligned

LARGEST = 1 << 30
"""Bytes of one MPI message at most, and of one buffer given to a collective: MPI's counts are C ints."""


class MpiFabric:
    """Moves bytes between the ranks of a communicator, which it owns and frees."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()

    def allgather(self, send: Bytes, recv: Bytes) -> None:
        """Gather blocks of one length; small ones only (see ``host.FLAT``)."""
        self.comm.Allgather([send, MPI.BYTE], [recv, MPI.BYTE])

    def allgatherv(self, buffer: Bytes, counts: Sequence[int]) -> None:
        """Gather in place."""
        starts = list(itertools.accumulate(counts, initial=0))
        if starts[-1] <= LARGEST:
            self.comm.Allgatherv(MPI.IN_PLACE, [buffer, counts, starts[:-1], MPI.BYTE])
            return
        mine = buffer[starts[self.rank] : starts[self.rank + 1]]
        others = [r for r in range(self.size) if r != self.rank]
        self._swap(dict.fromkeys(others, mine), {r: buffer[starts[r] : starts[r + 1]] for r in others})

    def alltoallv(
        self, send: Bytes, send_counts: Sequence[int], recv: Bytes, recv_counts: Sequence[int]
    ) -> None:
        """Send block r to rank r; a window's bytes at most."""
        out = list(itertools.accumulate(send_counts, initial=0))
        into = list(itertools.accumulate(recv_counts, initial=0))
        self.comm.Alltoallv([send, send_counts, out[:-1], MPI.BYTE], [recv, recv_counts, into[:-1], MPI.BYTE])

    def exchange(
        self, send: Bytes, send_counts: Sequence[int], recv: Bytes, recv_counts: Sequence[int]
    ) -> None:
        """Send block r to rank r, whatever the sizes."""
        out = list(itertools.accumulate(send_counts, initial=0))
        into = list(itertools.accumulate(recv_counts, initial=0))
        me = self.rank
        recv[into[me] : into[me + 1]] = send[out[me] : out[me + 1]]
        others = [r for r in range(self.size) if r != me]
        self._swap(
            {r: send[out[r] : out[r + 1]] for r in others}, {r: recv[into[r] : into[r + 1]] for r in others}
        )

    def broadcast(self, buffer: Bytes, root: int) -> None:
        """Copy the root's buffer to every rank's, piece by piece."""
        for first in range(0, len(buffer), LARGEST):
            self.comm.Bcast([buffer[first : first + LARGEST], MPI.BYTE], root)

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self.comm.Barrier()

    def subset(self, ranks: Sequence[int], tag: int) -> MpiFabric:
        """Return the fabric of some of the ranks; called by exactly those."""
        group = self.comm.Get_group()
        chosen = group.Incl(list(ranks))
        try:
            return MpiFabric(self.comm.Create_group(chosen, tag))
        finally:
            chosen.Free()
            group.Free()

    def close(self) -> None:
        """Free the communicator; collective."""
        self.comm.Free()

    def _swap(self, send: dict[int, Bytes], recv: dict[int, Bytes]) -> None:
        """Send and receive blocks of any size, in messages that MPI can count."""
        requests = [
            self.comm.Irecv([block[k : k + LARGEST], MPI.BYTE], rank)
            for rank, block in recv.items()
            for k in range(0, len(block), LARGEST)
        ]
        requests += [
            self.comm.Isend([block[k : k + LARGEST], MPI.BYTE], rank)
            for rank, block in send.items()
            for k in range(0, len(block), LARGEST)
        ]
        MPI.Request.Waitall(requests)


def open_mpi_window(fabric: Fabric, nbytes: int) -> Segment | NoWindow:
    """Return an MPI shared window of the ranks of a fabric, if they are all on one node."""
    assert isinstance(fabric, MpiFabric)
    comm = fabric.comm
    node = comm.Split_type(MPI.COMM_TYPE_SHARED, key=fabric.rank)
    try:
        if not comm.allreduce(node.Get_size() == fabric.size, MPI.LAND):
            return NoWindow("they are on several nodes", expected=True)
    finally:
        node.Free()
    if cause := comm.bcast(_too_little_memory(nbytes * fabric.size), 0):
        return NoWindow(cause)
    window = None
    try:
        window = MPI.Win.Allocate_shared(nbytes, 1, comm=comm)
        cause = ""
    except MPI.Exception as exc:
        cause = f"MPI_Win_allocate_shared: {exc}"
    causes = [text for text in comm.allgather(cause) if text]
    if causes or window is None:
        if window is not None:
            window.Free()
        return NoWindow(causes[0])
    areas = [aligned(window.Shared_query(rank)[0].address) for rank in range(fabric.size)]
    return Segment(areas, window.Free, window)


def _too_little_memory(needed: int) -> str:
    """Return what is wrong if /dev/shm cannot hold a window: its pages would then be missing when touched."""
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return ""  # no such folder on this system: MPI knows another way
    free = status.f_bavail * status.f_frsize
    if free >= needed + (needed >> 2):
        return ""
    return f"/dev/shm has {free >> 20} MiB free, and {needed / (1 << 20):.1f} MiB are needed"
