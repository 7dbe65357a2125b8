"""The verbs: each one checks its arguments, submits the call and returns a Handle or its result.

Names and meaning are Horovod's. All verbs take host arrays (see :mod:`pyhvd.arrays`) of any dtype in
:mod:`pyhvd.dtypes`, and return numpy arrays, or torch's tensors for those. They take arrays on a GPU too (see
:mod:`pyhvd.devices.array_libraries`), and return arrays of the same library on that GPU. A verb with a
trailing underscore works in place and returns its argument; the other verbs never change their input.

Arrays on a GPU: pyhvd's own stream waits for the work that is queued on the array's stream. The caller's
current stream waits for the result when the caller asks for it. No thread waits for either. A handle
completes when all work is queued on the device.

Every rank of the process set must submit the same name. Unnamed tensors are matched by the order of calls.

If this rank refuses a call (wrong splits, unsupported dtype, ...), the call raises here at once. The same
call raises :class:`~pyhvd.errors.RankFailedError` on the other ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from pyhvd.api.call import Call, OwnName, Reduction, adopt, check_rows, check_splits, refusing
from pyhvd.api.compression import Compression, Compressor, compress_all, compress_one, decompress_all
from pyhvd.api.handles import Handle
from pyhvd.api.process_sets import ProcessSet, global_process_set
from pyhvd.arrays import Array, TensorView
from pyhvd.devices.array_libraries import View
from pyhvd.dtypes import ReduceOp
from pyhvd.engine import context
from pyhvd.engine.context import current_holder, process_holder
from pyhvd.errors import UnsupportedOpError
from pyhvd.native.shared_memory import (
    ALLGATHER,
    ALLTOALL,
    BARRIER,
    BROADCAST,
    GROUPED,
    IN_PLACE,
    PAIRS,
    POOL_LEAST,
    SCATTERS,
    WAITS,
    CallOrder,
    find_order as find_order,
    move_in_order,
    set_lookup,
    start,
    start_move as start_move,
)
from pyhvd.negotiation.messages import BARRIER_NAME, JOIN_NAME, RequestType
from pyhvd.transport.arena import Arena

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
    return start(0, tensor, average, name, op, prescale_factor, postscale_factor, process_set)


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
        Of the same shape and dtype on every rank. It is not changed.
    average : bool, optional
        Deprecated: True means ``op=Average``, False means ``op=Sum``.
    name : str, optional
        The same on every rank.
    compression : Compressor
        ``Compression.fp16`` sends floating tensors as float16.
    op : ReduceOp
        Average (default), Sum, Adasum, Min, Max or Product. Average divides the sum by the size of the
        process set, and rounds integers toward zero. Adasum adds floats that point in different directions,
        and averages parallel ones, each tensor by itself (formula and source: ``pyhvd.backends.adasum``).
    prescale_factor, postscale_factor : float
        Factors before and after the reduction.
    process_set : ProcessSet
        The ranks that take part.

    Returns
    -------
    array
        Of the tensor's shape, dtype and library. Elements are combined in rank order, float16 and bfloat16 in
        float32.
        The bits therefore depend on the ranks' values alone.

    Raises
    ------
    MismatchError
        The ranks submitted different shapes, dtypes, ops, ... under this name.
    UnsupportedDtypeError
        The op is not defined for the dtype.
    UnsupportedOpError
        ``op=Adasum``, and the number of ranks is not a power of two.
    HorovodInternalError
        Another rank failed, or pyhvd was shut down.
    """
    ctx: Any = None
    if compression is not Compression.none:
        with refusing(RequestType.ALLREDUCE, name, process_set):
            tensor, ctx = compress_one(compression, tensor)
    result = start(WAITS, tensor, average, name, op, prescale_factor, postscale_factor, process_set).result()
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
    """Start an in-place allreduce; see :func:`allreduce_`. Do not use ``tensor`` until the handle is done."""
    return start(IN_PLACE, tensor, average, name, op, prescale_factor, postscale_factor, process_set)


