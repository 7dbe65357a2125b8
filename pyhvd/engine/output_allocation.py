"""Outputs whose size comes with the response: their layout, and their allocation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from pyhvd.arrays import Array
from pyhvd.backends.host import HostBackend
from pyhvd.common.text import describe_ranks
from pyhvd.dtypes import BY_CODE
from pyhvd.errors import RankFailedError
from pyhvd.negotiation.messages import Response, verb
from pyhvd.queue import TensorEntry

T = TypeVar("T")
Entries = list[TensorEntry | None]
Shape = tuple[int, ...]


def gathered(batch: Sequence[Response]) -> tuple[list[Shape], list[list[int]]]:
    """Return the shapes of the outputs of allgathers, and the bytes of each that a rank sends."""
    shapes = [(sum(r.dims), *r.request.shape[1:]) for r in batch]
    item = BY_CODE[batch[0].request.dtype].itemsize
    rows = [math.prod(shape[1:]) * item for shape in shapes]
    return shapes, [[n * row for n in r.dims] for r, row in zip(batch, rows, strict=True)]


def as_splits(received: Sequence[int]) -> Array:
    """Return the rows that an alltoall has received from each rank as the array that the caller gets."""
    few = max(received) <= np.iinfo(np.int32).max
    return np.array(received, np.int32 if few else np.int64)


def allocate(
    backend: HostBackend,
    batch: Sequence[Response],
    entries: Entries,
    shapes: Sequence[Shape],
    make: Callable[[Response, TensorEntry | None, Shape], T],
    members: Sequence[int],
) -> list[T] | None:
    """Allocate outputs; if one rank cannot, all ranks fail these tensors and continue. Collective.

    Parameters
    ----------
    backend : HostBackend
        Backend by which the ranks agree on the outcome.
    batch, entries, shapes
        The tensors, and the shapes of their outputs.
    make : callable
        Returns one output; raises MemoryError or ValueError if there is no memory for it.
    members : sequence of int
        The set's global ranks.

    Returns
    -------
    list or None
        The outputs; None if the entries have failed.
    """
    outputs: list[T] = []
    failure: MemoryError | ValueError | None = None
    try:
        for response, entry, shape in zip(batch, entries, shapes, strict=True):
            outputs.append(make(response, entry, shape))
    except (MemoryError, ValueError) as exc:
        failure = exc
    failed = backend.agree(ok=failure is None) if backend.size > 1 else [0] * (failure is not None)
    if not failed:
        return outputs
    ranks = describe_ranks([members[i] for i in failed])
    for response, entry, shape in zip(batch, entries, shapes, strict=True):
        if entry is not None:
            what = f"{verb(response.request.type)} {response.request.name!r}"
            text = f"{what}: no memory for its output of shape {shape} on {ranks}"
            error = RankFailedError(text, members[failed[0]])
            error.__cause__ = failure
            entry.done(None, error)
    return None
