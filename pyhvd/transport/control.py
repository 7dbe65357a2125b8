"""The interface by which coordinator and workers send messages, sleep and wake each other.

Knows nothing of the messages' contents. Ranks that are threads use
:class:`pyhvd.transport.inprocess.InProcessTransport`, processes
:class:`pyhvd.transport.mpi.control.MpiTransport`. Between hosts
:class:`pyhvd.transport.link_control.LinkTransport` takes the place of either.
"""

from __future__ import annotations

from typing import Any, Protocol

from pyhvd.transport.tree import Tree

Message = tuple[int, bytes | bytearray]

GOODBYE = b""
"""The last message of a rank to the rank above it."""


class Sending(Protocol):
    """A message that is being sent."""

    def gone(self) -> bool:
        """Return whether the message can arrive without further work of this rank."""


class Delivered(Sending):
    """A message that needs no further work of its sender."""

    def gone(self) -> bool:
        """Return True."""
        return True


class ControlTransport(Protocol):
    """Sends and receives messages. One thread uses it; any thread may call :meth:`wake`.

    Messages between two ranks arrive in the order of sending. No call blocks inside MPI: sends are
    non-blocking, and a rank without work sleeps.
    """

    rank: int
    size: int
    tree: Tree

    def send(self, destination: int, payload: bytes) -> Sending:
        """Start sending a message to another rank; do not block."""

    def receive(self) -> list[Message]:
        """Return the messages that have arrived, as (source, payload)."""

    def wait(self, timeout: float | None) -> None:
        """Sleep until a message may have arrived or been sent, until :meth:`wake`, or for ``timeout`` s."""

    def wake(self) -> None:
        """Wake the thread that sleeps in :meth:`wait`; any thread may call it."""

    def drain(self, timeout: float) -> bool:
        """Wait at most ``timeout`` s until all messages have been sent; return whether they have."""

    def close(self) -> None:
        """Free the transport's resources; collective."""


class Bell(Protocol):
    """Wakes sleeping ranks; see :class:`pyhvd.transport.doorbell.Doorbell`."""

    shortest: float

    def ring(self, address: Any = None) -> None:
        """Ring a rank's bell, by default this rank's own; never block. Any thread may call it."""

    def wait(self, timeout: float | None) -> bool:
        """Sleep until rung, at most ``timeout`` s; return whether the bell was rung."""

    def close(self) -> None:
        """Free the bell's resources."""
