"""ControlTransport: how packed messages travel between the coordinator and the workers.

Owns: message passing in order between rank 0 and the others, sleeping and waking. Knows nothing of what the
messages say. :class:`InProcessTransport` serves ranks as threads; processes have
:class:`pyhvd.transport.mpi.control.MpiTransport`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

Message = tuple[int, bytes | bytearray]


class Sending(Protocol):
    """A message on its way."""

    def gone(self) -> bool:
        """Return whether its receiver can have it without this rank's thread."""


class ControlTransport(Protocol):
    """Carries messages; used by one thread, but for :meth:`wake`.

    Messages between two ranks arrive in the order in which they were sent. Nothing is ever parked inside
    MPI: sends are non-blocking, and a rank without work sleeps.
    """

    rank: int
    size: int

    def send(self, destination: int, payload: bytes) -> Sending:
        """Send a message to another rank; returns at once."""

    def receive(self) -> list[Message]:
        """Return the messages that have arrived, as (source, payload)."""

    def wait(self, timeout: float | None) -> None:
        """Sleep until something may have arrived or gone out, until :meth:`wake`, or for ``timeout`` s."""

    def wake(self) -> None:
        """End the sleep of the thread in :meth:`wait`; from any thread."""

    def drain(self, timeout: float) -> bool:
        """Wait for at most ``timeout`` s until all that was sent has gone out; return whether it has."""

    def close(self) -> None:
        """Give up what the transport holds; collective."""


class Bell(Protocol):
    """Wakes sleeping ranks; see :class:`pyhvd.transport.doorbell.Doorbell`."""

    shortest: float

    def ring(self, address: Any = None) -> None:
        """Ring a bell, by default this rank's own; from any thread; never blocks."""

    def wait(self, timeout: float | None) -> bool:
        """Sleep until rung, at most ``timeout`` seconds; return whether it was rung."""

    def close(self) -> None:
        """Take the bell down."""


class Mailbox:
    """One in-process rank's inbox."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._messages: list[Message] = []
        self._rung = False

    def put(self, message: Message | None) -> None:
        """Lay down a message (or just ring), from any thread."""
        with self._changed:
            if message is not None:
                self._messages.append(message)
            self._rung = True
            self._changed.notify()

    def take(self) -> list[Message]:
        """Return the messages."""
        with self._changed:
            messages, self._messages = self._messages, []
            return messages

    def wait(self, timeout: float | None) -> None:
        """Sleep until something was put."""
        with self._changed:
            if not self._rung:
                self._changed.wait(timeout and min(timeout, threading.TIMEOUT_MAX))
            self._rung = False


class _Delivered:
    """What is put has arrived."""

    def gone(self) -> bool:
        """Return True."""
        return True


_DELIVERED = _Delivered()


class InProcessTransport:
    """Messages between ranks that are threads of one process.

    With a bell, whose addresses are the ranks, the thread sleeps on that; else on its mailbox.
    """

    def __init__(self, rank: int, boxes: Sequence[Mailbox], bell: Bell | None = None) -> None:
        self.rank = rank
        self.size = len(boxes)
        self._boxes = boxes
        self._bell = bell

    def send(self, destination: int, payload: bytes) -> Sending:
        """Send a message."""
        self._boxes[destination].put((self.rank, payload))
        if self._bell is not None:
            self._bell.ring(destination)
        return _DELIVERED

    def receive(self) -> list[Message]:
        """Return what has arrived."""
        return self._boxes[self.rank].take()

    def wait(self, timeout: float | None) -> None:
        """Sleep; see :class:`ControlTransport`."""
        if self._bell is not None:
            self._bell.wait(timeout)
        else:
            self._boxes[self.rank].wait(timeout)

    def wake(self) -> None:
        """End the sleep of the thread in :meth:`wait`."""
        if self._bell is not None:
            self._bell.ring()
        else:
            self._boxes[self.rank].put(None)

    def drain(self, timeout: float) -> bool:  # noqa: ARG002 - what is put has arrived
        """Return True: what is put has arrived."""
        return True

    def close(self) -> None:
        """Nothing to give up."""
