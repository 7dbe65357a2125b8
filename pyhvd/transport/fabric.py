"""What moves bytes between the ranks of one process set: the interface that every carrier implements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pyhvd.arrays import Bytes


class Aborted(Exception):
    """A rank of the set cannot go on, and has aborted its collectives.

    Attributes
    ----------
    note : bytes
        What it has left for the others. Whoever calls the backend knows what that means.
    """

    def __init__(self, note: bytes) -> None:
        super().__init__(note)
        self.note = note


Block = tuple[int, Bytes]
"""A set rank, and bytes for it or from it."""


class Fabric(Protocol):
    """Moves bytes between the ranks of one process set. Every call is collective; all buffers are flat."""

    rank: int
    size: int

    def allgather(self, send: Bytes, recv: Bytes) -> None:
        """Gather ``send`` of every rank, all of one length, into ``recv`` in rank order."""

    def allgatherv(self, buffer: Bytes, counts: Sequence[int]) -> None:
        """Gather in place: rank r's block, ``counts[r]`` bytes, lies in its place in rank r's buffer."""

    def alltoallv(
        self, send: Bytes, send_counts: Sequence[int], recv: Bytes, recv_counts: Sequence[int]
    ) -> None:
        """Send the r-th block of ``send`` to rank r; blocks lie one behind the other, counts in bytes.

        For windows and counts: no rank sends or receives 2**31 bytes or more.
        """

    def exchange(
        self, send: Bytes, send_counts: Sequence[int], recv: Bytes, recv_counts: Sequence[int]
    ) -> None:
        """Do as ``alltoallv`` does, for blocks of any size."""

    def swap(self, partner: int, send: Bytes, recv: Bytes) -> None:
        """Give each other blocks of any size: all ranks at a time, in pairs."""

    def broadcast(self, buffer: Bytes, root: int) -> None:
        """Copy the root's buffer to every rank's."""

    def barrier(self) -> None:
        """Return when every rank has called it."""

    def subset(self, ranks: Sequence[int], tag: int) -> Fabric:
        """Return the fabric of some of the ranks; called by exactly those. ``tag`` tells sets apart."""

    def abort(self, note: bytes) -> None:
        """Let no rank wait in a call any longer: it raises :class:`Aborted`, where the carrier has a way.

        Not collective; from any thread. The first note that a rank finds is the one that it gets. Nothing
        but :meth:`close` may follow.
        """

    def close(self) -> None:
        """Give up what the fabric holds; collective."""
