"""Connect the ranks of a process set by NCCL, or tell all of them why they are not connected.

All ranks of a set use NCCL, or none does: each rank learns of every rank's error.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import msgspec

from pyhvd.backends.gpu.nccl import NcclBackend
from pyhvd.backends.gpu.nccl_bindings import Library, describe_failure, load_library, version_text
from pyhvd.common.text import list_some
from pyhvd.devices.base import Device, DeviceBackend, DeviceContext
from pyhvd.errors import TransportError
from pyhvd.transport.fabric import Fabric, allgather_bytes, decode_from

CONNECT_S = 120.0
"""Time limit for connecting, in seconds: NCCL has none, so it would wait for a missing rank forever."""

LOOK_S = 0.05
"""Seconds between two looks whether connecting shall be given up."""

ERROR_LENGTH = 512
"""Most characters of an error that ranks tell each other."""


class Refused(Exception):
    """NCCL does not connect a process set. The text is the same on all ranks: it says where and why."""


def usable_version(context: DeviceContext) -> str:
    """Return NCCL's version.

    Raises
    ------
    ImportError, RuntimeError
        NCCL cannot be used here; the text says why.
    """
    if context.packer is None:
        raise RuntimeError(context.no_packer[:ERROR_LENGTH])
    return version_text(load_library().get_version())


def open_nccl(
    fabric: Fabric,
    context: DeviceContext,
    library: Library,
    by_host: Callable[[], DeviceBackend],
    timeout: float = CONNECT_S,
    why_give_up: Callable[[], str] = str,
) -> NcclBackend:
    """Connect the ranks of a process set by NCCL; collective over the set.

    Parameters
    ----------
    fabric : Fabric
        Reaches the set's ranks; not owned. Rank 0 broadcasts the communicator's id over it.
    context, library, by_host
        As for :class:`NcclBackend`.
    timeout : float
        Time limit in seconds.
    why_give_up : callable
        Returns why connecting shall be given up; empty as long as it shall not.

    Raises
    ------
    TransportError
        Connecting was given up.
    Refused
        Connecting failed on some rank; raised on all ranks, and no rank holds a communicator.
    """
    made = _broadcast_id(fabric, library)
    if isinstance(made, str):
        raise Refused(f"rank 0 of the set: {made}")
    comm: Any = None
    error = ""
    try:
        comm = _connect(library, context.device, fabric.size, made, fabric.rank, timeout, why_give_up)
    except TransportError:
        raise
    except Exception as exc:
        error = _text_of(exc)
    texts = [text.decode() for text in allgather_bytes(fabric, error.encode())]
    if any(texts):
        if comm is not None:
            comm.abort()
        said = [f"rank {r} of the set: {text}" for r, text in enumerate(texts) if text]
        raise Refused(list_some(said, "; "))
    return NcclBackend(comm, fabric.rank, fabric.size, context, library, by_host)


def _broadcast_id(fabric: Fabric, library: Library) -> bytes | tuple[int, ...] | str:
    """Return rank 0's id on every rank, in the library's own form, or the text of rank 0's error."""
    mine = b""
    if fabric.rank == 0:
        try:
            mine = msgspec.msgpack.encode(library.get_unique_id())
        except Exception as exc:
            mine = msgspec.msgpack.encode(_text_of(exc))
    made = decode_from(0, allgather_bytes(fabric, mine)[0], msgspec.msgpack.decode, "the id for NCCL")
    return tuple(made) if isinstance(made, list) else made


def _connect(
    library: Library,
    device: Device,
    size: int,
    made: bytes | tuple[int, ...],
    rank: int,
    timeout: float,
    why_give_up: Callable[[], str],
) -> Any:
    """Return a communicator.

    A thread of its own connects: NCCL waits for all ranks, and has no time limit.
    """
    outcome: Future[Any] = Future()

    def connect() -> None:
        comm = failure = None
        try:
            device.take_thread()
            comm = library.NcclCommunicator(size, made, rank)
        except Exception as exc:
            failure = exc
        if outcome.set_running_or_notify_cancel():
            outcome.set_result(comm) if failure is None else outcome.set_exception(failure)
        elif comm is not None:  # connecting was given up
            comm.abort()

    threading.Thread(target=connect, name="pyhvd-nccl-connect", daemon=True).start()
    until = time.monotonic() + timeout
    while not outcome.done():
        wait([outcome], LOOK_S)
        why = why_give_up()
        if (why or time.monotonic() > until) and outcome.cancel():
            if why:
                raise TransportError(f"connecting the ranks by NCCL was given up: {why}")
            raise TimeoutError(f"NCCL has not connected the ranks within {timeout:g} s")
    return outcome.result()


def _text_of(exc: Exception) -> str:
    """Return an error as text that UTF-8 can encode, cut to :data:`ERROR_LENGTH`."""
    text = describe_failure(exc)[:ERROR_LENGTH]
    return text.encode("utf-8", "backslashreplace").decode()
