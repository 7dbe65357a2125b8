"""The cached tensors that ranks have submitted by a bit each, until every rank of the set has.

Owns: the bit vectors, and since when a slot's first bit is there. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from pyhvd.negotiation.messages import iter_bits


class HeldBits:
    """See the module's docstring.

    Parameters
    ----------
    ranks : iterable of int
        The set's members.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self.by_rank = dict.fromkeys(ranks, 0)
        self._since: dict[int, float] = {}

    def anyone(self) -> int:
        """Return the slots that some rank has submitted, as a bit vector."""
        bits = 0
        for held in self.by_rank.values():
            bits |= held
        return bits

    def everyone(self, bits: int = -1) -> int:
        """Return which of some slots every rank has submitted."""
        for held in self.by_rank.values():
            bits &= held
            if not bits:
                return 0
        return bits

    def hold(self, rank: int, bits: int, now: float) -> None:
        """A rank submits these slots."""
        for slot in iter_bits(bits & ~self.anyone()):
            self._since[slot] = now
        self.by_rank[rank] |= bits

    def since(self, slot: int, otherwise: float) -> float:
        """Return since when (s) some rank waits for a slot."""
        return self._since.get(slot, otherwise)

    def holders(self, slot: int) -> list[int]:
        """Return the ranks that have submitted a slot."""
        return [rank for rank, held in self.by_rank.items() if held >> slot & 1]

    def drop(self, bits: int) -> None:
        """Forget slots."""
        for rank in self.by_rank:
            self.by_rank[rank] &= ~bits
        for slot in iter_bits(bits):
            self._since.pop(slot, None)
