"""Reducing calls: from a verb's arguments to a handle.

An allreduce is offered to the fast lane first (:func:`start`), which takes what the ranks remember; then to
:mod:`pyhvd.api.repeats`, which remembers those of arrays on devices; the queue takes everything.
"""

from __future__ import annotations

from typing import Any

from pyhvd.api.call import Call, check_rows
from pyhvd.api.handles import Handle
from pyhvd.api.process_sets import ProcessSet, global_process_set
from pyhvd.api.repeats import remember, repeat
from pyhvd.arrays import TensorView
from pyhvd.devices.array_libraries import View, adopt, adopt_for_writing, target_like
from pyhvd.dtypes import ReduceOp
from pyhvd.engine.context import current_slot, process_slot
from pyhvd.native.shared_memory import set_lookup, start
from pyhvd.negotiation.messages import RequestType
from pyhvd.negotiation.reduction import Reduction
from pyhvd.transport.arena import Arena

__all__ = ["queue_allreduce", "reduce_tensors", "start"]

set_lookup(current_slot, process_slot, ProcessSet, global_process_set)


def queue_allreduce(
    grouped: bool,
    inplace: bool,
    tensors: Any,
    average: bool | None,
    name: str | None,
    op: ReduceOp | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> Handle:
    """Start an allreduce that the fast lane does not know."""
    handle = repeat(
        grouped, inplace, tensors, average, name, op, prescale_factor, postscale_factor, process_set
    )
    if handle is not None:
        return handle
    how = (average, op, prescale_factor, postscale_factor)
    return reduce_tensors(RequestType.ALLREDUCE, tensors, grouped, inplace, name, process_set, how)


def reduce_tensors(
    kind: RequestType,
    tensors: Any,
    grouped: bool,
    inplace: bool,
    name: str | None,
    process_set: ProcessSet,
    how: tuple[bool | None, ReduceOp | None, float, float],
) -> Handle:
    """Start a reducing call: check, wrap, submit."""
    with Call(kind, name, process_set, grouped=grouped) as call:
        members = call.members(tensors)
        reduction = Reduction.of(kind, *how)
        reduction.check_ranks(call.ranks)
        if reduction.op is ReduceOp.ADASUM:
            call.kind = RequestType.ADASUM
        for tensor in members:
            source = adopt_for_writing(tensor) if inplace else adopt(tensor)
            reduction.check(source.info)
            if kind is RequestType.REDUCESCATTER:
                rows = check_rows(source.shape, call.size)[call.rank]
                target = target_like(source, (rows, *source.shape[1:]))
            else:
                target = source if inplace else target_like(source, source.shape)
            call.add(
                source,
                target,
                op=int(reduction.op),
                prescale=reduction.prescale,
                postscale=reduction.postscale,
                window=target is source and _needs_no_copy(call, kind, source, reduction),
            )
        handle = call.submit(members if inplace else None)
        if name is not None and kind is RequestType.ALLREDUCE and how[0] is None:
            remember(call, grouped, inplace, *how[1:])
        return handle


def _needs_no_copy(call: Call, kind: RequestType, tensor: View, reduction: Reduction) -> bool:
    """Return whether every rank of the node can reduce a tensor where it lies."""
    if not isinstance(tensor, TensorView):
        return False
    arena = call.context.arena
    in_arena = isinstance(arena, Arena) and tensor.home is None and arena.holds(tensor.ptr)
    return in_arena and kind is RequestType.ALLREDUCE and reduction.prescale == 1.0
