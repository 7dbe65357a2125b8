"""What the ranks' sizes make of a call: its outputs, and how a rank takes part when the call is remembered.

Owns: the layout and the allocation of outputs whose size comes with the response, and the plans of remembered
calls: what each rank copies, or reduces. All is pure but :func:`allocate`.

A rank has a lane in a move (``pyhvd_local_move`` in ``common/job.h``): the bytes that it has for the others.
In an all-to-all the block for the next rank comes first, so that each rank reads from another one at a time.
Between hosts the lanes are those of :mod:`pyhvd.transport.moves`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

from pyhvd.arrays import Array
from pyhvd.backends.host import HostBackend, rows_of
from pyhvd.common.text import describe_ranks
from pyhvd.dtypes import BY_CODE
from pyhvd.errors import RankFailedError
from pyhvd.negotiation.messages import UNNAMED, Request, RequestType, Response, verb
from pyhvd.queue import TensorEntry
from pyhvd.transport.moves import MOST_BLOCKS, Ints, Move, MoveLayout, Portions, before

T = TypeVar("T")
Entries = list[TensorEntry | None]
Shape = tuple[int, ...]


class LocalMove(NamedTuple):
    """What one rank copies.

    Attributes
    ----------
    sources, targets : int64 arrays, 4 columns
        Parts: lane (a set rank), offset in the lane, bytes, offset in this rank's source or target; sorted.
    own : (int, int, int)
        What the rank copies from its source to its target: offsets there and there, and the bytes.
    origins : int64 array
        Where each target begins in the source of its lane's owner.
    longest, total : int
        Bytes of the longest lane, and of all; the same on all ranks.
    starts : int64 array, optional
        Over several hosts: where each lane begins if they lie in the order of the hosts.
    """

    sources: Ints
    targets: Ints
    own: tuple[int, int, int]
    origins: Ints
    longest: int
    total: int
    starts: Ints | None = None


class HostPlaces(NamedTuple):
    """The hosts of a process set, as a rank sees them.

    Attributes
    ----------
    layout : MoveLayout
        Says which bytes go where.
    chunk : int
        Bytes of a chunk.
    order : sequence of int
        The set ranks in the order of the hosts that agree, in which a payload has their lanes.
    """

    layout: MoveLayout
    chunk: int
    order: Sequence[int]


@dataclass(frozen=True, eq=False)
class Plan:
    """How one rank takes part in a remembered call.

    Attributes
    ----------
    own_name : bool
        Whether pyhvd has made up the tensor's name.
    rows : int
        Rows of the result; -1: it has the tensor's shape.
    beside : object
        What the caller gets beside the result of an allgather or alltoall: the rows from each rank.
    splits : tuple of int
        Rows for each rank (alltoall).
    even : bool
        Whether these are the rows of a call without splits.
    move : LocalMove, optional
        For verbs that reduce nothing.
    moves : tuple of Move
        Over several hosts: how the bytes get there. Addresses count from the source and the target.
    portions : Portions, optional
        Of a reducescatter.
    """

    own_name: bool = False
    rows: int = -1
    beside: Any = None
    splits: tuple[int, ...] = ()
    even: bool = False
    move: LocalMove | None = None
    moves: tuple[Move, ...] = ()
    portions: Portions | None = None


def make_plan(
    request: Request,
    rank: int,
    members: Sequence[int],
    dims: Sequence[int],
    splits: Ints | None,
    across: HostPlaces | None,
) -> Plan | None:
    """Return the plan of a call; None if it cannot be remembered.

    Parameters
    ----------
    request : Request
        This rank's own.
    rank : int
        This set rank.
    members : sequence of int
        The set's global ranks.
    dims : sequence of int
        The first dimension on each set rank (allgather).
    splits : int64 array, optional
        In row s the rows that set rank s has for each set rank (alltoall).
    across : HostPlaces, optional
        The set's hosts, if it has several.
    """
    size, shape, own = len(members), request.shape, UNNAMED in request.name.split(".")
    if request.type in (RequestType.ALLREDUCE, RequestType.BARRIER):
        return Plan(own)
    row = math.prod(shape[1:])
    if request.type == RequestType.REDUCESCATTER:
        rows, by_slice = rows_of(shape[0], size), None if across is None else across.layout.by_slice
        if by_slice is not None and len(by_slice) > MOST_BLOCKS:
            return None
        return Plan(own, rows[rank], portions=Portions.of([n * row for n in rows], rank, by_slice))
    item = BY_CODE[request.dtype].itemsize
    moves: tuple[Move, ...] = ()
    row *= item
    if request.type == RequestType.ALLTOALL:
        assert splits is not None
        mine, received = splits[rank].tolist(), splits[:, rank].tolist()
        even = not shape[0] % size and mine == rows_of(shape[0], size)
        move, moves = _alltoall(splits * row, rank, across)
        return Plan(own, sum(received), as_splits(received), tuple(mine), even, move, moves)
    if request.type == RequestType.BROADCAST:
        nbytes, root = math.prod(shape) * item, members.index(request.root)
        move = _gather([nbytes * (q == root) for q in range(size)], rank, across)
        if across is not None:
            moves = tuple(across.layout.broadcast(nbytes, root, across.chunk))
        return Plan(own, move=move, moves=moves)
    counts = [n * row for n in dims]
    move = _gather(counts, rank, across)
    if across is not None:
        moves = tuple(across.layout.gather(counts, across.chunk))
    return Plan(own, sum(dims), tuple(dims), move=move, moves=moves)


Moves = tuple[LocalMove, tuple[Move, ...]]


def _gather(counts: Sequence[int], rank: int, across: HostPlaces | None) -> LocalMove:
    """Return the move that brings rank q's counts[q] bytes to every rank, one behind the other."""
    starts = list(itertools.accumulate(counts, initial=0))
    alone = len(counts) == 1
    sources = [] if alone else [(rank, 0, counts[rank], 0)]
    targets = [(q, 0, counts[q], starts[q], 0) for q in range(len(counts)) if q != rank]
    own = 0, starts[rank], counts[rank]
    return _local_move(sources, targets, own, [0] if alone else counts, across)


