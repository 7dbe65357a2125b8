"""The fabric over mpi4py, for any ranks and any MPI; and memory of windows for the ranks of one node.

Owns a communicator, so its messages never match the program's own. Calls block with the GIL released: ranks
enter a collective only when all ranks are ready. A loop of tests would take the GIL back for each test, which
costs milliseconds while another thread runs Python. Process sets across hosts pay for such a loop, see
:meth:`MpiFabric.pause_by`: MPI would wait without end for the ranks of a lost host.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from pyhvd.arrays import Bytes, address
from pyhvd.native.shared_memory import HUGE, Mapping
from pyhvd.transport.arena import Arena
from pyhvd.transport.fabric import Fabric, Pause, PerRank, Unavailable
from pyhvd.transport.shm import LINE, Segment, aligned

LARGEST = 1 << 30
"""Most bytes of one MPI message or collective buffer: MPI's counts are C ints."""
# How long (s) a wait between two tests of a request is, at first and at most.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 2e-3

_given_up: list[MPI.Request] = []  # they keep the buffers into which MPI may still write


class MpiFabric:
    """Moves bytes between the ranks of a communicator, which it owns and frees."""

    _pause: Pause | None = None  # without it MPI waits

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()

    def allgather(self, send: Bytes, recv: Bytes) -> None:
        """Gather small blocks of one length (see ``host.FLAT``)."""
        self._call("allgather", [send, MPI.BYTE], [recv, MPI.BYTE])

    def allgatherv(self, buffer: Bytes, counts: PerRank) -> None:
        """Gather in place."""
        if sum(counts) <= LARGEST:
            self._call("allgatherv", MPI.IN_PLACE, [buffer, counts, _starts(counts), MPI.BYTE])
            return
        blocks = list(enumerate(_blocks(buffer, counts)))
        _, mine = blocks.pop(self.rank)
        self._sendrecv([(r, mine) for r, _ in blocks], blocks)

    def alltoallv(self, send: Bytes, send_counts: PerRank, recv: Bytes, recv_counts: PerRank) -> None:
        """Send block r to rank r, with less than 2**31 bytes per rank."""
        out, into = _starts(send_counts), _starts(recv_counts)
        self._call("alltoallv", [send, send_counts, out, MPI.BYTE], [recv, recv_counts, into, MPI.BYTE])

    def exchange(self, send: Bytes, send_counts: PerRank, recv: Bytes, recv_counts: PerRank) -> None:
        """Send block r to rank r; blocks of any size."""
        out = list(enumerate(_blocks(send, send_counts)))
        into = list(enumerate(_blocks(recv, recv_counts)))
        _, mine = out.pop(self.rank)
        into.pop(self.rank)[1][:] = mine
        self._sendrecv(out, into)

    def pairwise_exchange(self, partner: int, send: Bytes, recv: Bytes) -> None:
        """Exchange blocks of any size with a partner."""
        self._sendrecv([(partner, send)], [(partner, recv)])

    def broadcast(self, buffer: Bytes, root: int) -> None:
        """Copy the root's buffer to every rank's, in pieces."""
        for first in range(0, len(buffer), LARGEST):
            self._call("bcast", [buffer[first : first + LARGEST], MPI.BYTE], root)

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self._call("barrier")

    def subset(self, ranks: Sequence[int], tag: int) -> MpiFabric:
        """Return the fabric of some of the ranks, which waits as this one does; exactly those call it."""
        made = MpiFabric(sub_communicator(self.comm, ranks, tag))
        made._pause = self._pause
        return made

    def pause_by(self, pause: Pause) -> None:
        """Test requests in a loop that calls ``pause``, in place of MPI's own wait."""
        self._pause = pause

    def abort(self, note: bytes) -> None:
        """Do nothing: MPI cannot interrupt a collective. The job ends when this rank shuts down."""

    def close(self) -> None:
        """Free the communicator; collective."""
        self.comm.Free()

    def _sendrecv(self, send: Sequence[tuple[int, Bytes]], recv: Sequence[tuple[int, Bytes]]) -> None:
        """Send and receive blocks, (rank, bytes), of any size."""
        requests = [
            start([block[k : k + LARGEST], MPI.BYTE], rank)
            for start, blocks in ((self.comm.Irecv, recv), (self.comm.Isend, send))
            for rank, block in blocks
            for k in range(0, len(block), LARGEST)
        ]
        self._wait(requests)

    def _call(self, verb: str, *arguments: object) -> None:
        """Carry out a collective."""
        if self._pause is None:
            getattr(self.comm, verb.capitalize())(*arguments)
        else:
            self._wait([getattr(self.comm, f"I{verb}")(*arguments)])

    def _wait(self, requests: list[MPI.Request]) -> None:
        """Wait until all requests are done; those that a lost rank leaves unfinished keep their buffers."""
        if self._pause is None:
            MPI.Request.Waitall(requests)
            return
        seconds = _FIRST_PAUSE_S
        try:
            while not MPI.Request.Testall(requests):
                self._pause(seconds)
                seconds = min(2 * seconds, _LONGEST_PAUSE_S)
        except BaseException:
            _given_up.extend(requests)
            raise


