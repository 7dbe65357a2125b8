"""Allocation of outputs whose size comes with the response."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from pyhvd.backends.host import HostBackend
from pyhvd.common.text import describe_ranks
from pyhvd.errors import RankFailedError
from pyhvd.negotiation.messages import Response, verb
from pyhvd.queue import TensorEntry

T = TypeVar("T")
Entries = list[TensorEntry | None]
Shape = tuple[int, ...]


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
