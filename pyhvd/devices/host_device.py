"""A device of host memory, for a rank that has joined and has no GPU: it contributes no data."""

from __future__ import annotations

import ctypes

import numpy as np

from pyhvd.arrays import Bytes, address
from pyhvd.devices.base import Event, Memory, Packer, Stream


class HostDevice:
    """Does all work at once, on the only stream; see :class:`pyhvd.devices.base.Device`.

    It is no physical device, so its identity is empty. Its events have passed from the start.
    """

    index = -1
    name = "cpu"

    def identity(self) -> str:
        return ""

    def take_thread(self) -> None:
        pass

    def make_stream(self) -> Stream:
        return 0

    def current_stream(self) -> Stream:
        return 0

    def is_capturing(self, stream: Stream) -> bool:  # noqa: ARG002 - the protocol's
        return False

    def make_event(self) -> Event:
        return None

    def record(self, event: Event, stream: Stream) -> None:
        pass

    def mark(self, stream: Stream) -> Event:  # noqa: ARG002 - the protocol's
        return None

    def wait(self, stream: Stream, event: Event) -> None:
        pass

    def has_passed(self, event: Event) -> bool:  # noqa: ARG002 - the protocol's
        return True

    def synchronize(self, event: Event) -> None:
        pass

    def allocate(self, nbytes: int, stream: Stream) -> Memory:  # noqa: ARG002 - the protocol's
        memory = np.empty(nbytes, np.uint8)
        return Memory(address(memory), nbytes, memory)

    def allocate_pinned(self, nbytes: int) -> Bytes:
        return np.empty(nbytes, np.uint8)

    def packer(self) -> Packer:
        raise RuntimeError("host memory has no kernels")

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:  # noqa: ARG002
        ctypes.memmove(target, source, nbytes)
