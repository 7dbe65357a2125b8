"""The interface by which the ranks of one process set move bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec
import numpy as np

from pyhvd.arrays import Bytes
from pyhvd.errors import InternalError

T = TypeVar("T")

PerRank = Sequence[int]
"""A number of each rank of the set, such as the bytes of its block."""


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Why ranks have no window, no links or no arena; the same on all ranks.

    Attributes
    ----------
    cause : str
        A text for a warning.
    expected : bool
        Whether the cause is no fault: the ranks need none, or never have it on this system.
    """

    cause: str
    expected: bool = False


class Aborted(Exception):
    """A rank of the set has failed and aborted the set's collectives.

    Attributes
    ----------
    note : bytes
        The failed rank's message; its format is the caller's.
    """

    def __init__(self, note: bytes) -> None:
        super().__init__(note)
        self.note = note


class LinkLost(Exception):
    """The connection to another host has failed.

    Attributes
    ----------
    rank : int
        The lowest rank there.
    """

    def __init__(self, text: str, rank: int) -> None:
        super().__init__(text)
        self.rank = rank


Pause = Callable[[float], None]
"""Waits for some seconds; raises if the ranks for which the caller waits are lost."""


class Fabric(Protocol):
    """Moves bytes between the ranks of one process set. Calls are collective; buffers are flat.

    Ranks are set ranks, counts are bytes.
    """

    rank: int
    size: int

    def allgather(self, send: Bytes, recv: Bytes) -> None:
        """Gather every rank's ``send``, all of one length, into ``recv`` in rank order."""

    def allgatherv(self, buffer: Bytes, counts: PerRank) -> None:
        """Gather in place: rank r provides block r, ``counts[r]`` bytes, at its place in the buffer."""

    def alltoallv(self, send: Bytes, send_counts: PerRank, recv: Bytes, recv_counts: PerRank) -> None:
        """Send the r-th block of ``send`` to rank r; blocks are contiguous.

        No rank may send or receive 2**31 bytes or more.
        """

    def exchange(self, send: Bytes, send_counts: PerRank, recv: Bytes, recv_counts: PerRank) -> None:
        """Do what ``alltoallv`` does, for blocks of any size."""

    def pairwise_exchange(self, partner: int, send: Bytes, recv: Bytes) -> None:
        """Exchange blocks of any size with a partner; all ranks of the set call it, in pairs."""

    def broadcast(self, buffer: Bytes, root: int) -> None:
        """Copy the root's buffer to every rank's."""

    def barrier(self) -> None:
        """Return when every rank has called it."""

    def subset(self, ranks: Sequence[int], tag: int) -> Fabric:
        """Return the fabric of some of the ranks; exactly those call it. ``tag`` tells sets apart."""

    def pause_by(self, pause: Pause) -> None:
        """Call ``pause`` while this rank waits for others, if :meth:`abort` cannot interrupt it."""

    def abort(self, note: bytes) -> None:
        """Make waiting ranks raise :class:`Aborted`, if the fabric can interrupt them.

        Not collective; any thread may call it. Each rank gets the first note that it finds. Only
        :meth:`close` may follow.
        """

    def close(self) -> None:
        """Free the fabric's resources; collective."""


def decode_from(rank: int, data: bytes, decode: Callable[[bytes], T], what: str) -> T:
    """Return what a rank of the set has sent; raise InternalError, with the rank, if it cannot be read."""
    try:
        return decode(data)
    except msgspec.MsgspecError as exc:
        raise InternalError.unreadable(rank, what, len(data), exc) from None


def allgather_bytes(fabric: Fabric, mine: bytes) -> list[bytes]:
    """Return every rank's bytes, of any length, in rank order; collective."""
    lengths = np.empty(fabric.size, np.int64)
    fabric.allgather(np.array([len(mine)], np.int64).view(np.uint8), lengths.view(np.uint8))
    longest = int(lengths.max())
    if not longest:
        return [b""] * fabric.size
    box = np.empty((fabric.size, longest), np.uint8)
    padded = np.frombuffer(mine.ljust(longest, b"\0"), np.uint8)
    fabric.allgather(padded, box.reshape(-1))
    return [row[:length].tobytes() for row, length in zip(box, lengths.tolist(), strict=True)]


def allgather_decoded(
    fabric: Fabric, mine: object, decoder: msgspec.msgpack.Decoder[T], what: str
) -> list[T]:
    """Return what every rank gives, through MessagePack, in rank order; collective.

    Raises
    ------
    InternalError
        What a rank has given cannot be read; the text names the rank, and ``what`` it is.
    """
    gathered = allgather_bytes(fabric, msgspec.msgpack.encode(mine))
    return [decode_from(rank, data, decoder.decode, what) for rank, data in enumerate(gathered)]