def _alltoall(sizes: Ints, rank: int, across: HostPlaces | None) -> Moves:
    """Return the moves that bring sizes[s, r] bytes from rank s to rank r."""
    ranks = len(sizes)
    starts, into = before(sizes[rank]), before(sizes[:, rank])
    # offsets[s, k] is where the block for rank s + 1 + k lies in lane s.
    turned = np.array([np.roll(sizes[s], -s - 1)[:-1] for s in range(ranks)]).reshape(ranks, -1)
    offsets = before(turned)
    others = [q for q in range(ranks) if q != rank]
    sources = [
        (rank, offsets[rank, k], turned[rank, k], starts[(rank + 1 + k) % ranks]) for k in range(ranks - 1)
    ]
    origins = before(sizes)[:, rank]
    targets = [(q, offsets[q, (rank - q - 1) % ranks], sizes[q, rank], into[q], origins[q]) for q in others]
    own = int(starts[rank]), int(into[rank]), int(sizes[rank, rank])
    local = _local_move(sources, targets, own, turned.sum(axis=1).tolist(), across)
    if across is None:
        return local, ()
    layout = across.layout
    table = np.stack([np.stack([sizes[q], sizes[:, q]]) for q in layout.neighbours])
    return local, tuple(layout.alltoall(table, across.chunk, layout.largest_trade(sizes)))


Rows = Sequence[tuple[int, ...]]


def _local_move(
    sources: Rows,
    targets: Rows,
    own: tuple[int, int, int],
    lanes: Sequence[int],
    across: HostPlaces | None,
) -> LocalMove:
    """Return a rank's part of a move with lanes of so many bytes; a target's row ends with its origin."""
    starts = None
    if across is not None:
        order = np.array(across.order)
        starts = np.empty(len(order), np.int64)
        starts[order] = before(np.array(lanes)[order])
    into = _parts(targets, 5)
    parts, origins = np.ascontiguousarray(into[:, :4]), into[:, 4].copy()
    return LocalMove(_parts(sources, 4), parts, own, origins, max(lanes), sum(lanes), starts)


def _parts(rows: Rows, columns: int) -> Ints:
    return np.array([row for row in rows if row[2]], np.int64).reshape(-1, columns)


# -- outputs whose size comes with the response ------------------------------------------------------------


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
    what = [f"its output of shape {shape}" for shape in shapes]
    return outputs if have_memory(backend, batch, entries, what, members, failure) else None


def have_memory(
    backend: HostBackend,
    batch: Sequence[Response],
    entries: Entries,
    what: Sequence[str],
    members: Sequence[int],
    failure: Exception | None,
) -> bool:
    """Return whether no rank has a ``failure`` to get memory; else fail the entries. Collective.

    ``what`` says for each tensor what the memory is for; other arguments as for :func:`allocate`.
    """
    failed = backend.agree(ok=failure is None) if backend.size > 1 else [0] * (failure is not None)
    if not failed:
        return True
    ranks = describe_ranks([members[i] for i in failed])
    for response, entry, each in zip(batch, entries, what, strict=True):
        if entry is not None:
            call = f"{verb(response.request.type)} {response.request.name!r}"
            error = RankFailedError(f"{call}: no memory for {each} on {ranks}", members[failed[0]])
            error.__cause__ = failure
            entry.done(None, error)
    return False
