"""Results whose device work may still run, and the objects that queued work needs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyhvd.devices.base import Device, DeviceView, Event


@dataclass(frozen=True, slots=True, eq=False)
class PendingArray:
    """A result that is valid when ``event`` has passed."""

    view: DeviceView
    event: Event

    def follow(self) -> None:
        """Make the calling thread's current stream, not the thread, wait for the result."""
        self.view.library.follow(self.view, self.event)

    def take(self) -> Any:
        """Return the array in the caller's library, after :meth:`follow`."""
        return self.view.library.receive(self.view, self.event)


def taken(result: Any) -> Any:
    """Return a result as the caller gets it; a pair's first item may be pending."""
    if isinstance(result, PendingArray):
        return result.take()
    if isinstance(result, tuple) and isinstance(result[0], PendingArray):
        return (result[0].take(), *result[1:])
    return result


_POLL_S = 1e-3


class KeepAlive:
    """Keeps objects alive until an event after the work that uses them has passed.

    A memory pool reuses memory for the stream that allocated it as soon as nothing refers to the memory. It
    does not know of work on the communication stream.
    """

    def __init__(self) -> None:
        self._kept: deque[tuple[Device, Event, object]] = deque()

    def keep(self, device: Device, event: Event, objects: object) -> None:
        """Keep objects until an event of the communication stream has passed."""
        self._kept.append((device, event, objects))

    def sweep(self) -> bool:
        """Drop the objects that are no longer used; return whether any are left."""
        while self._kept and self._kept[0][0].has_passed(self._kept[0][1]):
            self._kept.popleft()
        return bool(self._kept)

    def settle(self, check: Callable[[], None]) -> None:
        """Wait until all objects can be dropped; ``check`` raises an error if the device has failed."""
        while self.sweep():
            check()
            time.sleep(_POLL_S)
