"""Results on a device that may still be under way, and what must be kept until they have arrived."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from pyhvd.devices.base import Device, DeviceView, Event


class PendingArray:
    """A result that is there when an event has passed.

    Parameters
    ----------
    view : DeviceView
        Where it is.
    event : Event
        Passes when it is there.
    """

    __slots__ = ("_event", "_view")

    def __init__(self, view: DeviceView, event: Event) -> None:
        self._view, self._event = view, event

    def follow(self) -> None:
        """Let what the calling thread queues from now on wait for it; the thread does not."""
        self._view.library.follow(self._view, self._event)

    def take(self) -> Any:
        """Return the array, after :meth:`follow`."""
        return self._view.library.receive(self._view, self._event)


def taken(result: Any) -> Any:
    """Return what a caller gets for a tensor's result: of a pair, the first may be on a device."""
    if isinstance(result, PendingArray):
        return result.take()
    if isinstance(result, tuple) and isinstance(result[0], PendingArray):
        return (result[0].take(), *result[1:])
    return result


_LOOK_S = 1e-3


class KeepAlive:
    """Keeps alive what queued work uses, until an event behind it has passed.

    Memory pools give memory to the next one of the stream that it was allocated for, as soon as nothing
    refers to it; the communication stream is another one, and they know nothing of it.
    """

    def __init__(self) -> None:
        self._kept: deque[tuple[Device, Event, object]] = deque()

    def keep(self, device: Device, event: Event, things: object) -> None:
        """Keep things until an event of the communication stream has passed."""
        self._kept.append((device, event, things))

    def sweep(self) -> bool:
        """Let go of what is used no longer; return whether anything is left."""
        while self._kept and self._kept[0][0].has_passed(self._kept[0][1]):
            self._kept.popleft()
        return bool(self._kept)

    def settle(self, check: Callable[[], None]) -> None:
        """Wait for the device, and let go of everything; ``check`` raises if that is in vain."""
        while self.sweep():
            check()
            time.sleep(_LOOK_S)
