"""Allreduces of arrays on devices that are like the last one of their name: checked then, not checked again.

A training loop submits the same names with the same terms in every step; only the arrays' addresses differ. A
call that differs in anything from what is remembered goes the long way, which checks, and says what is wrong.
For host arrays the fast lane remembers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pyhvd.api.call import Call, Part, result_on_device, wrap
from pyhvd.api.handles import Handle
from pyhvd.api.process_sets import ProcessSet
from pyhvd.devices.array_libraries import adopt, adopt_for_writing
from pyhvd.devices.base import Device, DeviceView
from pyhvd.devices.streams import mark_ready
from pyhvd.dtypes import DtypeInfo, ReduceOp
from pyhvd.engine.context import Context, Ranks, current_slot
from pyhvd.negotiation.messages import Request, RequestType

MOST = 4096
"""Calls that are remembered."""


class Known(msgspec.Struct, frozen=True):
    """A call that was as it should be.

    Attributes
    ----------
    ranks : tuple of int
        Members of its process set: this very object, as a set's number may become another's.
    op : ReduceOp or None
        As it was given.
    prescale, postscale : float
        As they were given.
    on : Device
        Where its arrays were.
    tensors : list of (Request, DtypeInfo)
        What each of them was.
    """

    ranks: Ranks
    op: ReduceOp | None
    prescale: float
    postscale: float
    on: Device
    tensors: list[tuple[Request, DtypeInfo]]


def remember(
    call: Call, grouped: bool, inplace: bool, op: ReduceOp | None, prescale: float, postscale: float
) -> None:
    """Remember an allreduce that has been submitted, if :func:`repeat` can do it again."""
    tensors: list[tuple[Request, DtypeInfo]] = []
    for request, source, _, _ in call.parts:
        if not isinstance(source, DeviceView):
            return
        tensors.append((request, source.info))
        on = source.on
    if not tensors or type(prescale) is not float or type(postscale) is not float:
        return
    repeats = call.context.repeats
    key = (call.set_id, call.name, grouped, inplace)
    if len(repeats) >= MOST and key not in repeats:
        repeats.clear()  # names that never come again, most of them
    repeats[key] = Known(call.ranks, op, prescale, postscale, on, tensors)


def repeat(
    grouped: bool,
    inplace: bool,
    tensors: Any,
    average: bool | None,
    name: str | None,
    op: ReduceOp | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> Handle | None:
    """Start an allreduce that is like the last one of its name; None: it is not."""
    active = current_slot().context
    if active is None or average is not None or type(name) is not str:
        return None
    if not active.repeats or not isinstance(process_set, ProcessSet):
        return None
    set_id = process_set.process_set_id
    known: Known | None = active.repeats.get((set_id, name, grouped, inplace))
    if known is None or set_id is None or not _same_terms(active, set_id, known, op, prescale, postscale):
        return None
    if grouped and not isinstance(tensors, (list, tuple)):
        return None
    members: list[Any] = list(tensors) if grouped else [tensors]
    if len(members) != len(known.tensors):
        return None
    active.check_usable()
    try:
        parts = _parts(known, members, inplace)
        if parts is None:
            return None
        result = result_on_device(grouped, members if inplace else None)
        handle, entries = wrap(active, set_id, name, parts, result)
        active.runtime.submit(entries)
    except Exception:
        kind = RequestType(known.tensors[0][0].type)
        with Call(kind, name, process_set, grouped=grouped):  # tells the other ranks
            raise
    return handle


def _same_terms(
    active: Context, set_id: int, known: Known, op: ReduceOp | None, prescale: float, postscale: float
) -> bool:
    return (
        known.ranks is active.process_sets.get(set_id)
        and op is known.op
        and type(prescale) is type(postscale) is float
        and prescale == known.prescale
        and postscale == known.postscale
    )


def _parts(known: Known, members: Sequence[Any], inplace: bool) -> list[Part] | None:
    """Return what is to be submitted; None if an array is not as it was."""
    parts: list[Part] = []
    views: list[DeviceView] = []
    take = adopt_for_writing if inplace else adopt
    on = known.on
    for tensor, (request, info) in zip(members, known.tensors, strict=True):
        source = take(tensor)
        if not isinstance(source, DeviceView):
            return None
        if source.shape != request.shape or source.info is not info or source.on is not on:
            return None
        target = source if inplace else source.library.empty_like(source, request.shape)
        parts.append((request, source, target, ()))
        views.append(source)
        views.append(target)
    mark_ready(views)
    return parts
