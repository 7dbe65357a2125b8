"""The verbs for torch's tensors, with gradients; names and order of arguments are Horovod's.

A synchronous verb that is out of place takes part in autograd if gradients are recorded and its tensor
requires one. All other calls are those of :mod:`pyhvd`.

Gradients
---------
The gradient of a sum of all ranks' losses needs, from each rank, the gradient of its own loss. So backward
passes call collectives too: all ranks must have recorded a call, or none. The collective of a named call's
backward pass is named ``<name>.grad``.

With n ranks, allreduce and alltoall have that gradient. Those of allgather and broadcast are 1/n of it, and
that of reducescatter is n times it, as in Horovod, whose users have compensated for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from pyhvd.api import collectives as _core
from pyhvd.api.call import resolve_op
from pyhvd.api.collectives import (
    Adasum as Adasum,
    Average as Average,
    Max as Max,
    Min as Min,
    Product as Product,
    Splits,
    Sum as Sum,
    allgather_async as allgather_async,
    allreduce_ as allreduce_,
    allreduce_async as allreduce_async,
    allreduce_async_ as allreduce_async_,
    barrier as barrier,
    broadcast_ as broadcast_,
    broadcast_async as broadcast_async,
    broadcast_async_ as broadcast_async_,
    grouped_allgather_async as grouped_allgather_async,
    grouped_allreduce_ as grouped_allreduce_,
    grouped_allreduce_async as grouped_allreduce_async,
    grouped_allreduce_async_ as grouped_allreduce_async_,
    grouped_reducescatter_async as grouped_reducescatter_async,
    join as join,
    reducescatter_async as reducescatter_async,
)
from pyhvd.api.compression import Compressor, compress_all, compress_one, decompress_all
from pyhvd.api.handles import Handle, poll as poll, synchronize as synchronize
from pyhvd.api.process_sets import ProcessSet, global_process_set
from pyhvd.devices.torch_tensors import why_no_memory
from pyhvd.dtypes import ReduceOp
from pyhvd.errors import UnsupportedOpError
from pyhvd.torch.compression import Compression
from pyhvd.torch.handles import CombinedHandle

_LINEAR = (Average, Sum)


def _is_recorded(tensor: Any) -> bool:
    """Return whether autograd records what is done with this tensor; else the call itself may refuse it."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.requires_grad
        and torch.is_grad_enabled()
        and not (_is_special(tensor) and why_no_memory(tensor))
    )


def _is_special(tensor: Any) -> bool:
    """Return whether torch may refuse to record a call with a tensor, for a reason that pyhvd knows."""
    is_in_transform = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    return is_in_transform or _has_own_class(tensor)


def _is_recorded_group(tensors: Any) -> bool:
    return isinstance(tensors, (list, tuple)) and any(map(_is_recorded, tensors))


