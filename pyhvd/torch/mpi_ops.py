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

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from pyhvd.api import collectives as _core
from pyhvd.api.call import resolve_op
from pyhvd.api.collectives import Adasum, Average, Product, Splits, Sum
from pyhvd.api.compression import Compressor, compress_all, decompress_all
from pyhvd.api.handles import Handle
from pyhvd.api.process_sets import ProcessSet, global_process_set
from pyhvd.api.topology import rank
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


class _RecordedCall(NamedTuple):
    """The terms of a recorded call, of one tensor or of a group, for its backward pass too."""

    name: str | None
    process_set: ProcessSet
    op: ReduceOp = Average  # also of the gradients of an allgather
    prescale: float = 1.0
    postscale: float = 1.0
    grouped: bool = False

    def call(self, one: Any, several: Any, tensors: Sequence[Any], **arguments: Any) -> list[Any]:
        """Call the verb for a group, or the one for a single tensor; return a list in both cases."""
        results: list[Any]
        results = several(tensors, **arguments) if self.grouped else [one(tensors[0], **arguments)]
        return results

    def reduction(self, name: str | None) -> dict[str, Any]:
        """Return the arguments of a reduction of this name."""
        factors = {"prescale_factor": self.prescale, "postscale_factor": self.postscale}
        return {"name": name, "op": self.op, "process_set": self.process_set, **factors}


def _record(
    function: Callable[..., Sequence[Any]],
    terms: _RecordedCall,
    tensors: Sequence[Any],
    compression: type[Compressor] = Compression.none,
) -> list[Any]:
    """Call a function that autograd records, with the compressed tensors."""
    sent, contexts = compress_all(compression, [_plain(each) for each in tensors])
    return decompress_all(compression, list(function(terms, *sent)), contexts)


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
    terms = _RecordedCall(name, process_set, chosen, prescale_factor, postscale_factor)
    return _record(_allreduce_recorded, terms, [tensor], compression)[0]


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
    terms = _RecordedCall(name, process_set, chosen, prescale_factor, postscale_factor, grouped=True)
    return _record(_allreduce_recorded, terms, tensors, compression)


def _allreduce_recorded(terms: _RecordedCall, *tensors: Any) -> Sequence[Any]:
    """Reduce so that autograd records it; factors of an op that is not linear are calls of their own."""
    if terms.op in _LINEAR:
        return HorovodAllreduce.apply(terms, *tensors)  # type: ignore[no-any-return]
    scaled = [_scaled(each, terms.prescale) for each in tensors]
    results = HorovodAllreduce.apply(terms._replace(prescale=1.0, postscale=1.0), *scaled)
    return [_scaled(each, terms.postscale) for each in results]


def _scaled(tensor: Any, factor: float) -> Any:
    return tensor if factor == 1.0 else tensor * factor


class HorovodAllreduce(torch.autograd.Function):
    """An allreduce of one tensor or of a group, as autograd records it."""

    @staticmethod
    def forward(ctx: Any, terms: _RecordedCall, *tensors: Any) -> Any:
        ctx.terms = terms
        arguments = terms.reduction(terms.name)
        outputs = terms.call(_core.allreduce, _core.grouped_allreduce, tensors, **arguments)
        if terms.op not in _LINEAR:
            ctx.save_for_backward(*tensors, *outputs)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        terms: _RecordedCall = ctx.terms
        if terms.op in _LINEAR:
            arguments = terms.reduction(_of_gradient(terms.name))
            results = terms.call(allreduce, grouped_allreduce, gradients, **arguments)
        else:
            n = len(gradients)
            results = _gradients(terms, gradients, ctx.saved_tensors[:n], ctx.saved_tensors[n:])
        return (None, *results)


HorovodGroupedAllreduce = HorovodAllreduce  # a name of Horovod's