def allreduce_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce a writable tensor in place and return it; see :func:`allreduce`."""
    form = IN_PLACE | WAITS
    return start(form, tensor, average, name, op, prescale_factor, postscale_factor, process_set).result()


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
    return start(GROUPED, tensors, average, name, op, prescale_factor, postscale_factor, process_set)


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
    """Reduce several tensors as one unit: they become ready together, and all fail if one fails.

    It takes and returns lists; otherwise see :func:`allreduce`. Member i of n is named ``<name>_<i>of<n>``.
    """
    contexts: list[Any] = []
    if compression is not Compression.none:
        with refusing(RequestType.ALLREDUCE, name, process_set, grouped=True):
            tensors, contexts = compress_all(compression, tensors)
    form = GROUPED | WAITS
    handle = start(form, tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    results: list[Any] = handle.result()
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
    form = GROUPED | IN_PLACE
    return start(form, tensors, average, name, op, prescale_factor, postscale_factor, process_set)


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
    form = GROUPED | IN_PLACE | WAITS
    return start(form, tensors, average, name, op, prescale_factor, postscale_factor, process_set).result()


def reduce_by_message(
    form: int,
    tensors: Any,
    average: bool | None,
    name: str | None,
    op: ReduceOp | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> Handle:
    """Submit a reducing call, with the arguments as the user gave them; see :func:`start`."""
    kind = RequestType.REDUCESCATTER if form & SCATTERS else RequestType.ALLREDUCE
    in_place = bool(form & IN_PLACE)
    with Call(kind, name, process_set, grouped=bool(form & GROUPED)) as call:
        members = call.members(tensors)
        reduction = Reduction.of(kind, op, prescale_factor, postscale_factor, average=average)
        reduction.check_ranks(call.ranks)
        if reduction.op is ReduceOp.ADASUM:
            call.kind = RequestType.ADASUM
        for tensor in members:
            source = adopt(tensor, writing=in_place, any_layout=kind is RequestType.ALLREDUCE)
            reduction.check(source.info)
            shape = source.shape
            if kind is RequestType.REDUCESCATTER:
                shape = (check_rows(shape, call.size)[call.rank], *shape[1:])
            target, held = source if in_place else None, False
            if kind is RequestType.ALLREDUCE and reduction.prescale == 1.0:
                target, held = _in_arena(call, source, target)
            call.add(
                source,
                source.empty_like(shape) if target is None else target,
                op=reduction.op,
                prescale=reduction.prescale,
                postscale=reduction.postscale,
                window=held,
            )
        return call.submit(members if in_place else None)


def _in_arena(call: Call, source: View, target: View | None) -> tuple[View | None, bool]:
    """Return a tensor's target, and whether the node's ranks can reduce both in shared memory.

    Without a target, a large result gets its memory there if the tensor has.
    """
    arena = call.context.arena
    if not isinstance(arena, Arena) or not isinstance(source, TensorView):
        return target, False
    if source.home is not None or not arena.holds(source.ptr):
        return target, False
    # Calls without a name are alike only if all ranks have such results; with a name the ranks agree anew.
    if target is None and call.has_name and source.library is None and source.nbytes >= POOL_LEAST:
        with contextlib.suppress(OSError):
            target = TensorView(arena.result(source.shape, source.array.dtype), source.info)
    return target, target is not None


# -- reducescatter -------------------------------------------------------------------------------------


def _refuse_scatter(op: Any, name: str | None, process_set: ProcessSet, *, grouped: bool = False) -> None:
    """Refuse an op that Horovod's reducescatter does not have; torch.distributed's has all."""
    if op is not Average and op is not Sum and isinstance(op, ReduceOp):
        with refusing(RequestType.REDUCESCATTER, name, process_set, grouped=grouped):
            raise UnsupportedOpError(f"reducescatter supports op=Average and op=Sum, not {op.name.title()}")


def reducescatter_async(
    tensor: Any,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a reducescatter; see :func:`reducescatter`."""
    _refuse_scatter(op, name, process_set)
    return start(SCATTERS, tensor, None, name, op, prescale_factor, postscale_factor, process_set)


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

    Of n rows, rank r gets ``n // size``, and one more if ``r < n % size``; this may be none. The shape must
    be the same on every rank, with at least one dimension. ``op`` is Average or Sum; otherwise see
    :func:`allreduce`.
    """
    _refuse_scatter(op, name, process_set)
    ctx: Any = None
    if compression is not Compression.none:
        with refusing(RequestType.REDUCESCATTER, name, process_set):
            tensor, ctx = compress_one(compression, tensor)
    form = SCATTERS | WAITS
    result = start(form, tensor, None, name, op, prescale_factor, postscale_factor, process_set).result()
    return result if compression is Compression.none else compression.decompress(result, ctx)


def grouped_reducescatter_async(
    tensors: Sequence[Any],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a reducescatter of several tensors as one unit; see :func:`grouped_reducescatter`."""
    _refuse_scatter(op, name, process_set, grouped=True)
    form = GROUPED | SCATTERS
    return start(form, tensors, None, name, op, prescale_factor, postscale_factor, process_set)


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
    _refuse_scatter(op, name, process_set, grouped=True)
    contexts: list[Any] = []
    if compression is not Compression.none:
        with refusing(RequestType.REDUCESCATTER, name, process_set, grouped=True):
            tensors, contexts = compress_all(compression, tensors)
    form = GROUPED | SCATTERS | WAITS
    handle = start(form, tensors, None, name, op, prescale_factor, postscale_factor, process_set)
    results: list[Any] = handle.result()
    return results if compression is Compression.none else decompress_all(compression, results, contexts)


