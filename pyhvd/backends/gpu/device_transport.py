"""What moves device memory between ranks: what a carrier must do, and how its ranks refuse together.

A carrier is used by all ranks of a process set or by none. So each of them hears whatever keeps any of them
from it.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from pyhvd.backends.base import Backend
from pyhvd.devices.base import Device, DeviceBackend, Packer, Stream
from pyhvd.transport.fabric import Fabric

TEXT_BYTES = 512
"""What is told of an error is no longer."""


class Refused(Exception):
    """A carrier does not connect a process set; the text, the same on all ranks, says where and why."""


class DeviceTransport(Protocol):
    """What moves device memory between ranks.

    Attributes
    ----------
    name : str
        As it is said.
    shares : bool
        Whether two ranks may use one device.
    remark : str
        Said behind its version, of what it does not carry; empty where it carries all.
    """

    name: str
    shares: bool
    remark: str

    def version(self, device: Device, fabric: Fabric) -> str:
        """Return its version. Not collective.

        Raises
        ------
        ImportError, RuntimeError
            It cannot be used here; the text says why.
        """

    def open(self, host: Backend, device: Device, stream: Stream, packer: Packer | None) -> DeviceBackend:
        """Return a process set's backend; collective over the set.

        Raises
        ------
        Refused
            It does not connect these ranks. Nothing has been left behind on any of them.
        """


def exchange(fabric: Fabric, mine: bytes) -> list[bytes]:
    """Return what every rank gives."""
    lengths = np.empty(fabric.size, np.int64)
    fabric.allgather(np.array([len(mine)], np.int64).view(np.uint8), lengths.view(np.uint8))
    longest = int(lengths.max())
    if not longest:
        return [b""] * fabric.size
    box = np.empty((fabric.size, longest), np.uint8)
    padded = np.frombuffer(mine.ljust(longest, b"\0"), np.uint8)
    fabric.allgather(padded, box.reshape(-1))
    return [row[:length].tobytes() for row, length in zip(box, lengths.tolist(), strict=True)]


def refuse_together(fabric: Fabric, error: str) -> None:
    """Return if no rank has an error's text to tell; collective.

    Raises
    ------
    Refused
        Some rank has.
    """
    texts = [text.decode() for text in exchange(fabric, cut(error))]
    if any(texts):
        raise Refused("; ".join(f"rank {r} of the set: {text}" for r, text in enumerate(texts) if text))


def cut(text: str) -> bytes:
    """Return a text as UTF-8, of :data:`TEXT_BYTES` at most."""
    return text.encode("utf-8", "backslashreplace")[:TEXT_BYTES].decode("utf-8", "ignore").encode()
