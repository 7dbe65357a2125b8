"""The interface of backends, which run the agreed collectives of one process set on host arrays.

:class:`~pyhvd.backends.host.HostBackend` builds every collective from the few operations of a *fabric*, so
MPI and ranks as threads share one set of algorithms. Ranks are set ranks: 0 .. size-1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from pyhvd.arrays import Bytes, TensorView
from pyhvd.dtypes import ReduceSpec
from pyhvd.transport.fabric import Fabric


@dataclass(frozen=True, slots=True)
class Pieces:
    """The sizes, in bytes, of the pieces of tensors; equal on all ranks.

    Attributes
    ----------
    chunk_size : int
        Size of a chunk in a window's pipeline.
    staging_size : int
        Size of a piece in all other algorithms.
    """

    chunk_size: int
    staging_size: int


PhaseHook = Callable[[str], AbstractContextManager[object]]
"""``with phase("MPI_ALLREDUCE"):`` records a phase of a collective."""


class Phases:
    """Who records the phases of collectives: here, nobody."""

    phase: PhaseHook = nullcontext


Views = Sequence[TensorView | None]
"""A view per tensor; None if this rank has joined."""


class Backend(Protocol):
    """Runs agreed collectives for one process set; its phases' names start with ``name``."""

    rank: int
    size: int
    fabric: Fabric
    name: str
    pieces: Pieces

    def allreduce(self, sources: Views, targets: Views, counts: Sequence[int], spec: ReduceSpec) -> None:
        """Reduce tensors that are fused."""

    def adasum(self, sources: Views, targets: Views, counts: Sequence[int], spec: ReduceSpec) -> None:
        """Reduce tensors by Adasum, each tensor by itself."""

    def reducescatter(
        self, sources: Views, targets: Views, shapes: Sequence[tuple[int, ...]], spec: ReduceSpec
    ) -> None:
        """Reduce; each rank gets its own rows of dimension 0."""

    def allgather(self, sources: Views, targets: Sequence[Bytes], counts: Sequence[Sequence[int]]) -> None:
        """Concatenate the ranks' blocks; rank r's block of tensor i has ``counts[i][r]`` bytes."""

    def broadcast(self, buffer: Bytes, root: int) -> None:
        """Copy the root's bytes to all ranks."""

    def exchange_counts(self, counts: Sequence[int]) -> list[int]:
        """Send ``counts[r]`` to rank r; return each rank's count for this rank."""

    def alltoall(
        self, send: Bytes, send_counts: Sequence[int], recv: Bytes, recv_counts: Sequence[int]
    ) -> None:
        """Send the r-th block of ``send`` to rank r; counts are bytes, and may differ."""

    def resize(self, pieces: Pieces) -> None:
        """Change the size of pieces, between the same two collectives on all ranks."""

    def agree(self, ok: bool) -> list[int]:
        """Return the ranks on which ``ok`` is false; collective."""

    def abort(self, note: bytes) -> None:
        """Make the ranks that wait for this one fail; see :meth:`Fabric.abort`."""

    def close(self) -> None:
        """Free the backend's resources; collective."""