# -- allgather -----------------------------------------------------------------------------------------


def submit_allgather(
    tensors: Any, name: str | None, process_set: ProcessSet, *, grouped: bool, with_rows: bool = False
) -> Handle:
    """Submit an allgather; ``with_rows``: each result is a pair of the output and each rank's rows."""
    form = GROUPED * grouped | PAIRS * with_rows
    return start_move(ALLGATHER, form, tensors, None, name, process_set)


def _allgather(form: int, tensors: Any, _: None, name: str | None, process_set: ProcessSet) -> Handle:
    with Call(RequestType.ALLGATHER, name, process_set, grouped=bool(form & GROUPED)) as call:
        for tensor in call.members(tensors):
            source = adopt(tensor)
            check_rows(source.shape, call.size)
            call.add(source, None)
        return call.submit(alone=not form & PAIRS)


def allgather_async(
    tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start an allgather; see :func:`allgather`."""
    return submit_allgather(tensor, name, process_set, grouped=False)


def allgather(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Concatenate the ranks' tensors along dimension 0, in rank order; every rank gets the result.

    Dimension 0 may differ between ranks, and may be 0. The other dimensions and the dtype must be the same.
    A tensor without dimensions raises UnsupportedShapeError.
    """
    return start_move(ALLGATHER, WAITS, tensor, None, name, process_set).result()


def grouped_allgather_async(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start an allgather of several tensors as one unit; see :func:`grouped_allgather`."""
    return submit_allgather(tensors, name, process_set, grouped=True)


def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Gather several tensors as one unit; list in, list out; see :func:`allgather`."""
    form = GROUPED | WAITS
    result: list[Any] = start_move(ALLGATHER, form, tensors, None, name, process_set).result()
    return result


# -- broadcast -----------------------------------------------------------------------------------------


def _broadcast(form: int, tensor: Any, root_rank: int, name: str | None, process_set: ProcessSet) -> Handle:
    inplace = bool(form & IN_PLACE)
    with Call(RequestType.BROADCAST, name, process_set) as call:
        root = call.check_root(root_rank)
        source = adopt(tensor, writing=inplace, any_layout=True)
        call.add(source, source if inplace else source.empty_like(source.shape), root=root)
        return call.submit([tensor] if inplace else None)


def broadcast_async(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start a broadcast; see :func:`broadcast`."""
    return start_move(BROADCAST, 0, tensor, root_rank, name, process_set)


def broadcast(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the root's tensor on every rank.

    Parameters
    ----------
    tensor : array
        Of the same shape and dtype on every rank. Only the root's contents matter.
    root_rank : int
        A *global* rank, also for a smaller process set; it must be a member.
    name : str, optional
        The same on every rank.
    process_set : ProcessSet
        The ranks that take part.
    """
    return start_move(BROADCAST, WAITS, tensor, root_rank, name, process_set).result()


def broadcast_async_(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start an in-place broadcast; see :func:`broadcast_`."""
    return start_move(BROADCAST, IN_PLACE, tensor, root_rank, name, process_set)


def broadcast_(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Overwrite the tensor with the root's, and return it; see :func:`broadcast`."""
    form = IN_PLACE | WAITS
    return start_move(BROADCAST, form, tensor, root_rank, name, process_set).result()


# -- alltoall ------------------------------------------------------------------------------------------


def alltoall_async(
    tensor: Any,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an alltoall; its result is always the pair (output, received splits); see :func:`alltoall`."""
    return start_move(ALLTOALL, 0, tensor, splits, name, process_set)


def _alltoall(_: int, tensor: Any, splits: Splits, name: str | None, process_set: ProcessSet) -> Handle:
    with Call(RequestType.ALLTOALL, name, process_set) as call:
        source = adopt(tensor)
        rows = check_splits(splits, source.shape, call.size)
        if source.shape[0] > sum(rows):
            source = source.first_rows(sum(rows))
        call.add(source, None, tuple(rows))
        return call.submit()


def alltoall(
    tensor: Any,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send a part of dimension 0 to each rank; return the parts that the ranks sent here, in rank order.

    Parameters
    ----------
    tensor : array
        Rows for rank 0 first, then for rank 1, ...; all dimensions but the first are the same on every rank.
    splits : sequence of int, optional
        The number of rows for each rank of the set. None divides the rows evenly; if they do not divide, the
        call raises. Rows beyond the sum are not sent.
    name : str, optional
        The same on every rank.
    process_set : ProcessSet
        The ranks that take part.

    Returns
    -------
    output : array
        The received rows, in the tensor's library.
    received_splits : numpy.ndarray of int32
        The number of rows from each rank; returned only if ``splits`` was given.

    Raises
    ------
    ValueError
        The splits are not ints, are negative, are not one per rank, or sum to more than the rows.
    """
    handle = start_move(ALLTOALL, WAITS, tensor, splits, name, process_set)
    output, received = handle.result()
    return output if splits is None else (output, received)


# -- join and barrier ----------------------------------------------------------------------------------


def join(device: int = -1) -> int:  # noqa: ARG001 - Horovod's parameter: the device of its zeros
    """Announce that this rank has no more data; return when every rank has joined.

    Until then this rank contributes the identity element of the op (zero for a sum, no rows for allgather) to
    the other ranks' collectives, in all process sets that have this rank. Operations that need every rank's
    data fail on the other ranks: alltoall, barrier, and a broadcast from a rank that has joined. Other
    threads of this rank get an error for every call. After a join, all ranks number their unnamed calls from
    the start.

    Returns
    -------
    int
        The rank that joined last, the same on every rank.
    """
    with Call(RequestType.JOIN, OwnName(JOIN_NAME), global_process_set) as call:
        call.add(None, None)
        handle = call.submit(before_end=call.context.recount)
    last: int = handle.result()
    return last


_BARRIER = OwnName(BARRIER_NAME)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the process set has called it."""
    move_in_order(BARRIER, WAITS, None, None, _BARRIER, process_set)


def _barrier(_: int, __: None, ___: None, name: str, process_set: ProcessSet) -> Handle:
    with Call(RequestType.BARRIER, name, process_set) as call:
        call.add(None, None)
        return call.submit()


# -- the fast path -------------------------------------------------------------------------------------

_BY_MESSAGE: dict[int, Callable[..., Handle]] = {
    ALLGATHER: _allgather,
    BROADCAST: _broadcast,
    ALLTOALL: _alltoall,
    BARRIER: _barrier,
}


def move_by_message(
    verb: int, form: int, tensors: Any, term: Any, name: str | None, process_set: ProcessSet
) -> Handle:
    """Submit a call that reduces nothing, with the user's arguments; see :func:`start_move`."""
    return _BY_MESSAGE[verb](form, tensors, term, name, process_set)


def _make_order(process_set: ProcessSet, name: str) -> CallOrder:
    return context.current().make_order(process_set, name)


LOOKUP = (current_holder, process_holder, ProcessSet, global_process_set, OwnName, _make_order)
"""How the fast path finds the caller's rank, process set and call order; see :func:`set_lookup`."""

set_lookup(*LOOKUP, reduce_by_message, move_by_message)
