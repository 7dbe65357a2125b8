"""The verbs. Each validates, wraps, submits and returns a Handle; the same names and meaning as Horovod's.

All take host arrays (see :mod:`pyhvd.arrays`) of any dtype in :mod:`pyhvd.dtypes` and return numpy arrays;
or arrays on a GPU (see :mod:`pyhvd.devices.array_libraries`), and return arrays of the same library, there. Out of
place they never alter their input, in place (trailing underscore) they return the very object given.

With an array on a GPU, pyhvd's own stream waits for what the array's stream has to do first, and the stream
that is current where the result is asked for waits for the result; no thread waits for either. A handle has
ended when all is queued on the device.

Every rank of the process set must submit the same name; unnamed tensors are matched by the order of calls.

A call that this rank refuses (wrong splits, unsupported dtype, ...) raises here at once, and makes the same
call raise :class:`~pyhvd.errors.RankFailedError` on the ranks that wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from pyhvd.api.call import Call, OwnName, check_rows, check_splits, refusing
from pyhvd.api.compression import Compression, Compressor, compress_all, compress_one, decompress_all
from pyhvd.api.handles import Handle
from pyhvd.api.process_sets import ProcessSet, global_process_set
from pyhvd.api.reductions import queue_allreduce, reduce_tensors, start
from pyhvd.arrays import Array
from pyhvd.devices.array_libraries import adopt, adopt_for_writing, target_like
from pyhvd.dtypes import ReduceOp
from pyhvd.negotiation.messages import GLOBAL_SET, JOIN_NAME, UNNAMED, RequestType

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT

Splits = Sequence[int] | Array | None

# -- allreduce -----------------------------------------------------------------------------------------


def allreduce_async(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an allreduce; see :func:`allreduce`."""
    return start(
        False, False, False, tensor, average, name, op, prescale_factor, postscale_factor, process_set
    ) or queue_allreduce(
        False, False, tensor, average, name, op, prescale_factor, postscale_factor, process_set
    )


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce a tensor over the ranks; every rank gets the result.

    Parameters
    ----------
    tensor : array
        Same shape and dtype on every rank; unchanged.
    average : bool, optional
        Deprecated: True is ``op=Average``, False ``op=Sum``.
    name : str, optional
        Same on every rank.
    compression : Compressor
        ``Compression.fp16`` sends floating tensors as float16.
    op : ReduceOp
        Average (default), Sum, Adasum, Min, Max or Product. Average divides a Sum by the size of the set;
        on integers it is rounded toward zero. Adasum sums floats that point in different directions and
        averages parallel ones, tensor by tensor (``pyhvd.backends.adasum`` has formula and source).
    prescale_factor, postscale_factor : float
        Factors before and after the reduction.
    process_set : ProcessSet
        Who takes part.

    Returns
    -------
    numpy.ndarray
        Shape and dtype of ``tensor``. Elements are combined in rank order, float16 and bfloat16 in float32,
        so that the bits depend on the ranks' values alone.

    Raises
    ------
    MismatchError
        The ranks submitted different shapes, dtypes, ops, ... under this name.
    UnsupportedDtypeError
        The dtype cannot be reduced so.
    UnsupportedOpError
        Adasum, where the number of ranks is no power of two.
    HorovodInternalError
        Another rank failed, or pyhvd was shut down.
    """
    ctx: Any = None
    if compression is not Compression.none:
        kind = RequestType.ALLREDUCE
        tensor, ctx = refusing(kind, name, process_set, lambda: compress_one(compression, tensor))
    result = (
        start(False, False, True, tensor, average, name, op, prescale_factor, postscale_factor, process_set)
        or queue_allreduce(
            False, False, tensor, average, name, op, prescale_factor, postscale_factor, process_set
        )
    ).result()
    return result if compression is Compression.none else compression.decompress(result, ctx)


def allreduce_async_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an in-place allreduce; see :func:`allreduce_`. Leave ``tensor`` alone until it has ended."""
    return start(
        False, True, False, tensor, average, name, op, prescale_factor, postscale_factor, process_set
    ) or queue_allreduce(
        False, True, tensor, average, name, op, prescale_factor, postscale_factor, process_set
    )


