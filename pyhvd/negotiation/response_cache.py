"""The response cache: the same slots on every rank by construction.

Owns: :class:`SlotTable` (the coordinator's half: the meaning of each slot, and which slot to reuse),
:class:`WorkerCache` (a rank's half) and :class:`PendingHits` (the cache bits that ranks have sent). Pure: no
I/O, no clock, no threads.

Only the coordinator chooses slots, and the response carries its choice, so ranks cannot differ. A rank's bit
stands for the meaning that the slot had when the rank last heard from the coordinator; the message gives the
last response list that the rank has processed. The coordinator keeps a slot's old meaning until every rank
has processed the list that changed it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pyhvd.negotiation.messages import Request, Response, iter_bits

MAX_WITHOUT = 65536
"""Tensors without a slot of which a process set knows when they came; the oldest are forgotten first."""

Group = tuple[str, int]
"""A grouped call: its name and its number of tensors."""


def group_of(request: Request) -> Group | None:
    """Return the grouped call of a tensor, if it has one; calls of different sizes are different."""
    return (request.group, request.group_size) if request.group else None


@dataclass(frozen=True, slots=True)
class Slot:
    """The meaning of a slot: the ranks of each distinct request, and the response list that assigned it.

    Invariant: ``version`` stands for the whole meaning. It changes whenever any rank's request does, and the
    response carries it, because ranks cannot see each other's requests. A rank that has processed the last
    answer about a slot has the coordinator's version. The mark of a rank with an older version is refused.
    """

    name: str
    group: Group | None
    requests: Mapping[Request, int]
    version: int

    @property
    def first(self) -> Request:
        """One of the requests; their shapes may differ."""
        return next(iter(self.requests))


class SlotTable:
    """The coordinator's half of one process set's response cache.

    A tensor that is new gets the slot that was not used for longest. A tensor that was there before gets
    that slot only if it was not used since the tensor came last but one. So tensors that come in each step
    keep their slots, and others do without: of more tensors than slots, in the same order in each step,
    the least recently used would always be the one that comes next.

    Parameters
    ----------
    capacity : int
        Most slots; 0 turns the cache off.

    Attributes
    ----------
    wanted : int
        How many slots the tensors need that come in each step; 0 while they have enough.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.last_change = 0
        self._slots: dict[int, Slot] = {}
        self._by_name: dict[str, int] = {}
        self._by_group: dict[Group, int] = {}
        self._contested: int | None = None  # slots of group names with several sizes; None: not known
        self.wanted = 0
        self._time = 0  # counts the tensors that were answered in full
        self._looked = 0  # the time of the last look at the ready table
        self._recency: OrderedDict[int, int] = OrderedDict()  # slots and when they were used, oldest first
        # When a tensor without a slot came last but one (0: it had a slot, or was not known), and last.
        self._without: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._retired: dict[int, list[tuple[int, Slot]]] = {}

    def __getitem__(self, slot: int) -> Slot:
        return self._slots[slot]

    def slot_of(self, name: str) -> int:
        """Return the slot that holds a tensor, or -1."""
        return self._by_name.get(name, -1)

    def group_bits(self, group: Group | None) -> int:
        """Return the slots of a grouped call's tensors, as a bit vector; size 0 stands for any size."""
        if group is None:
            return 0
        if group[1]:
            return self._by_group.get(group, 0)
        slots = 0
        for (name, _), bits in self._by_group.items():
            slots |= bits if name == group[0] else 0
        return slots

    def rivals(self, bits: int) -> int:
        """Return the slots of grouped calls with the name of one in ``bits``, and another size."""
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
            self._recency[slot] = self._time
            self._recency.move_to_end(slot)

    def looked(self, used: Iterable[int]) -> None:
        """Mark slots as used that a look at the ready table has found in use."""
        self._looked = self._time
        self.touch(used)

    def assign(self, requests: Mapping[Request, int], busy: int, list_number: int) -> int:
        """Choose the slot in which every rank will remember a tensor.

        Parameters
        ----------
        requests : mapping of Request to int
            The ranks of each distinct request, as a bit vector; every set rank has one request.
        busy : int
            Bit vector of slots that must keep their meaning: some rank has submitted them.
        list_number : int
            Number of the response list that will carry the assignment.

        Returns
        -------
        int
            The slot; -1 if all slots are busy, or used too often.
        """
        first = next(iter(requests))
        name = first.name
        self._time += 1
        slot = self._by_name.get(name, -1)
        if slot < 0:
            slot = self._free_slot(name, busy)
        if slot < 0:
            self._do_without(name)
            return -1
        old = self._slots.get(slot)
        if old is None or old.requests != requests:
            if old is not None:
                self._retire(slot, old, list_number)
            self._slots[slot] = new = Slot(name, group_of(first), requests, list_number)
            self._by_name[name] = slot
            if new.group is not None:
                self._by_group[new.group] = self._by_group.get(new.group, 0) | 1 << slot
                self._contested = None
            self._without.pop(name, None)
            self.last_change = list_number
        self.touch((slot,))
        return slot

    def victim(self, name: str, busy: int) -> int:
        """Return the slot that :meth:`assign` would take from another tensor, or -1."""
        if name in self._by_name or len(self._slots) < self.capacity:
            return -1
        return self._free_slot(name, busy)

    def must_look(self, name: str) -> bool:
        """Return whether to look at the ready table before a tensor gets a slot: not for each tensor."""
        _, last = self._without.get(name, (0, 0))
        return self._looked < max(last, self._time - self.capacity // 16)

    def meaning(self, slot: int, seen: int) -> Slot | None:
        """Return the meaning of a slot for a rank that has processed response lists up to ``seen``."""
        current = self._slots.get(slot)
        if current is not None and current.version <= seen:
            return current
        for until, old in self._retired.get(slot, ()):
            if old.version <= seen < until:
                return old
        return None

    def forget(self, seen_by_all: int) -> None:
        """Drop the meanings that slots lost in a list that every rank has processed."""
        for slot in list(self._retired):
            kept = [(until, old) for until, old in self._retired[slot] if until > seen_by_all]
            if kept:
                self._retired[slot] = kept
            else:
                del self._retired[slot]

    def _free_slot(self, name: str, busy: int) -> int:
        if len(self._slots) < self.capacity:
            return len(self._slots)
        slot = self._oldest(busy)
        if slot >= 0 and name in self._without and self._recency[slot] >= self._without[name][0]:
            return -1
        return slot

    def _oldest(self, busy: int) -> int:
        """Return the slot that was not used for longest, or -1; a busy one is used just now."""
        for _ in range(len(self._recency)):
            slot = next(iter(self._recency))
            if not busy >> slot & 1:
                return slot
            self.touch((slot,))
        return -1

    def _do_without(self, name: str) -> None:
        """Note that a tensor came and got no slot."""
        before, last = self._without.pop(name, (0, 0))
        if before and not self.wanted:
            again = sum(1 for each, _ in self._without.values() if each)
            self.wanted = self.capacity + 1 + again
        self._remember(name, last, self._time)

    def _remember(self, name: str, before: int, last: int) -> None:
        """Keep when a tensor without a slot came last but one, and last."""
        self._without[name] = before, last
        if len(self._without) > MAX_WITHOUT:
            self._without.popitem(last=False)

    def _retire(self, slot: int, old: Slot, list_number: int) -> None:
        del self._by_name[old.name]
        self._remember(old.name, 0, self._recency[slot])
        if old.group is not None:
            self._contested = None
            self._by_group[old.group] &= ~(1 << slot)
            if not self._by_group[old.group]:
                del self._by_group[old.group]
        self._retired.setdefault(slot, []).append((list_number, old))


class WorkerCache:
    """One rank's half of one process set's response cache."""

    def __init__(self) -> None:
        self._slots: dict[int, tuple[Response, Request]] = {}
        self._by_name: dict[str, int] = {}

    def hit(self, request: Request) -> int:
        """Return the slot that holds exactly this request, or -1."""
        slot = self._by_name.get(request.name, -1)
        if slot >= 0 and self._slots[slot][1] == request:
            return slot
        return -1

    def put(self, response: Response, request: Request) -> None:
        """Remember a response, and this rank's request, in the slot that the response names."""
        old = self._slots.get(response.slot)
        if old is not None:
            del self._by_name[old[1].name]
        self._slots[response.slot] = (response, request)
        self._by_name[request.name] = response.slot

    def __getitem__(self, slot: int) -> Request:
        """Return this rank's request of a slot."""
        return self._slots[slot][1]

    def slots_of(self, name: str) -> list[int]:
        """Return the slots of a tensor, or of all grouped calls, of this name."""
        slots = [slot for slot, (_, request) in self._slots.items() if request.group == name]
        return [self._by_name[name], *slots] if name in self._by_name else slots

    def expand(self, bits: int) -> list[Response]:
        """Return the responses of the set bits, in slot order."""
        return [self._slots[slot][0] for slot in iter_bits(bits)]


class SlotHolders:
    """Which ranks have submitted which slots.

    Slots with the same ranks are one bit vector, so most calls cost the same for any number of slots.

    Attributes
    ----------
    by_ranks : dict of int to int
        By bit vector of ranks, the slots that exactly these ranks have submitted. No slot is in two of them.
    """

    def __init__(self) -> None:
        self.by_ranks: dict[int, int] = {}

    def anyone(self) -> int:
        """Return the slots that some rank has submitted, as a bit vector."""
        slots = 0
        for held in self.by_ranks.values():
            slots |= held
        return slots

    def held_by(self, ranks: int) -> int:
        """Return the slots that each of these ranks has submitted."""
        slots = 0
        for holders, held in self.by_ranks.items():
            slots |= 0 if ranks & ~holders else held
        return slots

    def hold(self, ranks: int, slots: int) -> None:
        """Add slots that each of these ranks submits."""
        before, after = self.by_ranks, dict[int, int]()
        self.by_ranks = after
        for holders, held in before.items():
            if kept := held & ~slots:
                after[holders] = after.get(holders, 0) | kept
            if joint := held & slots:
                after[holders | ranks] = after.get(holders | ranks, 0) | joint
                slots ^= joint
        if slots:
            after[ranks] = after.get(ranks, 0) | slots

    def holders(self, slot: int) -> int:
        """Return the ranks that have submitted a slot."""
        return next((ranks for ranks, slots in self.by_ranks.items() if slots >> slot & 1), 0)

    def drop(self, slots: int) -> None:
        """Forget slots."""
        self.by_ranks = {ranks: left for ranks, held in self.by_ranks.items() if (left := held & ~slots)}


class PendingHits(SlotHolders):
    """The cache bits that ranks of one process set have sent, and that are not answered."""

    def __init__(self) -> None:
        super().__init__()
        self._since: dict[int, float] = {}

    def hold_since(self, ranks: int, slots: int, now: float) -> None:
        """Add slots that each of these ranks submits now."""
        for slot in iter_bits(slots & ~self.anyone()):
            self._since[slot] = now
        self.hold(ranks, slots)

    def since(self, slot: int, otherwise: float) -> float:
        """Return when (s) a rank first submitted a slot."""
        return self._since.get(slot, otherwise)

    def drop(self, slots: int) -> None:
        """Forget slots."""
        super().drop(slots)
        for slot in iter_bits(slots):
            self._since.pop(slot, None)
