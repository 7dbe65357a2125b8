"""A model of the tree of hosts: how many hosts agree on one log, with few messages from each of them.

Some hosts are *tops*; every other host has one *parent*. The tops run the order across hosts among
themselves. A parent and each of its children run the same order once more, as hosts 0 and 1 of two. So every
host has one order above it, and one below it for each child.

    up     once a host has marked a slot and each child has announced it below, the host announces it above
    down   each entry of the log above, a batch or a list, the host announces in every order below

The invariants are those of ``host_tree.h``, which implements this model. In short:

1. An announcement above says that the host and all hosts below it have marked the slot.
2. Below, a parent announces only entries of its log, each in a message of its own: slots that the child has
   announced, or a list. So the child's log has the same entries, in the same order.
3. A recall that the parent has taken is on the way to a child until the parent has taken it from the order
   below, too. Until then no announcement of this child counts: it may be older than the recall.
4. A parent takes an entry only if the rings of all orders below have room for any list.
5. A digest that a host announces above is that of its own and its children's digests together. Below, a
   parent announces the child's own digest of a slot, or UNLIKE if the slot's digests differ.
6. A parent owes nothing below.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce

from tests.unit.native.host_order import UNLIKE, Entry, HostOrder, Message, ResponseList, Slot, compare

Post = list[tuple[int, Message]]
"""Messages, and the hosts to which they go."""


class HostTree:
    """One host's view of the tree.

    Parameters
    ----------
    host : int
        This host.
    parents : sequence of int
        The parent of each host, which has a lower number; -1 for the tops, which are the first hosts.
    """

    def __init__(self, host: int, parents: Sequence[int]) -> None:
        tops = sum(parent < 0 for parent in parents)
        is_top = host < tops
        self.above = [top for top in range(tops) if top != host] if is_top else [parents[host]]
        self.upper = HostOrder(host, tops) if is_top else HostOrder(1, 2)
        self.below = {child: HostOrder(0, 2) for child, parent in enumerate(parents) if parent == host}
        self._is_top = is_top

    def announce(
        self,
        marked: Iterable[Slot],
        carried: ResponseList | None = None,
        digests: Mapping[Slot, int] | None = None,
    ) -> Post | None:
        """Announce above what is complete of the marked slots, and a list; None: the ring has no room."""
        fresh = [slot for slot in marked if not self.upper.has_announced(slot)]
        slots = [slot for slot in fresh if all(order.is_offered(slot) for order in self.below.values())]
        if not slots and carried is None:
            return []
        own = {slot: (digests or {}).get(slot, 0) for slot in slots}
        together = {
            slot: reduce(compare, (order.digest_of(slot) for order in self.below.values()), digest)
            for slot, digest in own.items()
        }
        message = self.upper.announce(slots, carried, together)
        return None if message is None else self._to_all_above(message)

    def owed(self) -> Post:
        """Return the message that this host owes."""
        assert all(order.owed() is None for order in self.below.values()), "a parent owes something below"
        message = self.upper.owed()
        return [] if message is None else self._to_all_above(message)

    def receive(self, source: int, message: Message) -> None:
        """Take the next message of a neighbour."""
        if source in self.below:
            self.below[source].receive(1, message)
            self._take_below(source)
        else:
            self.upper.receive(source if self._is_top else 0, message)

    def take(self) -> tuple[Entry, ResponseList | None, Post] | None:
        """Return the next entry of the log if it is final, its list, and the messages that pass it on."""
        if not all(order.has_room for order in self.below.values()):
            return None
        taken = self.upper.take()
        if taken is None:
            return None
        entry, carried = taken
        post = []
        for child, order in self.below.items():
            own = {slot: order.digest_of(slot) for slot in entry.slots}
            message = order.announce(entry.slots, carried, own | dict.fromkeys(entry.unlike, UNLIKE))
            assert message is not None
            post.append((child, message))
            self._take_below(child)
        return entry, carried, post

    def _to_all_above(self, message: Message) -> Post:
        return [(host, message) for host in self.above]

    def _take_below(self, child: int) -> None:
        """Take from the order below what is final there; it was in the log above before."""
        while self.below[child].take() is not None:
            pass
