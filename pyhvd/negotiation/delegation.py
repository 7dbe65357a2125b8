"""What the coordinator has lent to the board: cached tensors, on which a node's ranks agree by themselves.

A slot is either lent, and what ranks have posted of it lies on the board, or with the coordinator, which
knows its submissions as bits and requests. It is lent once an answer to it has gone out, and recalled, with
its posts, as soon as anything about its tensor comes in as a message. Pure: the board is somebody else's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from pyhvd.negotiation.messages import HOST, RequestType, iter_bits
from pyhvd.negotiation.response_cache import Slot, SlotTable


class Board(Protocol):
    """Where ranks agree without messages; see :class:`pyhvd.native.shared_memory.FastPath`. Bit vectors are ints."""

    slots: int

    def open_ready_set(self, set_id: int, ranks: Iterable[int]) -> None:
        """Let the members of a process set agree here."""

    def serves(self, set_id: int) -> bool:
        """Return whether there is room for a process set of this id."""

    def delegate(self, set_id: int, slot: int, since: int) -> None:
        """Let ranks post a slot that means to them what response list ``since`` said."""

    def recall(self, set_id: int, bits: int) -> dict[int, int]:
        """Take slots back; return, by rank, which of them were posted."""

    def look(self, set_id: int) -> tuple[dict[int, int], int]:
        """Return, by rank, what is posted; and the slots that were used since the last look."""


class Delegation:
    """The loans of one process set.

    Parameters
    ----------
    set_id : int
        Id of the process set.
    ranks : tuple of int
        Its members.
    cache : SlotTable
        What its slots mean.
    board : Board or None
        None where there is none, and nothing is ever lent.
    """

    def __init__(self, set_id: int, ranks: tuple[int, ...], cache: SlotTable, board: Board | None) -> None:
        self._set_id = set_id
        self._cache = cache
        self._board = board if board is not None and board.serves(set_id) else None
        self._lent = 0
        self._answered = 0
        self._seen: dict[int, float] = {}
        if self._board is not None:
            self._board.open_ready_set(set_id, ranks)

    def answered(self, bits: int) -> None:
        """Remember slots that an answer of this round was about."""
        self._answered |= bits

    def answered_groups(self) -> set[str]:
        """Return the names of the grouped calls that were answered, where there are calls of other sizes."""
        groups = {self._cache[slot].group for slot in iter_bits(self._answered & ~self._lent)}
        return {
            group[0]
            for group in groups
            if group is not None and self._cache.group_bits((group[0], 0)) != self._cache.group_bits(group)
        }

    def lend(self, is_free: Callable[[Slot, int], bool]) -> None:
        """Lend the slots that were answered, where the coordinator has nothing left to do with them."""
        answered, self._answered = self._answered & ~self._lent, 0
        if self._board is None:
            return
        for slot in iter_bits(answered):
            meant = self._cache[slot]
            plain = meant.requests[0].type == RequestType.ALLREDUCE and meant.requests[0].device == HOST
            if plain and slot < self._board.slots and is_free(meant, slot):
                self._board.delegate(self._set_id, slot, meant.since)
                self._lent |= 1 << slot

    def recall(self, bits: int) -> dict[int, int]:
        """Take slots back, and the groups that they belong to; return, by rank, what was posted."""
        bits &= self._lent
        if not bits or self._board is None:
            return {}
        for slot in iter_bits(bits):
            bits |= self._cache.group_bits(self._cache[slot].group) & self._lent
        self._lent &= ~bits
        return self._board.recall(self._set_id, bits)

    def recall_all(self) -> dict[int, int]:
        """Take everything back."""
        return self.recall(self._lent)

    def has(self, slot: int) -> bool:
        """Return whether a slot is lent."""
        return bool(self._lent >> slot & 1)

    def since(self, slot: int, now: float) -> float:
        """Return when a slot's post was first looked at, or now."""
        return self._seen.get(slot, now)

    def look(self, now: float) -> dict[int, int]:
        """Return, by rank, what is posted; remember how long, and what was used of late."""
        if self._board is None or not self._lent:
            return {}
        posted, used = self._board.look(self._set_id)
        self._cache.touch(iter_bits(used))
        anyone = 0
        for bits in posted.values():
            anyone |= bits
        before = {slot: since for slot, since in self._seen.items() if not used >> slot & 1}
        self._seen = {slot: before.get(slot, now) for slot in iter_bits(anyone)}
        return posted
