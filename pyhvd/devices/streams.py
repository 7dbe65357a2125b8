"""Order the work of several streams, and keep memory from its pool while they use it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from pyhvd.devices.base import Device, DeviceView, Event, Stream

_LEGACY, _PER_THREAD = 1, 2  # CUDA's names for its two default streams


def stream_of(handle: int, whose: str) -> Stream:
    """Return the stream of CUDA's handle in another library; ``whose`` describes it for the error.

    Raises ValueError for a handle that is a different stream on each thread.
    """
    if handle == _PER_THREAD:
        raise ValueError(
            f"{whose} is CUDA's per-thread default stream (handle 2), which on pyhvd's thread is another one:"
            " work on a stream of your own, or on the device's default stream (handle 1)"
        )
    return 0 if handle == _LEGACY else handle


def refuse_capture(device: Device, stream: Stream) -> None:
    """Raise RuntimeError if a stream captures a graph."""
    if device.is_capturing(stream):
        raise RuntimeError(
            "the current stream captures a CUDA graph, of which no collective can be a part: reduce outside"
            " of the capture"
        )


def follow(device: Device, stream: Stream, arrived: Event) -> None:
    """Make a caller's stream wait for a result; RuntimeError if the stream captures a graph."""
    refuse_capture(device, stream)
    device.wait(stream, arrived)


def mark_ready(views: Iterable[DeviceView]) -> None:
    """Set the views' ``ready`` events, one per stream.

    Call it after the last view is allocated: a pool may hand out memory that its stream still uses, and that
    work is queued by then.
    """
    events: dict[Stream, Event] = {}
    for view in views:
        stream = view.stream
        event = events.get(stream)
        if event is None:
            event = events[stream] = view.on.mark(stream)
        view.ready = event


class Lease:
    """Keeps memory of a pool, which a view's stream has allocated, while other streams use it.

    A pool reuses memory for the stream that allocated it as soon as nothing refers to the memory. A dropped
    lease first makes that stream wait for the other streams' queued work; then the pool gets the memory back.
    """

    __slots__ = ("_device", "_home", "_memory", "_users")

    def __init__(self, view: DeviceView) -> None:
        self._device: Device = view.on
        self._home, self._memory = (view.stream, view.origin), view.owner
        self._users: dict[Stream, Any] = {}

    def use_on(self, stream: Stream, origin: Any = None) -> None:
        """Allow a stream to use the memory; keep ``origin``, which keeps the stream alive."""
        if stream != self._home[0]:
            self._users[stream] = origin

    def __del__(self) -> None:
        if sys.is_finalizing():  # no more allocations, and the library may be unloaded
            return
        for stream in self._users:
            self._device.wait(self._home[0], self._device.mark(stream))