def _has_own_class(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and type(tensor) not in (torch.Tensor, torch.nn.Parameter)


def _plain(tensor: Any) -> Any:
    """Return a tensor of a derived class as a plain one, which autograd follows to it."""
    if not _has_own_class(tensor):
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def _of_gradient(name: str | None, what: str = "grad") -> str | None:
    return None if name is None else f"{name}.{what}"


# -- allreduce -----------------------------------------------------------------------------------------


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
    """Reduce a tensor over the ranks; see :func:`pyhvd.allreduce`.

    The gradient of Average and Sum is the gradients' Average or Sum, with the same factors. That of Min and
    Max goes to the ranks that hold the extreme, in equal parts. That of Product is the product of the other
    ranks' elements. Adasum has none.
    """
    if not _is_recorded(tensor):
        return _core.allreduce(
            tensor, average, name, compression, op, prescale_factor, postscale_factor, process_set
        )
    chosen = resolve_op(op, average=average)
    sent, ctx = compress_one(compression, _plain(tensor))
    factors = (prescale_factor, postscale_factor)
    if chosen in _LINEAR:
        result = HorovodAllreduce.apply(sent, name, chosen, *factors, process_set)
    else:
        sent = _scaled(sent, prescale_factor)
        result = _scaled(HorovodAllreduce.apply(sent, name, chosen, 1.0, 1.0, process_set), postscale_factor)
    return compression.decompress(result, ctx)


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
    """Reduce several tensors as one unit; see :func:`allreduce`."""
    if not _is_recorded_group(tensors):
        return _core.grouped_allreduce(
            tensors, average, name, compression, op, prescale_factor, postscale_factor, process_set
        )
    chosen = resolve_op(op, average=average)
    sent, contexts = compress_all(compression, [_plain(each) for each in tensors])
    factors = (prescale_factor, postscale_factor) if chosen in _LINEAR else (1.0, 1.0)
    if chosen not in _LINEAR:
        sent = [_scaled(each, prescale_factor) for each in sent]
    results = list(HorovodGroupedAllreduce.apply(name, chosen, *factors, process_set, *sent))
    if chosen not in _LINEAR:
        results = [_scaled(each, postscale_factor) for each in results]
    return decompress_all(compression, results, contexts)


def _scaled(tensor: Any, factor: float) -> Any:
    return tensor if factor == 1.0 else tensor * factor


class HorovodAllreduce(torch.autograd.Function):
    """An allreduce, as autograd records it."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Any,
        name: str | None,
        op: ReduceOp,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
    ) -> Any:
        ctx.terms = name, op, prescale, postscale, process_set
        output = _core.allreduce(tensor, None, name, Compression.none, op, prescale, postscale, process_set)
        if op not in _LINEAR:
            ctx.save_for_backward(tensor, output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        name, op, prescale, postscale, process_set = ctx.terms
        if op in _LINEAR:
            grad_name = _of_gradient(name)
            result = allreduce(
                gradient, None, grad_name, Compression.none, op, prescale, postscale, process_set
            )
        else:
            tensor, output = ctx.saved_tensors
            (result,) = _gradients(op, [gradient], [tensor], [output], name, process_set)
        return result, None, None, None, None, None


class HorovodGroupedAllreduce(torch.autograd.Function):
    """A grouped allreduce, as autograd records it."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: ReduceOp,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        *tensors: Any,
    ) -> Any:
        ctx.terms = name, op, prescale, postscale, process_set
        outputs = _core.grouped_allreduce(
            tensors, None, name, Compression.none, op, prescale, postscale, process_set
        )
        if op not in _LINEAR:
            ctx.save_for_backward(*tensors, *outputs)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        name, op, prescale, postscale, process_set = ctx.terms
        if op in _LINEAR:
            grad_name = _of_gradient(name)
            results = grouped_allreduce(
                gradients, None, grad_name, Compression.none, op, prescale, postscale, process_set
            )
        else:
            n = len(gradients)
            tensors, outputs = ctx.saved_tensors[:n], ctx.saved_tensors[n:]
            results = _gradients(op, gradients, tensors, outputs, name, process_set)
        return (None, None, None, None, None, *results)


def _gradients(
    op: ReduceOp,
    gradients: Sequence[Any],
    tensors: Sequence[Any],
    outputs: Sequence[Any],
    name: str | None,
    process_set: ProcessSet,
) -> list[Any]:
    """Return the gradients of a reduction that is not linear."""
    if op is Adasum:
        raise UnsupportedOpError("the gradient of op=Adasum is not defined: detach its input, or its result")
    n, grad_name = len(gradients), _of_gradient(name)
    if op is Product:
        absent = [(x == 0).to(gradient.dtype) for x, gradient in zip(tensors, gradients, strict=True)]
        summed = grouped_allreduce([*gradients, *absent], op=Sum, name=grad_name, process_set=process_set)
        filled = [torch.where(x == 0, torch.ones_like(x), x) for x in tensors]
        others = grouped_allreduce(
            filled, op=Product, name=_of_gradient(name, "others"), process_set=process_set
        )
        return [
            total * torch.where(zeros == missing, product / own, torch.zeros_like(product))
            for total, zeros, missing, product, own in zip(
                summed[:n], summed[n:], absent, others, filled, strict=True
            )
        ]
    held = [
        (tensor == output).to(gradient.dtype)
        for tensor, output, gradient in zip(tensors, outputs, gradients, strict=True)
    ]
    summed = grouped_allreduce([*gradients, *held], op=Sum, name=grad_name, process_set=process_set)
    return [total * mine / holders for total, mine, holders in zip(summed[:n], held, summed[n:], strict=True)]


