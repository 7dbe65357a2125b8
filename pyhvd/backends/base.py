"""What a backend and a fabric must do.

A *backend* runs agreed collectives for one process set. A *fabric* moves bytes between the set's ranks;
:class:`~pyhvd.backends.host.HostBackend` builds every host collective from a fabric's few operations, so
that MPI and ranks-as-threads share one set of algorithms. Ranks here are set ranks: 0 .. size-1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from pyhvd.arrays import Bytes, TensorView
from pyhvd.dtypes import DtypeInfo, ReduceOp


@dataclass(frozen=True, slots=True)
class Pieces:
    """Into which pieces (bytes) tensors are cut; the same on every rank.

    Attributes
    ----------
    chunk_size : int
        A chunk of a shared window's pipeline.
    staging_size : int
        What goes in one piece elsewhere.
    """

    chunk_size: int
    staging_size: int


class Aborted(Exception):
    """A rank of the set cannot go on, and has aborted its collectives.

    Attributes
    ----------
    note : bytes
        What it has left for the others. Whoever calls the backend knows what that means.
    """

    def __init__(self, note: bytes) -> None:
        super().__init__(note)
        self.note = note


Block = tuple[int, Bytes]
"""A set rank, and bytes for it or from it."""


class Fabric(Protocol):
    """Moves bytes between the ranks of one process set. Every call is collective; all buffers are flat."""

    rank: int
    size: int

    def allgather(self, send: Bytes, recv: Bytes) -> None:
        """Gather ``send`` of every rank, all of one length, into ``recv`` in rank order."""

    def allgatherv(self, buffer: Bytes, counts: Sequence[int]) -> None:
        """Gather in place: rank r's block, ``counts[r]`` bytes, lies in its place in rank r's buffer."""

    def alltoallv(
        self, send: Bytes, send_counts: Sequence[int], recv: Bytes, recv_counts: Sequence[int]
    ) -> None:
        """Send the r-th block of ``send`` to rank r; blocks lie one behind the other, counts in bytes.

        For windows and counts: no rank sends or receives 2**31 bytes or more.
        """

    def exchange(
        self, send: Bytes, send_counts: Sequence[int], recv: Bytes, recv_counts: Sequence[int]
    ) -> None:
        """Do as ``alltoallv`` does, for blocks of any size."""

    def swap(self, partner: int, send: Bytes, recv: Bytes) -> None:
        """Give each other blocks of any size: all ranks at a time, in pairs."""

    def broadcast(self, buffer: Bytes, root: int) -> None:
        """Copy the root's buffer to every rank's."""

    def takes_devices(self) -> str:
        """Return what carries memory on devices in :meth:`trade`: name and version. Not collective.

        Raises
        ------
        RuntimeError
            Nothing does, so that there must be none; the text says why.
        """

    def trade(self, send: Sequence[Block], recv: Sequence[Block], patience: float | None = None) -> None:
        """Send blocks, and receive others; of two ranks both name the same ones, in the same order.

        Of the memory nothing is looked at here, so that it may be on a device if :meth:`takes_devices`.

        Parameters
        ----------
        send, recv : sequence of (int, numpy.ndarray of uint8)
            The other rank, and the block; of any size.
        patience : float, optional
            Seconds; by default as long as it takes.

        Raises
        ------
        TimeoutError
            It is not over yet. The blocks may be written to for ever, and nothing must be traded any more.
        """

    def barrier(self) -> None:
        """Return when every rank has called it."""

    def subset(self, ranks: Sequence[int], tag: int) -> Fabric:
        """Return the fabric of some of the ranks; called by exactly those. ``tag`` tells sets apart."""

    def abort(self, note: bytes) -> None:
        """Let no rank wait in a call any longer: it raises :class:`Aborted`, where the carrier has a way.

        Not collective; from any thread. The first note that a rank finds is the one that it gets. Nothing
        but :meth:`close` may follow.
        """

    def close(self) -> None:
        """Give up what the fabric holds; collective."""


PhaseHook = Callable[[str], AbstractContextManager[None]]
"""``with phase("MPI_ALLREDUCE"):`` around a part of a collective tells whoever watches."""


def no_phase(name: str) -> AbstractContextManager[None]:  # noqa: ARG001 - nobody watches
    """Tell nobody."""
    return _NOBODY


_NOBODY: AbstractContextManager[None] = nullcontext()


class Backend(Protocol):
    """Runs agreed collectives for one process set; ``carrier`` is in the names of its phases."""

    rank: int
    size: int
    fabric: Fabric
    carrier: str
    pieces: Pieces

    def allreduce(
        self,
        sources: Sequence[TensorView | None],
        targets: Sequence[TensorView | None],
        counts: Sequence[int],
        info: DtypeInfo,
        op: ReduceOp,
        prescale: float,
        postscale: float,
    ) -> None:
        """Reduce tensors that ride together; None stands for a rank that has joined."""

    def adasum(
        self,
        sources: Sequence[TensorView | None],
        targets: Sequence[TensorView | None],
        counts: Sequence[int],
        info: DtypeInfo,
        prescale: float,
        postscale: float,
    ) -> None:
        """Reduce tensors by Adasum, each by itself; None stands for a rank that has joined."""

    def reducescatter(
        self,
        sources: Sequence[TensorView | None],
        targets: Sequence[TensorView | None],
        shapes: Sequence[tuple[int, ...]],
        info: DtypeInfo,
        op: ReduceOp,
        prescale: float,
        postscale: float,
    ) -> None:
        """Reduce, and leave each rank its own rows of dimension 0."""

    def allgather(
        self, sources: Sequence[TensorView | None], targets: Sequence[Bytes], counts: Sequence[Sequence[int]]
    ) -> None:
        """Concatenate; ``counts[i][r]`` is the number of bytes that rank r gives to tensor i."""

    def broadcast(self, buffer: Bytes, root: int) -> None:
        """Copy the root's bytes to every rank."""

    def swap_counts(self, counts: Sequence[int]) -> list[int]:
        """Tell rank r ``counts[r]``; return what each rank tells this one."""

    def alltoall(
        self, send: Bytes, send_counts: Sequence[int], recv: Bytes, recv_counts: Sequence[int]
    ) -> None:
        """Exchange blocks of uneven size; counts in bytes."""

    def resize(self, pieces: Pieces) -> None:
        """Cut what comes next into other pieces; between the same two calls on every rank."""

    def agree(self, ok: bool) -> list[int]:
        """Return the ranks on which ``ok`` is false: the same list on every rank."""

    def abort(self, note: bytes) -> None:
        """Let no rank of the set wait for this one any longer; see :meth:`Fabric.abort`."""

    def close(self) -> None:
        """Give up what the backend holds; collective."""
