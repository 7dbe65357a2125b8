"""The response cache: the same slots on every rank by construction.

Owns: :class:`SlotTable`, the coordinator's view (what each slot means, for each rank, and which slot to
give up), and :class:`WorkerCache`, a rank's own view. Pure: no I/O, no clock, no threads.

Only the coordinator chooses slots, and its choice travels in the response, so the ranks cannot differ.
A bit that a rank sends means "what this slot held when I last heard from you": the message says how many
response lists the rank had processed, and the coordinator remembers what a slot held before it was
reassigned until every rank has moved on.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from pyhvd.negotiation.messages import Request, Response, iter_bits

Group = tuple[str, int]


def group_of(request: Request) -> Group | None:
    """Return which grouped call a tensor belongs to: calls of one name and different sizes are different."""
    return (request.group, request.group_size) if request.group else None


@dataclass(frozen=True, slots=True)
class Slot:
    """What a slot means: each set rank's request, and the response list that assigned it.

    Invariant: ``since`` names the whole meaning. It is another one as soon as any rank's request is, and the
    ranks have it from the response, as they cannot see each other's requests. So a rank that has processed
    the last answer about a slot knows it by the same number as the coordinator; one that has not knows it
    by an older one, and what it posts under that is refused.
    """

    name: str
    group: Group | None
    requests: tuple[Request, ...]
    since: int


class SlotTable:
    """The coordinator's half of one process set's response cache.

    Parameters
    ----------
    capacity : int
        Most slots; 0 turns the cache off.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.last_change = 0
        self._slots: dict[int, Slot] = {}
        self._by_name: dict[str, int] = {}
        self._by_group: dict[Group, int] = {}
        self._contested: int | None = None  # slots of groups whose name has several sizes; None: look again
        self._recency: OrderedDict[int, None] = OrderedDict()
        self._retired: dict[int, list[tuple[int, Slot]]] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, slot: int) -> Slot:
        return self._slots[slot]

    def slot_of(self, name: str) -> int:
        """Return the slot that holds a tensor, or -1."""
        return self._by_name.get(name, -1)

    def group_bits(self, group: Group | None) -> int:
        """Return the slots that hold members of a grouped call, as a bit vector; size 0 is any size."""
        if group is None:
            return 0
        if group[1]:
            return self._by_group.get(group, 0)
        anyone = 0
        for (name, _), slots in self._by_group.items():
            anyone |= slots if name == group[0] else 0
        return anyone

    def rivals(self, bits: int) -> int:
        """Return the slots of grouped calls that have the name of one in ``bits``, and another size."""
        if self._contested is None:
            sizes = Counter(name for name, _ in self._by_group)
            self._contested = 0
            for (name, _), slots in self._by_group.items():
                self._contested |= slots if sizes[name] > 1 else 0
        others = 0
        for group in {self._slots[slot].group for slot in iter_bits(bits & self._contested)}:
            assert group is not None
            others |= self.group_bits((group[0], 0)) & ~self.group_bits(group)
        return others

    def touch(self, slots: Iterable[int]) -> None:
        """Mark slots as used just now."""
        for slot in slots:
            self._recency.move_to_end(slot)

    def assign(self, requests: tuple[Request, ...], busy: int, seq: int) -> int:
        """Choose the slot in which every rank will remember a tensor.

        Parameters
        ----------
        requests : tuple of Request
            Each set rank's request.
        busy : int
            Bit vector of slots that must not be given up: some rank has submitted them.
        seq : int
            Number of the response list that will carry the assignment.

        Returns
        -------
        int
            The slot, or -1 where there is none to be had.
        """
        name = requests[0].name
        slot = self._by_name.get(name, -1)
        if slot < 0:
            slot = self._free_slot(busy)
        if slot < 0:
            return -1
        old = self._slots.get(slot)
        if old is not None and old.requests == requests:
            self._recency.move_to_end(slot)
            return slot
        if old is not None:
            self._retire(slot, old, seq)
        self._slots[slot] = new = Slot(name, group_of(requests[0]), requests, seq)
        self._by_name[name] = slot
        if new.group is not None:
            self._by_group[new.group] = self._by_group.get(new.group, 0) | 1 << slot
            self._contested = None
        self._recency[slot] = None
        self._recency.move_to_end(slot)
        self.last_change = seq
        return slot

    def victim(self, name: str, busy: int) -> int:
        """Return the slot that :meth:`assign` would take away from another tensor, or -1."""
        if name in self._by_name or len(self._slots) < self.capacity:
            return -1
        return self._free_slot(busy)

    def meaning(self, slot: int, seen: int) -> Slot | None:
        """Return what a slot held for a rank that had processed response lists up to ``seen``."""
        current = self._slots.get(slot)
        if current is not None and current.since <= seen:
            return current
        for until, old in self._retired.get(slot, ()):
            if old.since <= seen < until:
                return old
        return None

    def forget(self, seen_by_all: int) -> None:
        """Drop the memory of what slots held before a list that every rank has processed."""
        if not self._retired:
            return
        for slot in list(self._retired):
            kept = [(until, old) for until, old in self._retired[slot] if until > seen_by_all]
            if kept:
                self._retired[slot] = kept
            else:
                del self._retired[slot]

    def _free_slot(self, busy: int) -> int:
        if len(self._slots) < self.capacity:
            return len(self._slots)
        for slot in self._recency:
            if not busy >> slot & 1:
                return slot
        return -1

    def _retire(self, slot: int, old: Slot, seq: int) -> None:
        del self._by_name[old.name]
        if old.group is not None:
            self._contested = None
            left = self._by_group[old.group] & ~(1 << slot)
            if left:
                self._by_group[old.group] = left
            else:
                del self._by_group[old.group]
        self._retired.setdefault(slot, []).append((seq, old))


class WorkerCache:
    """One rank's half of one process set's response cache."""

    def __init__(self) -> None:
        self._slots: dict[int, tuple[Response, Request]] = {}
        self._by_name: dict[str, int] = {}

    def hit(self, request: Request) -> int:
        """Return the slot that remembers exactly this request, or -1."""
        slot = self._by_name.get(request.name, -1)
        if slot >= 0 and self._slots[slot][1] == request:
            return slot
        return -1

    def put(self, response: Response, own: Request) -> None:
        """Remember a response in the slot that it names."""
        old = self._slots.get(response.slot)
        if old is not None:
            del self._by_name[old[1].name]
        self._slots[response.slot] = (response, own)
        self._by_name[own.name] = response.slot

    def __getitem__(self, slot: int) -> Request:
        """Return this rank's own request of a slot."""
        return self._slots[slot][1]

    def slots_of(self, name: str) -> list[int]:
        """Return the slots of a tensor, or of all grouped calls, of this name."""
        slots = [slot for slot, (_, own) in self._slots.items() if own.group == name]
        return [self._by_name[name], *slots] if name in self._by_name else slots

    def expand(self, bits: int) -> list[Response]:
        """Return the responses of the set bits, in slot order."""
        return [self._slots[slot][0] for slot in iter_bits(bits)]


class PendingHits:
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
