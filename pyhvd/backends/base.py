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
from pyhvd.transport.fabric import Fabric


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


PhaseHook = Callable[[str], AbstractContextManager[None]]
"""``with phase("MPI_ALLREDUCE"):`` around a part of a collective tells whoever watches."""


def no_phase(name: str) -> AbstractContextManager[None]:  # noqa: ARG001 - nobody watches
    """Tell nobody."""
    return _NOBODY


_NOBODY: AbstractContextManager[None] = nullcontext()


class Backend(Protocol):
    """Runs agreed collectives for one process set; ``name`` is the prefix of its phases' names."""

    rank: int
    size: int
    fabric: Fabric
    name: str
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
