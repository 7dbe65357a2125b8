"""A device of host memory, for a rank that has joined and has no GPU: it contributes no data."""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from pyhvd.arrays import Bytes, address
from pyhvd.devices.base import Event, Memory, Packer, Stream


class _HostMemory:
    def __init__(self, nbytes: int) -> None:
        self._memory = np.empty(nbytes, np.uint8)
        self.ptr = address(self._memory)
        self.nbytes = nbytes


class HostDevice:
    """Does all work at once; see :class:`pyhvd.devices.base.Device`."""

    index = -1
    name = "cpu"

    def identity(self) -> str:
        """Return an empty text: this is no physical device."""
        return ""

    def acting(self) -> AbstractContextManager[None]:
        """Do nothing."""
        return nullcontext()

    def make_stream(self) -> Stream:
        """Return the only stream."""
        return 0

    def current_stream(self) -> Stream:
        """Return the only stream."""
        return 0

    def make_event(self) -> Event:
        """Return an event that has passed."""
        return None

    def record(self, event: Event, stream: Stream) -> None:
        """Do nothing."""

    def mark(self, stream: Stream) -> Event:  # noqa: ARG002 - the protocol's
        """Return an event that has passed."""
        return None

    def wait(self, stream: Stream, event: Event) -> None:
        """Do nothing."""

    def has_passed(self, event: Event) -> bool:  # noqa: ARG002 - the protocol's
        """Return True."""
        return True

    def synchronize(self, event: Event) -> None:
        """Do nothing."""

    def allocate(self, nbytes: int, stream: Stream) -> Memory:  # noqa: ARG002 - the protocol's
        """Return memory."""
        return _HostMemory(nbytes)

    def allocate_pinned(self, nbytes: int) -> Bytes:
        """Return memory."""
        return np.empty(nbytes, np.uint8)

    def packer(self) -> Packer | None:
        """Return None."""
        return None

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:  # noqa: ARG002
        """Copy."""
        ctypes.memmove(target, source, nbytes)
