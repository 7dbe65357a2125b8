"""What all backends share: views of tensors, sizes of pieces, and the hook that records phases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from pyhvd.arrays import TensorView


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


class Phases:
    """Who records the phases of collectives: here, nobody.

    ``with phases.phase("MPI_ALLREDUCE"):`` records one.
    """

    phase: Callable[[str], AbstractContextManager[object]] = nullcontext


Views = Sequence[TensorView | None]
"""A view per tensor; None if this rank has joined."""
