"""What keeps the work of several streams in order, and memory theirs for as long as they use it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from pyhvd.devices.base import Device, DeviceView, Event, Stream

_LEGACY, _PER_THREAD = 1, 2  # CUDA's names for its two default streams


def stream_of(handle: int, whose: str) -> Stream:
    """Return a stream by the handle that another library has given.

    Parameters
    ----------
    handle : int
        CUDA's; 1 is its name for the device's default stream.
    whose : str
        What works there, for the error.

    Raises
    ------
    ValueError
        It means another stream on pyhvd's thread than on the caller's.
    """
    if handle == _PER_THREAD:
        raise ValueError(
            f"{whose} is CUDA's per-thread default stream (handle 2), which on pyhvd's thread is another one:"
            " work on a stream of your own, or on the device's default stream (handle 1)"
        )
    return 0 if handle == _LEGACY else handle


def mark_ready(views: Iterable[DeviceView]) -> None:
    """Record, once for each stream, the events behind which views may be used.

    Called when the last of them has its memory: what a stream has to do with memory that its pool had given
    to somebody before is in its queue by then.
    """
    events: dict[Stream, Event] = {}
    for view in views:
        stream = view.stream
        event = events.get(stream)
        if event is None:
            event = events[stream] = view.on.mark(stream)
        view.ready = event


class Lease:
    """Memory of one stream's pool, while other streams use it.

    Pools give memory to the next one of the stream that it was allocated for as soon as nothing refers to it,
    and know nothing of others. When nothing refers to the lease, that stream first waits for what the others
    have in their queues by then; only after that does the pool get the memory back.

    Parameters
    ----------
    view : DeviceView
        The memory, and the stream that it was allocated for.
    """

    __slots__ = ("_device", "_home", "_memory", "_users")

    def __init__(self, view: DeviceView) -> None:
        self._device: Device = view.on
        self._home, self._memory = (view.stream, view.origin), view.owner
        self._users: dict[Stream, Any] = {}

    def use_on(self, stream: Stream, origin: Any = None) -> None:
        """Let a stream use the memory; ``origin`` is kept, so that the stream lives as long."""
        if stream != self._home[0]:
            self._users[stream] = origin

    def __del__(self) -> None:
        if sys.is_finalizing():  # nobody allocates any longer, and the library may be gone
            return
        for stream in self._users:
            self._device.wait(self._home[0], self._device.mark(stream))
