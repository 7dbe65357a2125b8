"""Collectives of Python objects: cloudpickle makes bytes of them, of any size."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np

from pyhvd.api.call import OwnName, checked_name, refusing
from pyhvd.api.collectives import allgather, broadcast, broadcast_
from pyhvd.api.process_sets import ProcessSet, global_process_set
from pyhvd.engine import context
from pyhvd.negotiation.messages import UNNAMED, RequestType

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


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
    name = _name(name, process_set, RequestType.BROADCAST)
    data = broadcast_bytes(lambda: _pickled(obj), root_rank, name, process_set)
    return obj if context.current().topology.rank == root_rank else _unpickled(data.data)


def broadcast_bytes(make: Callable[[], Bytes], root_rank: int, name: str, process_set: ProcessSet) -> Bytes:
    """Return on every rank the bytes that ``make`` returns on the root; only the root calls it."""
    here = context.current().topology.rank == root_rank
    data = np.empty(0, np.uint8)
    if here:
        with refusing(RequestType.BROADCAST, _part(name, "sz"), process_set):
            data = make()
    size = broadcast(np.array(data.nbytes, np.int64), root_rank, _part(name, "sz"), process_set)
    if not here:
        with refusing(RequestType.BROADCAST, _part(name, "t"), process_set):
            data = np.empty(int(size), np.uint8)
    broadcast_(data, root_rank, _part(name, "t"), process_set)
    return data


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
    name = _name(name, process_set, RequestType.ALLGATHER)
    with refusing(RequestType.ALLGATHER, _part(name, "sz"), process_set):
        data = _pickled(obj)
    return [_unpickled(each) for each in allgather_bytes(data, name, process_set)]


def allgather_bytes(data: Any, name: str, process_set: ProcessSet) -> list[memoryview]:
    """Return every rank's bytes, of any number, in rank order; ``data`` is a buffer."""
    mine = np.frombuffer(data, np.uint8)
    sizes = allgather(np.array([mine.nbytes], np.int64), _part(name, "sz"), process_set)
    everything = allgather(mine, _part(name, "t"), process_set)
    ends = np.cumsum(sizes)
    return [everything[end - n : end].data for n, end in zip(sizes, ends, strict=True)]


def _name(name: str | None, process_set: ProcessSet, kind: RequestType) -> str:
    active = context.current()
    set_id, _ = active.members_of(process_set)
    return checked_name(name, kind) or OwnName(active.next_name(set_id, f"object.{UNNAMED}"))


def _part(name: str, part: str) -> str:
    return type(name)(f"{name}.{part}")


def _pickled(obj: Any) -> Bytes:
    return np.frombuffer(bytearray(cloudpickle.dumps(obj)), np.uint8)


def _unpickled(data: memoryview) -> Any:
    if "torch" not in sys.modules:
        return cloudpickle.loads(data)
    from pyhvd.devices.torch_pickles import load

    return load(data)