# -- allgather -----------------------------------------------------------------------------------------


def allgather(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Concatenate the ranks' tensors along dimension 0; see :func:`pyhvd.allgather`.

    The gradient is the Average of the ranks' gradients of this rank's rows.
    """
    if not _is_recorded(tensor):
        return _core.allgather(tensor, name, process_set)
    return HorovodAllgather.apply(_plain(tensor), name, process_set)


def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Gather several tensors as one unit; see :func:`allgather`."""
    if not _is_recorded_group(tensors):
        return _core.grouped_allgather(tensors, name, process_set)
    return list(HorovodGroupedAllgather.apply(name, process_set, *map(_plain, tensors)))


class HorovodAllgather(torch.autograd.Function):
    """An allgather, as autograd records it."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, name: str | None, process_set: ProcessSet) -> Any:
        output, rows = _core.submit_allgather(
            tensor, name, process_set, grouped=False, with_rows=True
        ).result()
        ctx.terms = name, process_set, _own_rows(rows, process_set)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        name, process_set, own = ctx.terms
        whole = allreduce(gradient, name=_of_gradient(name), op=Average, process_set=process_set)
        return whole[own], None, None


class HorovodGroupedAllgather(torch.autograd.Function):
    """A grouped allgather, as autograd records it."""

    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: Any) -> Any:
        pairs = _core.submit_allgather(tensors, name, process_set, grouped=True, with_rows=True).result()
        ctx.terms = name, process_set, [_own_rows(rows, process_set) for _, rows in pairs]
        return tuple(output for output, _ in pairs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        name, process_set, own = ctx.terms
        whole = grouped_allreduce(gradients, name=_of_gradient(name), op=Average, process_set=process_set)
        return (None, None, *(each[rows] for each, rows in zip(whole, own, strict=True)))


def _own_rows(rows: Sequence[int], process_set: ProcessSet) -> slice:
    rank = process_set.rank()
    assert rank is not None
    return slice(sum(rows[:rank]), sum(rows[: rank + 1]))


# -- broadcast -----------------------------------------------------------------------------------------


def broadcast(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the root's tensor on every rank; see :func:`pyhvd.broadcast`.

    On the root the gradient is the Average of the ranks' gradients, elsewhere zero.
    """
    if not _is_recorded(tensor):
        return _core.broadcast(tensor, root_rank, name, process_set)
    return HorovodBroadcast.apply(_plain(tensor), root_rank, name, process_set)


class HorovodBroadcast(torch.autograd.Function):
    """A broadcast, as autograd records it."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
        ctx.terms = root_rank, name, process_set
        return _core.broadcast(tensor, root_rank, name, process_set)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        root_rank, name, process_set = ctx.terms
        total = allreduce(gradient, name=_of_gradient(name), op=Average, process_set=process_set)
        members, rank = process_set.ranks, process_set.rank()
        assert members is not None
        assert rank is not None
        return total if members[rank] == root_rank else total * 0, None, None, None


# -- alltoall ------------------------------------------------------------------------------------------


def alltoall_async(
    tensor: Any,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an alltoall; its result is the pair (output, received splits); see :func:`alltoall`."""
    handle = _core.alltoall_async(tensor, _on_host(splits), name, process_set)

    def finish(results: list[Any]) -> Any:
        output, received = results[0]
        device = splits.device if isinstance(splits, torch.Tensor) else "cpu"
        return output, torch.as_tensor(received, device=device)

    return CombinedHandle(handle.name, [handle], finish)


def alltoall(
    tensor: Any,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send a part of dimension 0 to each rank; see :func:`pyhvd.alltoall`.

    ``splits`` may be a tensor of ints. The received splits, returned if ``splits`` was given, are an int32
    tensor on its device. They have no gradient; that of the output is the alltoall in the other direction.
    """
    if _is_recorded(tensor):
        output, received = HorovodAlltoall.apply(_plain(tensor), splits, name, process_set)
    else:
        output, received = alltoall_async(tensor, splits, name, process_set).result()
    return output if splits is None else (output, received)


class HorovodAlltoall(torch.autograd.Function):
    """An alltoall, as autograd records it."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, splits: Splits, name: str | None, process_set: ProcessSet) -> Any:
        output, received = alltoall_async(tensor, splits, name, process_set).result()
        unsent = 0 if splits is None else len(tensor) - int(sum(splits))
        ctx.terms = received, unsent, name, process_set
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, gradient: Any, _: Any) -> Any:
        received, unsent, name, process_set = ctx.terms
        back, _ = alltoall(gradient, received, _of_gradient(name), process_set)
        if unsent:
            back = torch.cat([back, back.new_zeros((unsent, *back.shape[1:]))])
        return back, None, None, None


def _on_host(splits: Splits) -> Any:
    return splits.detach().cpu().numpy() if isinstance(splits, torch.Tensor) else splits


# -- reducescatter -------------------------------------------------------------------------------------


def reducescatter(
    tensor: Any,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce a tensor over the ranks, and give each rank its part; see :func:`pyhvd.reducescatter`.

    The gradient is the allgather of the ranks' gradients, times the factors, and for Sum times the number of
    ranks.
    """
    if not _is_recorded(tensor):
        return _core.reducescatter(
            tensor, name, compression, op, process_set, prescale_factor, postscale_factor
        )
    sent, ctx = compress_one(compression, _plain(tensor))
    result = HorovodReducescatter.apply(sent, name, op, process_set, prescale_factor, postscale_factor)
    return compression.decompress(result, ctx)


def grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Reduce and scatter several tensors as one unit; see :func:`reducescatter`."""
    if not _is_recorded_group(tensors):
        return _core.grouped_reducescatter(
            tensors, name, compression, op, process_set, prescale_factor, postscale_factor
        )
    sent, contexts = compress_all(compression, [_plain(each) for each in tensors])
    results = HorovodGroupedReducescatter.apply(
        name, op, process_set, prescale_factor, postscale_factor, *sent
    )
    return decompress_all(compression, list(results), contexts)


class HorovodReducescatter(torch.autograd.Function):
    """A reducescatter, as autograd records it."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Any,
        name: str | None,
        op: ReduceOp,
        process_set: ProcessSet,
        prescale: float,
        postscale: float,
    ) -> Any:
        ctx.terms = name, process_set, _factor_of_gradient(op, process_set, prescale, postscale)
        return _core.reducescatter(tensor, name, Compression.none, op, process_set, prescale, postscale)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        name, process_set, factor = ctx.terms
        whole = allgather(_scaled(gradient, factor), _of_gradient(name), process_set)
        return whole, None, None, None, None, None


class HorovodGroupedReducescatter(torch.autograd.Function):
    """A grouped reducescatter, as autograd records it."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: ReduceOp,
        process_set: ProcessSet,
        prescale: float,
        postscale: float,
        *tensors: Any,
    ) -> Any:
        ctx.terms = name, process_set, _factor_of_gradient(op, process_set, prescale, postscale)
        return tuple(
            _core.grouped_reducescatter(tensors, name, Compression.none, op, process_set, prescale, postscale)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        name, process_set, factor = ctx.terms
        scaled = [_scaled(gradient, factor) for gradient in gradients]
        whole = grouped_allgather(scaled, _of_gradient(name), process_set)
        return (None, None, None, None, None, *whole)


def _factor_of_gradient(op: ReduceOp, process_set: ProcessSet, prescale: float, postscale: float) -> float:
    size = process_set.size()
    assert size is not None
    return prescale * postscale * (size if op is Sum else 1)
