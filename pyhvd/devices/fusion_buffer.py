"""The memory in which a rank's device packs tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyhvd.devices.base import Device, Memory, Stream

KEPT = 128 * 1024 * 1024
"""Bytes; a larger buffer returns to the device's pool after use."""


class FusionBuffer:
    """One buffer for the work of all process sets: it is on one stream, so it uses the buffer in order."""

    def __init__(self, device: Device, stream: Stream) -> None:
        self._device, self._stream = device, stream
        self._memory: Memory | None = None

    def reserve(self, nbytes: int) -> None:
        """Let the buffer grow to a number of bytes; MemoryError if the device has too little memory."""
        if self._memory is None or self._memory.nbytes < nbytes:
            self._memory = None  # free the old one first
            self._memory = self._device.allocate(nbytes, self._stream)

    @contextmanager
    def room(self, nbytes: int) -> Iterator[int]:
        """Yield the buffer's address, aligned to 256 bytes; 0 if ``nbytes`` is 0."""
        if not nbytes:
            yield 0
            return
        self.reserve(nbytes)
        assert self._memory is not None
        yield self._memory.ptr
        if self._memory.nbytes > KEPT:
            self.free()

    def free(self) -> None:
        """Give the memory back."""
        self._memory = None
