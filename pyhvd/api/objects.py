"""Collectives of Python objects: pickles of any size.

The first collective of a call has the same size each time, so that the ranks remember it: it carries the
first bytes and the length. A second one follows only for longer objects.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable
from functools import cache
from struct import Struct
from typing import Any, NoReturn

import cloudpickle
import numpy as np

from pyhvd.api.call import OwnName, checked_name, refusing
from pyhvd.api.collectives import find_order
from pyhvd.api.process_sets import ProcessSet, global_process_set
from pyhvd.engine import context
from pyhvd.native.shared_memory import ALLGATHER, BROADCAST, IN_PLACE, WAITS, CallOrder
from pyhvd.negotiation.messages import UNNAMED, RequestType

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Data = bytes | Bytes
Names = tuple[str, str]
"""Of the first and of the second collective."""
Move = Callable[..., Any]
"""Makes a collective in a call's order, and returns its result; see :meth:`CallOrder.move`."""

FIRST = 512
"""Bytes of the first collective of a broadcast, and most that a rank gives to that of an allgather."""
ALLGATHER_FIRST = 65536
"""Bytes of the first collective of an allgather, of all ranks together."""
_LENGTH = Struct("<Q")
_ROOM = FIRST - _LENGTH.size
_UINT8 = np.dtype(np.uint8)
_NOTHING = np.frombuffer(bytes(FIRST), _UINT8)


@cache
def _block_of(ranks: int) -> Struct:
    """Return the layout of what each of so many ranks gives to a first collective: bytes, then the length."""
    nbytes = min(max(ALLGATHER_FIRST // ranks, 64), FIRST)
    return Struct(f"<{nbytes - _LENGTH.size}sQ")


_BLOCK = _block_of(1)


def _names(name: str) -> Names:
    return type(name)(f"{name}.sz"), type(name)(f"{name}.t")


_OWN = _names(OwnName(f"object.{UNNAMED}"))


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's object on every rank.

    Tensors of torch on a GPU come to the rank's current GPU.

    Parameters
    ----------
    obj : object
        Any object that cloudpickle can pickle. Only the root's matters; the root gets back the same object.
    root_rank : int
        A global rank.
    name : str, optional
        The same on every rank.
    process_set : ProcessSet
        The ranks that take part.
    """
    names, order = _naming(name, process_set, BROADCAST)
    make = (lambda: _pickled(obj)) if context.current().topology.rank == root_rank else None
    with order:
        data = _broadcast(make, root_rank, names, process_set, order.move)
    return _unpickled(data) if make is None else obj


def broadcast_bytes(make: Callable[[], Bytes], root_rank: int, name: str, process_set: ProcessSet) -> Bytes:
    """Return on every rank the bytes that ``make`` returns on the root; only the root calls it."""
    here = context.current().topology.rank == root_rank
    return _broadcast(make if here else None, root_rank, _names(name), process_set, CallOrder().move)


def _broadcast(
    make: Callable[[], Data] | None, root_rank: int, names: Names, process_set: ProcessSet, move: Move
) -> Bytes:
    """Return the bytes that ``make`` returns on the root; the other ranks give None."""
    first: Any = _NOTHING
    if make is not None:
        data = _prepared(make, BROADCAST, names[0], process_set)
        first = _first(data, _BLOCK)
    first = move(BROADCAST, WAITS, first, root_rank, names[0], process_set)
    (size,) = _LENGTH.unpack_from(first, _ROOM)
    whole: Bytes = first[:size]
    if size <= _ROOM:
        return whole
    if make is None:
        whole = _prepared(lambda: np.empty(size, np.uint8), BROADCAST, names[1], process_set)
        whole[:_ROOM] = first[:_ROOM]
    elif isinstance(data, bytes):
        whole = _prepared(lambda: np.frombuffer(bytearray(data), np.uint8), BROADCAST, names[1], process_set)
    else:
        whole = data
    move(BROADCAST, IN_PLACE | WAITS, whole[_ROOM:], root_rank, names[1], process_set)
    return whole


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return every rank's object, in rank order.

    Tensors of torch on a GPU come to the rank's current GPU.

    Parameters
    ----------
    obj : object
        Any object that cloudpickle can pickle; the sizes may differ.
    name : str, optional
        The same on every rank.
    process_set : ProcessSet
        The ranks that take part.
    """
    names, order = _naming(name, process_set, ALLGATHER)
    with order:
        data = _prepared(lambda: _pickled(obj), ALLGATHER, names[0], process_set)
        gathered = _allgather(data, names, process_set, order.move)
    return [_unpickled(each) for each in gathered]


def allgather_bytes(data: bytes, name: str, process_set: ProcessSet) -> list[bytes | memoryview]:
    """Return every rank's bytes, of any number, in rank order."""
    return _allgather(data, _names(name), process_set, CallOrder().move)


def _allgather(data: Data, names: Names, process_set: ProcessSet, move: Move) -> list[bytes | memoryview]:
    _, members = context.current().members_of(process_set)
    block = _block_of(len(members))
    room = block.size - _LENGTH.size
    gathered = move(ALLGATHER, WAITS, _first(data, block), None, names[0], process_set)
    rows = list(block.iter_unpack(gathered))
    sizes = [size for _, size in rows]
    if max(sizes) <= room:
        return [first[:size] for first, size in rows]
    long = np.frombuffer(data if len(data) > room else b"", np.uint8)
    everything = move(ALLGATHER, WAITS, long, None, names[1], process_set)
    ends = np.cumsum([size if size > room else 0 for size in sizes])
    return [
        everything[end - size : end].data if size > room else first[:size]
        for (first, size), end in zip(rows, ends, strict=True)
    ]


def _prepared(make: Callable[[], Any], verb: int, name: str, process_set: ProcessSet) -> Any:
    """Return what ``make`` returns; if it raises an error, announce the call as refused."""
    try:
        return make()
    except Exception:
        with refusing(RequestType(verb), name, process_set):
            raise


def _first(data: Data, block: Struct) -> Bytes:
    """Return what a rank with this data gives to a first collective: ``pack`` cuts it, or adds zeros."""
    return np.frombuffer(block.pack(bytes(data[: block.size]), len(data)), _UINT8)


def _naming(name: str | None, process_set: ProcessSet, verb: int) -> tuple[Names, CallOrder]:
    """Return the names of a call's collectives, and the order of such calls."""
    if name is None:
        return _OWN, find_order(process_set, _OWN[0])
    return _names(checked_name(name, RequestType(verb))), CallOrder()


class _NotPlain(Exception):
    """An object is neither a builtin value nor a builtin container."""


class _PlainPickler(pickle.Pickler):
    """Pickles builtin values and containers as cloudpickle does; raises _NotPlain for all other objects.

    It is written in C, and calls :meth:`reducer_override` only for the other objects.
    """

    def reducer_override(self, obj: Any) -> NoReturn:
        raise _NotPlain(obj)


def _pickled(obj: Any) -> bytes:
    """Return cloudpickle's pickle of an object."""
    file = io.BytesIO()
    try:
        _PlainPickler(file, cloudpickle.DEFAULT_PROTOCOL).dump(obj)
        return file.getvalue()
    except (_NotPlain, RecursionError):
        file.close()  # it may be large
    pickled: bytes = cloudpickle.dumps(obj)
    return pickled


def _unpickled(data: bytes | memoryview | Bytes) -> Any:
    if "torch" not in sys.modules:
        return cloudpickle.loads(data)
    from pyhvd.devices.torch_pickles import load

    return load(data)
