"""Collectives of Python objects: cloudpickle makes bytes of them, of any size.

The first collective of a call has the same size each time, so that the ranks remember it: it carries the
length and the first bytes. A second one follows only for longer objects.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np

from pyhvd.api.call import OwnName, checked_name, refusing
from pyhvd.api.collectives import start_move
from pyhvd.api.handles import Handle, synchronize
from pyhvd.api.process_sets import ProcessSet, global_process_set
from pyhvd.engine import context
from pyhvd.engine.context import CallOrder
from pyhvd.native.shared_memory import ALLGATHER, BROADCAST, IN_PLACE, WAITS
from pyhvd.negotiation.messages import UNNAMED, RequestType

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Finish = Callable[[Handle], Any]

FIRST = 512
"""Bytes of the first collective of a broadcast, and most that a rank gives to that of an allgather."""
ALLGATHER_FIRST = 65536
"""Bytes of the first collective of an allgather, of all ranks together."""
LENGTH = 8
"""Bytes of the length."""
_OWN = OwnName(f"object.{UNNAMED}")


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
    own, order = _naming(name, process_set, RequestType.BROADCAST)
    with order:
        data = broadcast_bytes(lambda: _pickled(obj), root_rank, own, process_set, order.finish)
    return obj if context.current().topology.rank == root_rank else _unpickled(data.data)


def broadcast_bytes(
    make: Callable[[], Bytes],
    root_rank: int,
    name: str,
    process_set: ProcessSet,
    finish: Finish = synchronize,
) -> Bytes:
    """Return on every rank the bytes that ``make`` returns on the root; only the root calls it."""
    here = context.current().topology.rank == root_rank
    first, room = np.zeros(FIRST, np.uint8), FIRST - LENGTH
    data, part = first[LENGTH:], _part(name, "sz")
    if here:
        with refusing(RequestType.BROADCAST, part, process_set):
            data = make()
        _fill(first.data, data.data)
    form = IN_PLACE | WAITS
    finish(start_move(BROADCAST, form, first, root_rank, part, process_set))
    size = int.from_bytes(first.data[:LENGTH], "little")
    if size <= room:
        return data[:size]
    part = _part(name, "t")
    if not here:
        with refusing(RequestType.BROADCAST, part, process_set):
            data = np.empty(size, np.uint8)
        data[:room] = first[LENGTH:]
    finish(start_move(BROADCAST, form, data[room:], root_rank, part, process_set))
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
    own, order = _naming(name, process_set, RequestType.ALLGATHER)
    with order:
        with refusing(RequestType.ALLGATHER, _part(own, "sz"), process_set):
            data = _pickled(obj)
        gathered = allgather_bytes(data, own, process_set, order.finish)
    return [_unpickled(each) for each in gathered]


def allgather_bytes(
    data: Any, name: str, process_set: ProcessSet, finish: Finish = synchronize
) -> list[memoryview]:
    """Return every rank's bytes, of any number, in rank order; ``data`` is a buffer."""
    mine = np.frombuffer(data, np.uint8)
    _, members = context.current().members_of(process_set)
    block = min(max(ALLGATHER_FIRST // len(members), 64), FIRST)
    room = block - LENGTH
    first = np.zeros(block, np.uint8)
    _fill(first.data, mine.data)
    gathered = finish(start_move(ALLGATHER, WAITS, first, None, _part(name, "sz"), process_set))
    rows = [gathered.data[at : at + block] for at in range(0, len(gathered), block)]
    sizes = [int.from_bytes(row[:LENGTH], "little") for row in rows]
    if max(sizes) <= room:
        return [row[LENGTH : LENGTH + n] for row, n in zip(rows, sizes, strict=True)]
    long = mine if mine.nbytes > room else mine[:0]
    everything = finish(start_move(ALLGATHER, WAITS, long, None, _part(name, "t"), process_set))
    ends = np.cumsum([n if n > room else 0 for n in sizes])
    return [
        everything[end - n : end].data if n > room else row[LENGTH : LENGTH + n]
        for row, n, end in zip(rows, sizes, ends, strict=True)
    ]


def _fill(first: memoryview, data: memoryview) -> None:
    """Store the length of some bytes, and the first of them."""
    start = data[: len(first) - LENGTH]
    first[:LENGTH] = len(data).to_bytes(LENGTH, "little")
    first[LENGTH : LENGTH + len(start)] = start


def _naming(name: str | None, process_set: ProcessSet, kind: RequestType) -> tuple[str, CallOrder]:
    """Return the name of a call, and the order of such calls."""
    if given := checked_name(name, kind):
        return given, CallOrder()
    return _OWN, context.current().order(process_set, _OWN)


def _part(name: str, part: str) -> str:
    return type(name)(f"{name}.{part}")


def _pickled(obj: Any) -> Bytes:
    return np.frombuffer(bytearray(cloudpickle.dumps(obj)), np.uint8)


def _unpickled(data: memoryview) -> Any:
    if "torch" not in sys.modules:
        return cloudpickle.loads(data)
    from pyhvd.devices.torch_pickles import load

    return load(data)
