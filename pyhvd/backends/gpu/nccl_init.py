"""How the ranks of a process set become an NCCL communicator, or all learn why they do not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from pyhvd.backends.base import Backend
from pyhvd.backends.gpu.device_transport import TEXT_BYTES, Refused, cut, refuse_together
from pyhvd.backends.gpu.nccl import NcclBackend
from pyhvd.backends.gpu.nccl_bindings import Library, load_library, version_text
from pyhvd.backends.gpu.staged import StagedBackend
from pyhvd.devices.base import Device, DeviceBackend, Packer, Stream
from pyhvd.transport.fabric import Fabric

CONNECT_S = 120.0
"""Seconds that NCCL gets to connect the ranks: its own start has no limit where a rank never comes."""

_ID_BYTES = 128


class NcclTransport:
    """What moves device memory between ranks by NCCL; see :class:`pyhvd.backends.gpu.device_transport.DeviceTransport`.

    Parameters
    ----------
    load : callable
        Returns the library; raises where there is none.
    """

    name = "NCCL"
    shares = False
    remark = ""

    def __init__(self, load: Callable[[], Library] = load_library) -> None:
        self._load = load

    def version(self, device: Device, fabric: Fabric) -> str:  # noqa: ARG002 - it has a network of its own
        """Return NCCL's version.

        Raises
        ------
        ImportError, RuntimeError
            It cannot be used here.
        """
        if device.packer() is None:
            raise RuntimeError(
                "pyhvd's kernels cannot be compiled, as NVRTC is not found: pip install"
                ' "pyhvd[cuda13]", or "pyhvd[cuda12]", brings it'
            )
        return version_text(self._load().get_version())

    def open(self, host: Backend, device: Device, stream: Stream, packer: Packer | None) -> DeviceBackend:
        """Return a process set's backend; collective.

        Raises
        ------
        Refused
            NCCL does not connect these ranks.
        """

        def by_host() -> StagedBackend:
            return StagedBackend(host, device, stream, packer)

        assert packer is not None  # else no version would have been offered
        return open_nccl(host.fabric, device, stream, packer, self._load(), by_host)


def open_nccl(
    fabric: Fabric,
    device: Device,
    stream: Stream,
    packer: Packer,
    library: Library,
    by_host: Callable[[], DeviceBackend],
    timeout: float = CONNECT_S,
) -> NcclBackend:
    """Connect the ranks of a process set by NCCL; collective.

    Parameters
    ----------
    fabric : Fabric
        Reaches the set's ranks; not owned. By it rank 0 tells the others the communicator's id.
    device, stream, packer, library, by_host
        As :class:`NcclBackend` has them.
    timeout : float
        Seconds that NCCL gets.

    Raises
    ------
    Refused
        It did not work on some rank; on all ranks, none of which has a communicator then.
    """
    made = _share_id(fabric, library)
    if isinstance(made, str):
        raise Refused(f"rank 0 of the set: {made}")
    comm: Any = None
    error = ""
    try:
        comm = _connect(library, device, fabric.size, made, fabric.rank, timeout)
    except Exception as exc:
        error = f"{type(exc).__name__}: {exc}"
    try:
        refuse_together(fabric, error)
    except Refused:
        if comm is not None:
            comm.abort()
        raise
    return NcclBackend(comm, fabric.rank, fabric.size, device, stream, packer, library, by_host)


def _share_id(fabric: Fabric, library: Library) -> bytes | tuple[int, ...] | str:
    """Return rank 0's id on every rank, in the form in which the library has it, or what went wrong there."""
    message = np.zeros(1 + TEXT_BYTES, np.uint8)
    if fabric.rank == 0:
        try:
            made = library.get_unique_id()
            form, payload = (b"b", made) if isinstance(made, bytes) else (b"t", bytes(n & 0xFF for n in made))
        except Exception as exc:
            form, payload = b"!", cut(f"{type(exc).__name__}: {exc}")
        told = form + payload
        message[: len(told)] = np.frombuffer(told, np.uint8)
    fabric.broadcast(message, 0)
    form, payload = message[:1].tobytes(), message[1:].tobytes()
    if form == b"!":
        return payload.rstrip(b"\0").decode()
    if form == b"t":
        return tuple(message[1 : 1 + _ID_BYTES].view(np.int8).tolist())
    return payload[:_ID_BYTES]


def _connect(
    library: Library, device: Device, size: int, made: bytes | tuple[int, ...], rank: int, timeout: float
) -> Any:
    """Return a communicator.

    In a thread of its own: NCCL waits for all ranks, and cannot be told for how long.
    """
    outcome: list[Any] = []

    def connect() -> None:
        try:
            with device.acting():
                outcome.append(library.NcclCommunicator(size, made, rank))
        except Exception as exc:
            outcome.append(exc)

    thread = threading.Thread(target=connect, name="pyhvd-nccl-connect", daemon=True)
    thread.start()
    thread.join(timeout)
    if not outcome:
        raise TimeoutError(f"NCCL has not connected the ranks within {timeout:g} s")
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]
