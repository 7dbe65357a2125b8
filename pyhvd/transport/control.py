"""ControlTransport: how packed messages travel between the coordinator and the workers.

Owns: message passing in order between rank 0 and the others, sleeping and waking. Knows nothing of what the
messages say. :class:`InProcessTransport` serves ranks as threads; processes have
:class:`pyhvd.transport.mpi.control.MpiTransport`.
"""

from __future__ import annotations

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
