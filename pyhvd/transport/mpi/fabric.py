"""The fabric over mpi4py, for any ranks and any MPI; and shared memory for the ranks of one node.

Owns a communicator, so its messages never match the program's own. Calls block with the GIL released: ranks
enter a collective only when all ranks are ready. A loop of tests would take the GIL back for each test, which
costs milliseconds while another thread runs Python.
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
from pyhvd.transport.fabric import Fabric
from pyhvd.transport.shm import NoWindow, Segment

LARGEST = 1 << 30
"""Most bytes of one MPI message or collective buffer: MPI's counts are C ints."""


class MpiFabric:
    """Moves bytes between the ranks of a communicator, which it owns and frees."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()

    def allgather(self, send: Bytes, recv: Bytes) -> None:
        """Gather small blocks of one length (see ``host.FLAT``)."""
        self.comm.Allgather([send, MPI.BYTE], [recv, MPI.BYTE])

    def allgatherv(self, buffer: Bytes, counts: Sequence[int]) -> None:
        """Gather in place."""
        starts = list(itertools.accumulate(counts, initial=0))
        if starts[-1] <= LARGEST:
            self.comm.Allgatherv(MPI.IN_PLACE, [buffer, counts, starts[:-1], MPI.BYTE])
            return
        mine = buffer[starts[self.rank] : starts[self.rank + 1]]
        others = [r for r in range(self.size) if r != self.rank]
        self._sendrecv([(r, mine) for r in others], [(r, buffer[starts[r] : starts[r + 1]]) for r in others])

    def alltoallv(
        self, send: Bytes, send_counts: Sequence[int], recv: Bytes, recv_counts: Sequence[int]
    ) -> None:
        """Send block r to rank r, with less than 2**31 bytes per rank."""
        out = list(itertools.accumulate(send_counts, initial=0))
        into = list(itertools.accumulate(recv_counts, initial=0))
        self.comm.Alltoallv([send, send_counts, out[:-1], MPI.BYTE], [recv, recv_counts, into[:-1], MPI.BYTE])

    def exchange(
        self, send: Bytes, send_counts: Sequence[int], recv: Bytes, recv_counts: Sequence[int]
    ) -> None:
        """Send block r to rank r; blocks of any size."""
        out = list(itertools.accumulate(send_counts, initial=0))
        into = list(itertools.accumulate(recv_counts, initial=0))
        me = self.rank
        recv[into[me] : into[me + 1]] = send[out[me] : out[me + 1]]
        others = [r for r in range(self.size) if r != me]
        self._sendrecv(
            [(r, send[out[r] : out[r + 1]]) for r in others],
            [(r, recv[into[r] : into[r + 1]]) for r in others],
        )

    def pairwise_exchange(self, partner: int, send: Bytes, recv: Bytes) -> None:
        """Exchange blocks of any size with a partner."""
        self._sendrecv([(partner, send)], [(partner, recv)])

    def broadcast(self, buffer: Bytes, root: int) -> None:
        """Copy the root's buffer to every rank's, in pieces."""
        for first in range(0, len(buffer), LARGEST):
            self.comm.Bcast([buffer[first : first + LARGEST], MPI.BYTE], root)

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self.comm.Barrier()

    def subset(self, ranks: Sequence[int], tag: int) -> MpiFabric:
        """Return the fabric of some of the ranks; exactly those call it."""
        group = self.comm.Get_group()
        chosen = group.Incl(list(ranks))
        try:
            return MpiFabric(self.comm.Create_group(chosen, tag))
        finally:
            chosen.Free()
            group.Free()

    def abort(self, note: bytes) -> None:
        """Do nothing: MPI cannot interrupt a collective. The job ends when this rank shuts down."""

    def close(self) -> None:
        """Free the communicator; collective."""
        self.comm.Free()

    def _sendrecv(self, send: Sequence[tuple[int, Bytes]], recv: Sequence[tuple[int, Bytes]]) -> None:
        """Send and receive blocks, (rank, bytes), of any size."""
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
    """Return memory that the ranks of a fabric share if they are all on one node; collective.

    The memory is a file in /dev/shm, unlinked when all ranks have mapped it. Each rank allocates its own
    area: the pages lie on its NUMA node, and a lack of memory shows at once.
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
    """Return the path of a new file of ``nbytes`` bytes, and an error's text; one of the two is empty."""
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
    try:
        fd, path = tempfile.mkstemp(prefix="pyhvd-", dir=folder)
    except OSError as exc:
        return "", f"{folder}: {exc.strerror}"
    os.ftruncate(fd, nbytes)
    os.close(fd)
    return path, ""


def _map(path: str, first: int, own: int, nbytes: int) -> Mapping:
    """Map a file of ``nbytes`` bytes, and allocate this rank's area, ``own`` bytes from ``first`` on."""
    fd = os.open(path, os.O_RDWR)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, first, own)  # else a lack of memory is a SIGBUS later
        return Mapping(fd, nbytes)
    finally:
        os.close(fd)


_ADDRESSES = 1 << 46
"""Most bytes of address space for all arenas of a node."""


def open_mpi_arena(fabric: Fabric) -> Arena | NoArena:
    """Return shared memory for the arrays of a fabric's ranks, all on one node; collective.

    The memory is a sparse file in /dev/shm, with the size of the file system for each rank, unlinked when all
    ranks have mapped it.
    """
    assert isinstance(fabric, MpiFabric)
    comm, rank, size = fabric.comm, fabric.rank, fabric.size
    stride, path, cause = comm.bcast(_sparse_file(size) if rank == 0 else None, 0)
    mine: _OwnArena | None = None
    if not cause:
        try:
            mine = _OwnArena(path, rank * stride, size * stride)
        except OSError as exc:
            cause = f"{path}: {exc.strerror}"
    causes = [text for text in comm.allgather(cause) if text]
    if path and rank == 0:
        os.unlink(path)
    if causes or mine is None:
        return NoArena(causes[0])
    starts = [mine.memory.start + each * stride for each in range(size)]
    return Arena(rank, starts, stride, mine.claim, mine.release, mine.memory)


def _sparse_file(size: int) -> tuple[int, str, str]:
    """Return each rank's bytes in a new sparse file, the file's path, and an error's text."""
    path, cause = _new_file(0)
    if cause:
        return 0, path, cause
    system = os.statvfs(path)
    stride = min(system.f_blocks * system.f_frsize, _ADDRESSES // size) // HUGE * HUGE
    try:
        os.truncate(path, size * stride)
    except OSError as exc:
        return 0, path, f"{path}: {exc.strerror}"
    return stride, path, "" if stride else f"{path}: the file system has less than {HUGE >> 20} MiB"


class _OwnArena:
    """A mapped file; this rank allocates and frees memory in its own area of it."""

    def __init__(self, path: str, first: int, nbytes: int) -> None:
        self._first = first
        self._fd = os.open(path, os.O_RDWR)
        weakref.finalize(self, os.close, self._fd)
        self.memory = Mapping(self._fd, nbytes)

    def claim(self, offset: int, nbytes: int) -> None:
        """Allocate memory; else a lack of it is a SIGBUS later."""
        os.posix_fallocate(self._fd, self._first + offset, nbytes)
        self.memory.enlarge(self._first + offset, nbytes)

    def release(self, offset: int, nbytes: int) -> None:
        """Free memory, in all ranks' mappings."""
        self.memory.drop(self._first + offset, nbytes)