def _gradients(
    terms: _RecordedCall, gradients: Sequence[Any], tensors: Sequence[Any], outputs: Sequence[Any]
) -> list[Any]:
    """Return the gradients of a reduction that is not linear."""
    if terms.op is Adasum:
        raise UnsupportedOpError("the gradient of op=Adasum is not defined: detach its input, or its result")
    if terms.op is Product:
        marked = [x == 0 for x in tensors]
    else:
        marked = [tensor == output for tensor, output in zip(tensors, outputs, strict=True)]
    n, process_set = len(gradients), terms.process_set
    mine = [mark.to(gradient.dtype) for mark, gradient in zip(marked, gradients, strict=True)]
    summed = grouped_allreduce(
        [*gradients, *mine], op=Sum, name=_of_gradient(terms.name), process_set=process_set
    )
    triples = list(zip(summed[:n], mine, summed[n:], strict=True))
    if terms.op is not Product:
        return [total * own / all_ranks for total, own, all_ranks in triples]
    filled = [torch.where(mark, torch.ones_like(x), x) for mark, x in zip(marked, tensors, strict=True)]
    products = grouped_allreduce(
        filled, op=Product, name=_of_gradient(terms.name, "others"), process_set=process_set
    )
    return [
        total * torch.where(zeros == missing, product / own, torch.zeros_like(product))
        for (total, missing, zeros), product, own in zip(triples, products, filled, strict=True)
    ]


# -- allgather -----------------------------------------------------------------------------------------


def allgather(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Concatenate the ranks' tensors along dimension 0; see :func:`pyhvd.allgather`.

    The gradient is the Average of the ranks' gradients of this rank's rows.
    """
    if not _is_recorded(tensor):
        return _core.allgather(tensor, name, process_set)
    return _record(HorovodAllgather.apply, _RecordedCall(name, process_set), [tensor])[0]


def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Gather several tensors as one unit; see :func:`allgather`."""
    if not _is_recorded_group(tensors):
        return _core.grouped_allgather(tensors, name, process_set)
    return _record(HorovodAllgather.apply, _RecordedCall(name, process_set, grouped=True), tensors)


class HorovodAllgather(torch.autograd.Function):
    """An allgather of one tensor or of a group, as autograd records it."""

    @staticmethod
    def forward(ctx: Any, terms: _RecordedCall, *tensors: Any) -> Any:
        given, grouped = (tensors if terms.grouped else tensors[0]), terms.grouped
        handle = _core.submit_allgather(given, terms.name, terms.process_set, grouped=grouped, with_rows=True)
        pairs = handle.result() if grouped else [handle.result()]
        ctx.terms = terms, [_own_rows(rows, terms.process_set) for _, rows in pairs]
        return tuple(output for output, _ in pairs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        terms, own = ctx.terms
        arguments = terms.reduction(_of_gradient(terms.name))
        whole = terms.call(allreduce, grouped_allreduce, gradients, **arguments)
        return (None, *(each[rows] for each, rows in zip(whole, own, strict=True)))


HorovodGroupedAllgather = HorovodAllgather  # a name of Horovod's


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
        return total if rank() == root_rank else total * 0, None, None, None


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
    terms = _RecordedCall(name, process_set, op, prescale_factor, postscale_factor)
    return _record(HorovodReducescatter.apply, terms, [tensor], compression)[0]


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
    terms = _RecordedCall(name, process_set, op, prescale_factor, postscale_factor, grouped=True)
    return _record(HorovodReducescatter.apply, terms, tensors, compression)


class HorovodReducescatter(torch.autograd.Function):
    """A reducescatter of one tensor or of a group, as autograd records it."""

    @staticmethod
    def forward(ctx: Any, terms: _RecordedCall, *tensors: Any) -> Any:
        size = terms.process_set.size()
        assert size is not None
        ctx.terms = terms, terms.prescale * terms.postscale * (size if terms.op is Sum else 1)
        arguments = terms.reduction(terms.name)
        return tuple(terms.call(_core.reducescatter, _core.grouped_reducescatter, tensors, **arguments))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        terms, factor = ctx.terms
        scaled = [_scaled(gradient, factor) for gradient in gradients]
        arguments = {"name": _of_gradient(terms.name), "process_set": terms.process_set}
        return (None, *terms.call(allgather, grouped_allgather, scaled, **arguments))


HorovodGroupedReducescatter = HorovodReducescatter  # a name of Horovod's