def allreduce_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce a tensor in place and return it; see :func:`allreduce`. It must be writable."""
    return (
        start(False, True, True, tensor, average, name, op, prescale_factor, postscale_factor, process_set)
        or queue_allreduce(
            False, True, tensor, average, name, op, prescale_factor, postscale_factor, process_set
        )
    ).result()


def grouped_allreduce_async(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an allreduce of several tensors; see :func:`grouped_allreduce`."""
    return start(
        True, False, False, tensors, average, name, op, prescale_factor, postscale_factor, process_set
    ) or queue_allreduce(
        True, False, tensors, average, name, op, prescale_factor, postscale_factor, process_set
    )


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Reduce several tensors as one unit: all become ready together, and all fail if one does.

    Takes and returns lists; otherwise as :func:`allreduce`. Member i of n is named ``<name>_<i>of<n>``.
    """
    contexts: list[Any] = []
    if compression is not Compression.none:
        kind = RequestType.ALLREDUCE
        tensors, contexts = refusing(
            kind, name, process_set, lambda: compress_all(compression, tensors), grouped=True
        )
    results: list[Any] = (
        start(True, False, True, tensors, average, name, op, prescale_factor, postscale_factor, process_set)
        or queue_allreduce(
            True, False, tensors, average, name, op, prescale_factor, postscale_factor, process_set
        )
    ).result()
    return results if compression is Compression.none else decompress_all(compression, results, contexts)


def grouped_allreduce_async_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an in-place allreduce of several tensors; see :func:`grouped_allreduce_`."""
    return start(
        True, True, False, tensors, average, name, op, prescale_factor, postscale_factor, process_set
    ) or queue_allreduce(
        True, True, tensors, average, name, op, prescale_factor, postscale_factor, process_set
    )


def grouped_allreduce_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce several tensors in place as one unit, and return them; see :func:`grouped_allreduce`."""
    return (
        start(True, True, True, tensors, average, name, op, prescale_factor, postscale_factor, process_set)
        or queue_allreduce(
            True, True, tensors, average, name, op, prescale_factor, postscale_factor, process_set
        )
    ).result()


# -- reducescatter -------------------------------------------------------------------------------------


def reducescatter_async(
    tensor: Any,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a reducescatter; see :func:`reducescatter`."""
    how = (None, op, prescale_factor, postscale_factor)
    return reduce_tensors(RequestType.REDUCESCATTER, tensor, False, False, name, process_set, how)


