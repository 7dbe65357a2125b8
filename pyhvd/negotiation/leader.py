"""A leader merges the messages of the ranks below it: rank 0's work then grows with hosts, not with ranks.

Pure: no I/O, no clock, no threads. It compares requests, and passes all of them on.

The leader keeps a sequence of items. An item is one request of some ranks, the cache bits of some ranks for
one process set, or one rank's stop. A request or a bit joins the first equal item that lies behind everything
that its sender has sent before. Without such an item it becomes a new one. So:

1. The items of one rank are in the order in which the rank sent them.
2. Requests are merged only if they mean the same: process set, all fields and line are equal. The id of a
   removed set may be reused, so outside the global set the last processed list must be equal too.
3. Cache bits are merged only if their ranks have processed the same response lists, which give bits their
   meaning.

The leader sends as soon as no tensor in its items lacks a rank below the leader, and at the latest
``patience`` seconds after the first item. It knows who has submitted a tensor in earlier messages, so the
last rank's request is sent at once. So each level of the tree delays a request by at most ``patience``:
rank 0 learns who is missing, and a late rank delays nothing further.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pyhvd.negotiation.messages import (
    GLOBAL_SET,
    PROTOCOL_VERSION,
    ErrorInfo,
    MergedList,
    MergedPart,
    Request,
    RequestList,
    RequestType,
    bits_of,
    bits_to_bytes,
    bytes_to_bits,
    lowest_bit,
    pack_ranks,
    unpack_ranks,
)
from pyhvd.negotiation.response_cache import SlotHolders

PATIENCE = 3e-3
"""Longest time (s) for which a leader waits for the other ranks below it: poll(2) counts milliseconds."""

_MAX_OPEN = 4096
"""Most tensors for which the leader knows who has submitted them; beyond it, it forgets all."""


@dataclass(slots=True)
class _Item:
    """What some ranks have sent alike: a request, the bits of a set by ranks, or a stop."""

    seen: int
    ranks: int
    last: int
    set_id: int = 0
    request: Request | None = None
    site: str = ""
    hits: SlotHolders | None = None
    stop: ErrorInfo | None = None


class Leader:
    """Merges what the ranks of one branch of the tree send.

    Parameters
    ----------
    ranks : int
        The branch, as a bit vector.
    sets : mapping of int to tuple of int
        Members of the process sets, by id; it changes as sets come and go.
    patience : float
        See the module's docstring.

    Attributes
    ----------
    due : float or None
        When (s) to call :meth:`flush`; None if there is nothing to send.
    """

    def __init__(self, ranks: int, sets: Mapping[int, tuple[int, ...]], patience: float = PATIENCE) -> None:
        self.due: float | None = None
        self._ranks = ranks
        self._sets = sets
        self._patience = patience
        self._items: list[_Item] = []
        self._places: dict[object, list[int]] = {}  # of the items, by what they have in common
        self._behind: dict[int, int] = {}  # by sender, the place of its last item
        self._first = 0.0
        self._expected: dict[int, tuple[tuple[int, ...], int, SlotHolders]] = {}
        # Who has submitted a tensor that not all have; and those of them that are in the items.
        self._came: dict[tuple[int, str], int] = {}
        self._open: set[tuple[int, str]] = set()
        self._open_slots: dict[int, int] = {}
        self._joined = 0

    def take(self, sender: int, parts: Iterable[MergedPart], now: float) -> None:
        """Take a message of a rank directly below, or of this rank, that arrived at ``now`` (s)."""
        if not self._items:
            self._first = now
        place = self._behind.get(sender, -1)
        for part in parts:
            ranks, message = unpack_ranks(part.ranks), part.message
            for set_id, data in message.bits.items():
                place = self._take_bits(place, ranks, part.last, set_id, bytes_to_bits(data), message.seen)
            for index, (set_id, request) in enumerate(message.requests):
                site = message.sites[index] if message.sites else ""
                place = self._take_request(
                    place, _Item(message.seen, ranks, part.last, set_id, request, site)
                )
            if message.stop is not None:
                place = self._append(_Item(message.seen, ranks, part.last, stop=message.stop))
                self._first = now - self._patience
        self._behind[sender] = place
        if self._items:
            self.due = self._first + (self._patience if self._open or any(self._open_slots.values()) else 0.0)

    def flush(self) -> MergedList:
        """Remove and return everything that has been taken."""
        parts = self._parts()
        self._items.clear()
        self._places.clear()
        self._behind.clear()
        self._open.clear()
        self._open_slots.clear()
        self.due = None
        return MergedList(PROTOCOL_VERSION, parts)

    def _take_bits(self, place: int, ranks: int, last: int, set_id: int, slots: int, seen: int) -> int:
        everyone, came = self._expect(set_id, ranks)
        came.hold(ranks, slots)
        came.drop(came.held_by(everyone))
        self._open_slots[set_id] = (self._open_slots.get(set_id, 0) | slots) & came.anyone()
        key = (set_id, seen)
        # The bits of one item have no order, so the sender's own last item will do.
        at = self._find(key, place)
        if at < 0:
            at = self._append(_Item(seen, ranks, last, set_id, hits=SlotHolders()), key)
        item = self._items[at]
        assert item.hits is not None
        item.hits.hold(ranks, slots)
        item.last = last
        return at

    def _take_request(self, place: int, new: _Item) -> int:
        assert new.request is not None
        self._count(new.set_id, new.request, new.ranks)
        key = (new.set_id, new.request, new.site, -1 if new.set_id == GLOBAL_SET else new.seen)
        at = self._find(key, place + 1)
        if at < 0:
            return self._append(new, key)
        item = self._items[at]
        item.seen, item.ranks, item.last = min(item.seen, new.seen), item.ranks | new.ranks, new.last
        return at

    def _count(self, set_id: int, request: Request, ranks: int) -> None:
        """Note who has submitted a tensor, and whether to wait for others; for a refusal nobody does."""
        everyone, _ = self._expect(set_id, ranks)
        if request.error:
            return
        if request.type == RequestType.JOIN:
            self._joined |= ranks
        key = set_id, request.name
        before = self._came.pop(key, 0)
        came = ranks if before & ranks else before | ranks  # again: it is the tensor's next turn
        self._open.discard(key)
        if everyone & ~came:
            if len(self._came) >= _MAX_OPEN:
                self._came.clear()
            self._came[key] = came
            self._open.add(key)

    def _expect(self, set_id: int, ranks: int) -> tuple[int, SlotHolders]:
        """Return whom a tensor of a set waits for, and who has submitted the set's open slots.

        Joined ranks are not waited for, until they submit anything: ``ranks`` do so now.
        """
        members = self._sets.get(set_id, ())
        known = self._expected.get(set_id)
        if known is None or known[0] is not members:
            known = self._expected[set_id] = members, bits_of(members) & self._ranks, SlotHolders()
        self._joined &= ~ranks
        return known[1] & ~self._joined, known[2]

    def _find(self, key: object, place: int) -> int:
        """Return the first place from ``place`` on of an item with this key, or -1."""
        return next((at for at in self._places.get(key, ()) if at >= place), -1)

    def _append(self, item: _Item, key: object = None) -> int:
        self._items.append(item)
        at = len(self._items) - 1
        if key is not None:
            self._places.setdefault(key, []).append(at)
        return at

    def _parts(self) -> list[MergedPart]:
        """Return the items' content; consecutive items of the same ranks are one part.

        In a part bits come before requests; a stop has a part of its own.
        """
        parts: list[MergedPart] = []
        head: tuple[int, int, int] | None = None  # ranks, last and seen of the part that may take more
        for item in self._items:
            held = {item.ranks: 0} if item.hits is None else item.hits.by_ranks
            for ranks, slots in held.items():
                last = item.last if ranks >> item.last & 1 else lowest_bit(ranks)
                if head != (ranks, last, item.seen) or item.stop or (slots and parts[-1].message.requests):
                    message = RequestList(PROTOCOL_VERSION, item.seen, stop=item.stop)
                    parts.append(MergedPart(pack_ranks(ranks), last, message))
                message = parts[-1].message
                if slots:
                    before = bytes_to_bits(message.bits.get(item.set_id, b""))
                    message.bits[item.set_id] = bits_to_bytes(before | slots)
                elif item.request is not None:
                    message.requests.append((item.set_id, item.request))
                    message.sites.append(item.site)
                head = None if item.stop else (ranks, last, item.seen)
        return parts
