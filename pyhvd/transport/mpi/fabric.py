"""The fabric over mpi4py: any ranks, any MPI.

Owns a communicator of its own, so that nothing here can meet the program's own messages. Calls block, with
the GIL released, and are entered only once every rank is known to be ready; a loop of tests would have to
take the GIL back each time, which costs milliseconds while another thread runs Python.
"""

from __future__ import annotations

import itertools
import mmap
import os
import tempfile
import weakref
from collections.abc import Sequence

from mpi4py import MPI

from pyhvd.arrays import Bytes
from pyhvd.native.shared_memory import HUGE, Mapping
from pyhvd.transport.arena import Arena, NoArena
from pyhvd.transport.fabric import Block, Fabric
from pyhvd.transport.shm import NoWindow, Segment

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
        self._swap([(r, mine) for r in others], [(r, buffer[starts[r] : starts[r + 1]]) for r in others])

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
            [(r, send[out[r] : out[r + 1]]) for r in others],
            [(r, recv[into[r] : into[r + 1]]) for r in others],
        )

    def swap(self, partner: int, send: Bytes, recv: Bytes) -> None:
        """Give each other blocks of any size."""
        self._swap([(partner, send)], [(partner, recv)])

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

    def abort(self, note: bytes) -> None:
        """Do nothing: MPI lets nobody out of a collective. The job ends when this rank shuts down."""

    def close(self) -> None:
        """Free the communicator; collective."""
        self.comm.Free()

    def _swap(self, send: Sequence[Block], recv: Sequence[Block]) -> None:
        """Send and receive blocks of any size."""
        requests = [
            self.comm.Irecv([block[k : k + LARGEST], MPI.BYTE], rank)
            for rank, block in recv
            for k in range(0, len(block), LARGEST)
        ]
        requests += [
            self.comm.Isend([block[k : k + LARGEST], MPI.BYTE], rank)
            for rank, block in send
            for k in range(0, len(block), LARGEST)
        ]
        MPI.Request.Waitall(requests)


def open_mpi_window(fabric: Fabric, nbytes: int) -> Segment | NoWindow:
    """Return memory that the ranks of a fabric share, if they are all on one node.

    A file in /dev/shm, unlinked as soon as all have it open. Each rank claims its own part of it, which puts
    the pages next to it, and says so at once if there is too little memory.
    """
    assert isinstance(fabric, MpiFabric)
    comm, size = fabric.comm, fabric.size
    node = comm.Split_type(MPI.COMM_TYPE_SHARED, key=fabric.rank)
    try:
        if not comm.allreduce(node.Get_size() == size, MPI.LAND):
            return NoWindow("they are on several nodes", expected=True)
    finally:
        node.Free()
    stride = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    path, cause = comm.bcast(_new_file(size * stride) if fabric.rank == 0 else None, 0)
    memory: Mapping | None = None
    if not cause:
        try:
            memory = _map(path, fabric.rank * stride, stride, size * stride)
        except OSError as exc:
            cause = f"{path}: {exc.strerror} ({size * stride / (1 << 20):.1f} MiB are needed)"
    causes = [text for text in comm.allgather(cause) if text]
    if path and fabric.rank == 0:
        os.unlink(path)
    if causes or memory is None:
        return NoWindow(causes[0])
    return Segment([memory.start + rank * stride for rank in range(size)], memory)


def _new_file(nbytes: int) -> tuple[str, str]:
    """Return the path of a new file of so many bytes, or what is wrong."""
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
    try:
        fd, path = tempfile.mkstemp(prefix="pyhvd-", dir=folder)
    except OSError as exc:
        return "", f"{folder}: {exc.strerror}"
    os.ftruncate(fd, nbytes)
    os.close(fd)
    return path, ""


def _map(path: str, first: int, own: int, nbytes: int) -> Mapping:
    """Map a file, and claim this rank's own part of it."""
    fd = os.open(path, os.O_RDWR)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, first, own)  # without it, touching a page that is not to be had is SIGBUS
        return Mapping(fd, nbytes)
    finally:
        os.close(fd)


_ADDRESSES = 1 << 46
"""Bytes of address space that all arenas of a node may take."""


def open_mpi_arena(fabric: Fabric) -> Arena | NoArena:
    """Return memory for arrays that the ranks of a fabric, all on one node, share.

    A sparse file in /dev/shm, for each rank as large as that could ever be, unlinked as soon as all have it.
    """
    assert isinstance(fabric, MpiFabric)
    comm, rank, size = fabric.comm, fabric.rank, fabric.size
    stride, path, cause = comm.bcast(_sparse_file(size) if rank == 0 else None, 0)
    part: _OwnPart | None = None
    if not cause:
        try:
            part = _OwnPart(path, rank * stride, size * stride)
        except OSError as exc:
            cause = f"{path}: {exc.strerror}"
    causes = [text for text in comm.allgather(cause) if text]
    if path and rank == 0:
        os.unlink(path)
    if causes or part is None:
        return NoArena(causes[0])
    starts = [part.memory.start + each * stride for each in range(size)]
    return Arena(rank, starts, stride, part.claim, part.release, part.memory)


def _sparse_file(size: int) -> tuple[int, str, str]:
    """Return each rank's bytes in a new sparse file, and its path, or what is wrong."""
    path, cause = _new_file(0)
    if cause:
        return 0, path, cause
    system = os.statvfs(path)
    stride = min(system.f_blocks * system.f_frsize, _ADDRESSES // size) // HUGE * HUGE
    try:
        os.truncate(path, size * stride)
    except OSError as exc:
        return 0, path, f"{path}: {exc.strerror}"
    return stride, path, "" if stride else f"{path}: too small a file system"


class _OwnPart:
    """A file in memory, one part of which this rank gets memory for, and gives it back."""

    def __init__(self, path: str, first: int, nbytes: int) -> None:
        self._first = first
        self._fd = os.open(path, os.O_RDWR)
        weakref.finalize(self, os.close, self._fd)
        self.memory = Mapping(self._fd, nbytes)

    def claim(self, offset: int, nbytes: int) -> None:
        """Put memory behind a part; without it, touching a page that is not to be had is SIGBUS."""
        os.posix_fallocate(self._fd, self._first + offset, nbytes)
        self.memory.enlarge(self._first + offset, nbytes)

    def release(self, offset: int, nbytes: int) -> None:
        """Give memory back; every rank's mapping loses it."""
        self.memory.drop(self._first + offset, nbytes)