def reducescatter(
    tensor: Any,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce a tensor over the ranks, and give each rank its part of dimension 0.

    Rank r gets ``n // size`` rows, and one more if ``r < n % size``; possibly none. The shape must be the
    same on every rank and have a dimension 0. ``op`` is Average or Sum; otherwise as :func:`allreduce`.
    """
    kind = RequestType.REDUCESCATTER
    compressed, ctx = refusing(kind, name, process_set, lambda: compress_one(compression, tensor))
    handle = reducescatter_async(compressed, name, op, process_set, prescale_factor, postscale_factor)
    return compression.decompress(handle.result(), ctx)


def grouped_reducescatter_async(
    tensors: Sequence[Any],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a reducescatter of several tensors as one unit; see :func:`grouped_reducescatter`."""
    how = (None, op, prescale_factor, postscale_factor)
    return reduce_tensors(RequestType.REDUCESCATTER, tensors, True, False, name, process_set, how)


def grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Reduce and scatter several tensors as one unit; list in, list out; see :func:`reducescatter`."""
    kind = RequestType.REDUCESCATTER
    compressed, contexts = refusing(
        kind, name, process_set, lambda: compress_all(compression, tensors), grouped=True
    )
    handle = grouped_reducescatter_async(compressed, name, op, process_set, prescale_factor, postscale_factor)
    return decompress_all(compression, handle.result(), contexts)


# -- allgather -----------------------------------------------------------------------------------------


def _allgather(tensors: Any, grouped: bool, name: str | None, process_set: ProcessSet) -> Handle:
    with Call(RequestType.ALLGATHER, name, process_set, grouped=grouped) as call:
        for tensor in call.members(tensors):
            source = adopt(tensor)
            check_rows(source.shape, call.size)
            call.add(source, None)
        return call.submit()


def allgather_async(
    tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start an allgather; see :func:`allgather`."""
    return _allgather(tensor, False, name, process_set)


def allgather(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Concatenate the ranks' tensors along dimension 0, in rank order; every rank gets the result.

    Dimension 0 may differ between ranks, and be 0; the other dimensions and the dtype may not. A tensor
    without dimensions is a ValueError.
    """
    return allgather_async(tensor, name, process_set).result()


def grouped_allgather_async(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start an allgather of several tensors as one unit; see :func:`grouped_allgather`."""
    return _allgather(tensors, True, name, process_set)


def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Gather several tensors as one unit; list in, list out; see :func:`allgather`."""
    result: list[Any] = grouped_allgather_async(tensors, name, process_set).result()
    return result


# -- broadcast -----------------------------------------------------------------------------------------


def _broadcast(
    tensor: Any, root_rank: int, name: str | None, process_set: ProcessSet, inplace: bool
) -> Handle:
    with Call(RequestType.BROADCAST, name, process_set) as call:
        root = call.check_root(root_rank)
        source = adopt_for_writing(tensor) if inplace else adopt(tensor)
        call.add(source, source if inplace else target_like(source, source.shape), root=root)
        return call.submit([tensor] if inplace else None)


def broadcast_async(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start a broadcast; see :func:`broadcast`."""
    return _broadcast(tensor, root_rank, name, process_set, inplace=False)


def broadcast(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the root's tensor on every rank.

    Parameters
    ----------
    tensor : array
        Same shape and dtype on every rank; its contents matter on the root only.
    root_rank : int
        A *global* rank, in a subset too; must be a member.
    name : str, optional
        Same on every rank.
    process_set : ProcessSet
        Who takes part.
    """
    return broadcast_async(tensor, root_rank, name, process_set).result()


def broadcast_async_(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start an in-place broadcast; see :func:`broadcast_`."""
    return _broadcast(tensor, root_rank, name, process_set, inplace=True)


def broadcast_(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Overwrite the tensor with the root's, and return it; see :func:`broadcast`."""
    return broadcast_async_(tensor, root_rank, name, process_set).result()


# -- alltoall ------------------------------------------------------------------------------------------


def alltoall_async(
    tensor: Any,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an alltoall; its result is always the pair (output, received splits); see :func:`alltoall`."""
    with Call(RequestType.ALLTOALL, name, process_set) as call:
        source = adopt(tensor)
        rows = check_splits(splits, source.shape, call.size)
        if source.shape[0] > sum(rows):
            source = source.first_rows(sum(rows))
        call.add(source, None, splits=tuple(rows))
        return call.submit()


def alltoall(
    tensor: Any,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send a part of dimension 0 to each rank; return what the ranks sent here, in rank order.

    Parameters
    ----------
    tensor : array
        Rows for rank 0 first, then for rank 1, ...; all but dimension 0 must be the same on every rank.
    splits : sequence of int, optional
        How many rows each rank of the set gets. None splits evenly, if that can be done. Rows beyond the
        sum are not sent.
    name : str, optional
        Same on every rank.
    process_set : ProcessSet
        Who takes part.

    Returns
    -------
    output : numpy.ndarray
        The received rows.
    received_splits : numpy.ndarray of int32
        How many rows came from each rank; returned only if ``splits`` was given.

    Raises
    ------
    ValueError
        Splits that are not ints, are negative, too few, too many, or exceed the rows.
    """
    output, received = alltoall_async(tensor, splits, name, process_set).result()
    return output if splits is None else (output, received)


# -- join and barrier ----------------------------------------------------------------------------------


def join(device: int = -1) -> int:  # noqa: ARG001 - Horovod's parameter: where its zeros would lie
    """Tell the others that this rank has no more data; return when every rank has joined.

    Until then this rank takes part in the others' collectives with the neutral element of their op (for
    allgather with no rows). Operations that need something of every rank (alltoall, barrier, a broadcast
    from a rank that has joined) fail on the others, and other threads of this rank get an error for what
    they submit to the global process set. Afterwards unnamed calls are counted anew, as some ranks have made
    more of them.

    Returns
    -------
    int
        The rank that joined last, the same on every rank.
    """
    with Call(RequestType.JOIN, OwnName(JOIN_NAME), global_process_set) as call:
        call.add(None, None)
        handle = call.submit(before_end=partial(call.context.recount, GLOBAL_SET))
    last: int = handle.result()
    return last


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the process set has called it."""
    with Call(RequestType.BARRIER, None, process_set, prefix=f"barrier.{UNNAMED}") as call:
        call.add(None, None)
        handle = call.submit()
    handle.result()
