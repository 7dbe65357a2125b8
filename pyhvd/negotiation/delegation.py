"""Delegation: the cached tensors on which the ranks of a node agree by themselves, in a ready table.

The coordinator delegates a cache slot after it has answered it. It recalls the slot, with the ranks' marks,
as soon as a message concerns its tensor. Pure: the ready table itself is given.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from pyhvd.negotiation.messages import HOST, Request, RequestType, iter_bits
from pyhvd.negotiation.response_cache import SlotTable
from pyhvd.negotiation.turn_slots import TurnSlots, TurnTable

_DELEGATED = frozenset(
    (
        RequestType.ALLREDUCE,
        RequestType.ALLGATHER,
        RequestType.BROADCAST,
        RequestType.ALLTOALL,
        RequestType.BARRIER,
        RequestType.REDUCESCATTER,
    )
)


def is_delegated(request: Request) -> bool:
    """Return whether the ranks agree by themselves on such a tensor once it is cached."""
    return request.type in _DELEGATED and request.device == HOST


class ReadyTable(TurnTable, Protocol):
    """Where ranks mark cached tensors ready; see :mod:`pyhvd.native`. Bit vectors of slots are ints."""

    partial: bool
    """Whether ``look`` knows the marks of other hosts only where all their ranks have marked a slot."""

    def open_ready_set(self, set_id: int, ranks: Iterable[int]) -> None:
        """Let the members of a process set agree here."""

    def serves(self, set_id: int, ranks: Iterable[int]) -> bool:
        """Return whether these ranks of a process set can agree here."""

    def delegate(self, set_id: int, slot: int, version: int) -> None:
        """Let ranks mark a slot ready, if they know it from response list ``version``."""

    def recall(self, set_id: int, bits: int) -> dict[int, int]:
        """Take slots back; return, by rank, which of them were marked.

        A table of several hosts returns nothing: the ranks submit those tensors again, by message.
        """

    def look(self, set_id: int) -> tuple[dict[int, int], int]:
        """Return the marked slots by rank, and the slots that were used since the last look."""


class Delegation:
    """The delegated slots of one process set.

    Parameters
    ----------
    set_id : int
        Id of the process set.
    ranks : tuple of int
        Its members.
    cache : SlotTable
        What its slots mean.
    ready_table : ReadyTable
        A table that serves this process set.
    version : int
        Number of the response list that made the set.

    Attributes
    ----------
    delegated : int
        Bit vector of the delegated cache slots.
    turns : TurnSlots
        The slots of calls without a name.
    """

    def __init__(
        self,
        set_id: int,
        ranks: tuple[int, ...],
        cache: SlotTable,
        ready_table: ReadyTable,
        version: int = 0,
    ) -> None:
        self.delegated = 0
        self._set_id = set_id
        self._cache = cache
        self._ready_table = ready_table
        self._first_seen: dict[int, float] = {}
        if not ready_table.partial:  # else each rank does, at the place of the set's creation in the order
            ready_table.open_ready_set(set_id, ranks)
        self.turns = TurnSlots(set_id, version, ready_table)

    def delegate(self, slot: int) -> None:
        """Delegate a slot if the ranks can agree on its tensor by themselves."""
        meant = self._cache[slot]
        if is_delegated(meant.first) and slot < self._ready_table.slots:
            self._ready_table.delegate(self._set_id, slot, meant.version)
            self.delegated |= 1 << slot

    def recall(self, bits: int) -> dict[int, int]:
        """Take delegated slots back, with the whole of their groups; return, by rank, what was marked."""
        bits &= self.delegated
        for slot in iter_bits(bits):
            bits |= self._cache.group_bits(self._cache[slot].group) & self.delegated
        self.delegated &= ~bits
        return self._ready_table.recall(self._set_id, bits)

    def overdue(self, now: float) -> int:
        """Return the slots, found marked by an earlier look, whose marks are not all known."""
        if not self._ready_table.partial:
            return 0
        return sum(1 << slot for slot, since in self._first_seen.items() if since < now)

    def since(self, slot: int, now: float) -> float:
        """Return when (s) a look first found the slot marked; ``now`` if none did."""
        return self._first_seen.get(slot, now)

    def look(self, now: float) -> dict[int, int]:
        """Return the marked slots by rank; note since when they are marked, and which slots are in use."""
        if not (self.delegated or self.turns.delegated):
            return {}
        marked, used = self._ready_table.look(self._set_id)
        first_turn, turns = self._ready_table.slots, 0
        for bits in marked.values():
            turns |= bits >> first_turn
        self.turns.note(turns, used >> first_turn, now)
        # With several hosts, the ready table may not know yet that a slot was recalled.
        used &= self.delegated
        marked = {rank: bits & self.delegated for rank, bits in marked.items() if bits & self.delegated}
        anyone = 0
        for bits in marked.values():
            anyone |= bits
        self._cache.looked(iter_bits(used | anyone))
        before = {slot: since for slot, since in self._first_seen.items() if not used >> slot & 1}
        self._first_seen = {slot: before.get(slot, now) for slot in iter_bits(anyone)}
        return marked