def sub_communicator(comm: MPI.Intracomm, ranks: Sequence[int], tag: int = 0) -> MPI.Intracomm:
    """Return the communicator of some of the ranks; exactly those call it."""
    group = comm.Get_group()
    chosen = group.Incl(list(ranks))
    try:
        return comm.Create_group(chosen, tag)
    finally:
        chosen.Free()
        group.Free()


def _starts(counts: Sequence[int]) -> list[int]:
    return list(itertools.accumulate(counts, initial=0))[:-1]


def _blocks(buffer: Bytes, counts: Sequence[int]) -> list[Bytes]:
    return [buffer[start : start + count] for start, count in zip(_starts(counts), counts, strict=True)]


_ADDRESSES = 1 << 46
"""Most bytes of address space for all arenas of a node."""


def open_mpi_window(fabric: Fabric, nbytes: int) -> Segment | Unavailable:
    """Return memory that the ranks of a fabric share if they are all on one node; collective.

    Each rank allocates its own area: the pages lie on its NUMA node, and a lack of memory shows at once. A
    rank alone gets ordinary memory, so that its host needs no room in /dev/shm.
    """
    assert isinstance(fabric, MpiFabric)
    if fabric.size == 1:
        memory = np.empty(nbytes + LINE, np.uint8)
        return Segment([aligned(address(memory))], memory)
    node = fabric.comm.Split_type(MPI.COMM_TYPE_SHARED, key=fabric.rank)
    try:
        if not fabric.comm.allreduce(node.Get_size() == fabric.size, MPI.LAND):
            return Unavailable("they are on several nodes", expected=True)
    finally:
        node.Free()
    shared = _share_file(fabric, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
    return Unavailable(shared) if isinstance(shared, str) else Segment(shared.starts, shared.memory)


def open_mpi_arena(fabric: Fabric) -> Arena | Unavailable:
    """Return shared memory for the arrays of a fabric's ranks, all on one node; collective."""
    assert isinstance(fabric, MpiFabric)
    shared = _share_file(fabric, 0)
    if isinstance(shared, str):
        return Unavailable(shared)
    return Arena(fabric.rank, shared.starts, shared.nbytes, shared.claim, shared.release, shared.memory)


def _share_file(fabric: MpiFabric, nbytes: int) -> _SharedFile | str:
    """Map a new file with an area of ``nbytes`` for each rank; return it, or the text of a rank's error.

    With 0 bytes an area is sparse, and has the size of the file system. The file lies in /dev/shm.
    """
    with contextlib.ExitStack() as until_all_have_mapped:
        new = _NewFile.make(fabric.size, nbytes, until_all_have_mapped) if fabric.rank == 0 else None
        file: _NewFile = fabric.comm.bcast(new)
        cause, shared = file.problem, None
        if not cause:
            try:
                shared = _SharedFile(file, fabric.rank, fabric.size)
                shared.allocate(0, nbytes)
            except OSError as exc:
                needed = fabric.size * file.nbytes / (1 << 20)
                cause = f"{file.folder}: {exc.strerror} ({needed:.1f} MiB are needed)"
        causes: list[str] = [text for text in fabric.comm.allgather(cause) if text]
    return causes[0] if causes or shared is None else shared


@dataclass(frozen=True)
class _NewFile:
    """A file that one rank has made for all.

    On Linux it has no name, so that nothing is left of a rank that is killed: the others open it by the
    descriptor of the rank that has made it.

    Attributes
    ----------
    folder : str
        Where it lies.
    path : str
        How to open it.
    identity : tuple of int
        Device and inode.
    nbytes : int
        The bytes of a rank's area.
    problem : str
        Why there is no file; empty if there is one.
    """

    folder: str
    path: str = ""
    identity: tuple[int, int] = (0, 0)
    nbytes: int = 0
    problem: str = ""

    @classmethod
    def make(cls, size: int, nbytes: int, stack: contextlib.ExitStack) -> _NewFile:
        """Make a file for so many ranks, which is there until the stack ends."""
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
        try:
            fd, path = _open_new(folder, stack)
            if not nbytes:
                system = os.fstatvfs(fd)
                nbytes = min(system.f_blocks * system.f_frsize, _ADDRESSES // size) // HUGE * HUGE
            os.truncate(fd, size * nbytes)
            status = os.fstat(fd)
        except OSError as exc:
            return cls(folder, problem=f"{folder}: {exc.strerror}")
        problem = "" if nbytes else f"{folder}: the file system has less than {HUGE >> 20} MiB"
        return cls(folder, path, (status.st_dev, status.st_ino), nbytes, problem)

    def open(self) -> int:
        """Return a descriptor of it; raise OSError if this process sees another file there, or none."""
        fd = os.open(self.path, os.O_RDWR)
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) != self.identity:
            os.close(fd)
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        return fd


def _open_new(folder: str, stack: contextlib.ExitStack) -> tuple[int, str]:
    """Open a new file until the stack ends; return its descriptor, and a path that other processes open."""
    if hasattr(os, "O_TMPFILE"):
        with contextlib.suppress(OSError):  # a file system that makes no files without a name
            fd = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
            stack.callback(os.close, fd)
            path = f"/proc/{os.getpid()}/fd/{fd}"
            if os.path.exists(path):
                return fd, path
    fd, path = tempfile.mkstemp(prefix="pyhvd-window-", dir=folder)
    stack.callback(os.close, fd)
    stack.callback(os.unlink, path)
    return fd, path


class _SharedFile:
    """A mapped file with an area for each rank; this rank allocates and frees memory in its own."""

    def __init__(self, file: _NewFile, rank: int, size: int) -> None:
        self.nbytes = nbytes = file.nbytes
        self._first = rank * nbytes
        self._fd = file.open()
        weakref.finalize(self, os.close, self._fd)
        self.memory = Mapping(self._fd, size * nbytes)
        self.starts = [self.memory.start + each * nbytes for each in range(size)]

    def allocate(self, offset: int, nbytes: int) -> None:
        """Allocate memory; else a lack of it is a SIGBUS later."""
        if nbytes and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._fd, self._first + offset, nbytes)

    def claim(self, offset: int, nbytes: int) -> None:
        """Allocate memory, in huge pages if the kernel has them."""
        self.allocate(offset, nbytes)
        self.memory.enlarge(self._first + offset, nbytes)

    def release(self, offset: int, nbytes: int) -> None:
        """Free memory, in all ranks' mappings."""
        self.memory.drop(self._first + offset, nbytes)
