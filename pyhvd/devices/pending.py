"""Results whose device work may still run, and the objects that queued work needs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pyhvd.devices.base import Device, DeviceView, Event


@dataclass(frozen=True, slots=True, eq=False)
class PendingArray:
    """A result that is valid when ``event`` has passed."""

    view: DeviceView
    event: Event

    @property
    def has_ended(self) -> bool:
        """Whether the device has made the result."""
        return self.view.on.has_passed(self.event)

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


def pending_in(results: Iterable[Any]) -> list[PendingArray]:
    """Return the results, or first items of pairs, that are pending."""
    firsts = (each[0] if isinstance(each, tuple) else each for each in results)
    return [each for each in firsts if isinstance(each, PendingArray)]


class DeviceWaits(NamedTuple):
    """What a handle of device arrays can ask of the runtime."""

    check: Callable[[], None]
    """Raises an error if work on this rank's device was aborted."""
    wait: Callable[[Sequence[PendingArray], float], None] | None
    """Waits at most so many seconds until the device has made results; None: only streams wait for them."""


POLL_SECONDS = 1e-3
"""Seconds between two questions of a thread that waits for a device, at most ..."""
LEAST_POLL_SECONDS = 2e-5
"""... and at first."""


class Queued(NamedTuple):
    """Work of a batch that a device may still be doing: it has ended when ``event`` has passed."""

    device: Device
    event: Event
    names: Sequence[str]
    """The batch's tensors."""
    objects: object
    """What the work uses."""

    @property
    def has_ended(self) -> bool:
        return self.device.has_passed(self.event)


class DeviceWork:
    """The work that is queued on the communication stream, in its order, with the objects that it uses.

    A memory pool reuses memory for the stream that allocated it as soon as nothing refers to the memory. It
    does not know of work on the communication stream. One thread adds and sweeps; any thread may read.

    Attributes
    ----------
    ended : int
        Number of batches whose work has ended.
    """

    def __init__(self) -> None:
        self._queued: deque[Queued] = deque()
        self.ended = 0

    def add(self, work: Queued) -> None:
        """Keep the work's objects until it has ended."""
        self._queued.append(work)

    def sweep(self) -> bool:
        """Drop what has ended; return whether work is left."""
        while self._queued and self._queued[0].has_ended:
            self._queued.popleft()
            self.ended += 1
        return bool(self._queued)

    def left(self) -> list[Queued]:
        """Return the work that had not ended at the last sweep, the oldest first."""
        return list(self._queued.copy())

    def names(self) -> list[str]:
        """Return the names of the tensors of that work."""
        return list(dict.fromkeys(name for work in self.left() for name in work.names))
