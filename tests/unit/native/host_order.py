"""A model of the order across hosts: how hosts agree on cached tensors, and on one log, without a sequencer.

Each host has a :class:`HostOrder`. A host announces a slot when all its ranks have marked the slot ready. It
numbers its messages by a *count*. A message goes to every other host, and the messages of one host arrive in
the order of sending. The slots and the list of a message get its stamp; afterwards the host's count is
``upto``. Host 0 also announces response lists, which recall and delegate slots.

An *entry* of the log is a response list, with its stamp as its time, or a batch. A *batch* has all slots of
one process set that every host has announced and whose highest stamp is the batch's time. The log is in the
order of (time, lists before batches, set). An entry is *final* on a host when the counts of all hosts, as
known there, have reached its time.

The invariants are those of ``host_order.h``, which implements this model. In short:

1. The order of the log depends on stamps alone. Stamps travel in messages that keep their order, so all
   hosts compute one log.
2. A host carries out an entry only when it is final, and in the order of the log. All later announcements of
   a host get stamps above its count, so no entry can still come before a final one.
3. A count never goes back. An announced slot stays announced until the log decides it or recalls it.
4. A host announces a slot once in a *round*: the number of its recalls in the host's log, and the parity of
   its decisions. So a slot needs, per round, the hosts that have announced it and their highest stamp.
5. Two rounds per slot are enough: the current one and the latest later one. An announcement of an earlier
   round is void, since the recall comes before it in every log. A decision needs every host, so a host is
   ahead by one decision at most; and a host that has passed a recall proves that no round before this recall
   is decided, except the current one.
6. Every host keeps the lists that it has not taken in a ring of the same size, at the same positions. A
   message tells up to which position its sender has taken them. Host 0 announces a list only if no ring
   overflows, as far as host 0 knows.
7. A host owes a message once it has taken more than half of the ring since its last message. A list takes at
   most half of the ring, with the gap before it. So host 0 always gets room again.
8. A message tells how many entries its sender has taken: a payload's place is free again when every host
   has taken the entry that decided or recalled the payload's slots.
9. A stamp is at least the known stamps of the message's slots. So the message that completes several slots
   makes one batch of them.
10. An announcement carries a digest of each slot. A batch says of which of its slots the digests differ.
    They are those of one round, so all hosts find the same slots unlike.

One delay is enough for a slot: a host that announces one raises its count above all counts that it knows. So
its count has reached the stamps that the others will give, and the last announcement makes the slot final
everywhere. Only where messages cross does a host owe an *empty* message: an entry's time is above the host's
own count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

UNLIKE = 2**64 - 1
"""Instead of a digest: those of two hosts differ."""


class Slot(NamedTuple):
    """A cache slot of a process set."""

    set: int
    number: int


class Round(NamedTuple):
    """How often a slot was recalled, and the parity of its decisions."""

    recalls: int = 0
    parity: int = 0


@dataclass(frozen=True)
class ResponseList:
    """A response list of the coordinator: the slots that it recalls, those that it then delegates.

    ``size`` is its room in the ring: at most a quarter of the ring.
    """

    number: int
    recalled: frozenset[Slot] = frozenset()
    delegated: frozenset[Slot] = frozenset()
    audience: frozenset[int] = frozenset()
    size: int = 1


@dataclass(frozen=True)
class Message:
    """What one host tells all others; without slots and list it is an empty one."""

    before: int
    stamp: int
    upto: int
    taken: int
    entries: int
    slots: tuple[tuple[Slot, Round], ...] = ()
    carried: ResponseList | None = None
    digests: tuple[int, ...] = ()
    """One for each slot."""


@dataclass(frozen=True, order=True)
class Entry:
    """An entry of the log; ``set`` is -1 for a list, ``number`` is -1 for a batch."""

    time: int
    is_batch: bool
    set: int = -1
    slots: tuple[Slot, ...] = ()
    number: int = -1
    unlike: tuple[Slot, ...] = ()


@dataclass
class Cell:
    """What is known of one round of a slot.

    These are the hosts that have announced it, their highest stamp, and what their digests make together.
    """

    round: Round = field(default_factory=Round)
    hosts: set[int] = field(default_factory=set)
    time: int = 0
    digest: int = 0


def compare(a: int, b: int) -> int:
    """Return what two digests make together."""
    return a if a == b else UNLIKE


@dataclass
class HostOrder:
    """One host's view of the order.

    Parameters
    ----------
    host : int
        This host; host 0 has the coordinator.
    hosts : int
        Number of hosts.
    ring : int
        Room for lists that are not taken.

    Attributes
    ----------
    counts, taken, entries : list of int
        The count of each host, the position in the ring up to which it has taken lists, and how many entries
        of the log it has taken, as known here.
    """

    host: int
    hosts: int
    ring: int = 16
    counts: list[int] = field(init=False)
    taken: list[int] = field(init=False)
    entries: list[int] = field(init=False)
    _told: int = 0
    _tail: int = 0
    _latest: int = 0
    _current: dict[Slot, Cell] = field(default_factory=dict)
    _next: dict[Slot, Cell] = field(default_factory=dict)
    _lists: deque[tuple[int, int, ResponseList]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.counts = [0] * self.hosts
        self.taken = [0] * self.hosts
        self.entries = [0] * self.hosts

    def announce(
        self,
        slots: Iterable[Slot],
        carried: ResponseList | None = None,
        digests: Mapping[Slot, int] | None = None,
    ) -> Message | None:
        """Announce slots that are complete on this host, and on host 0 a list; None: the ring has no room."""
        if carried is not None and self._place(self._tail) + carried.size - min(self.taken) > self.ring:
            return None
        before = self.counts[self.host]
        turns = tuple((slot, self.round_of(slot)) for slot in sorted(slots))
        stamp = max([before + 1, *(self._cell(slot).time for slot, _ in turns)])
        others = [count for host, count in enumerate(self.counts) if host != self.host]
        values = tuple((digests or {}).get(slot, 0) for slot, _ in turns)
        taken, entries = self.taken[self.host], self.entries[self.host]
        own = Message(before, stamp, stamp, taken, entries, turns, carried, values)
        self._carry_out(self.host, own)
        return self._finish(own, max(others, default=0) + 1)

    def owed(self) -> Message | None:
        """Return the message that this host owes, or None.

        It owes one if an entry's time is above its own count, or if it has taken half of the ring.
        """
        before = self.counts[self.host]
        acknowledges = self.host != 0 and self.taken[self.host] - self._told > self.ring // 2
        if self._latest <= before and not acknowledges:
            return None
        return self._finish(Message(before, before + 1, 0, 0, self.entries[self.host]), before + 1)

    def receive(self, source: int, message: Message) -> None:
        """Take the next message of another host."""
        assert message.before == self.counts[source], "a message is missing"
        assert message.before < message.stamp <= message.upto
        self._carry_out(source, message)
        self.counts[source] = message.upto
        self.taken[source] = message.taken
        self.entries[source] = message.entries

    def take(self) -> tuple[Entry, ResponseList | None] | None:
        """Return the next entry of the log if it is final, and its list."""
        complete = [
            (cell.time, slot) for slot, cell in self._current.items() if len(cell.hosts) == self.hosts
        ]
        time, first = min(complete, default=(None, None))
        if self._lists and (time is None or self._lists[0][0] <= time):
            return self._take_list() if self._lists[0][0] <= min(self.counts) else None
        if time is None or first is None or time > min(self.counts):
            return None
        self.entries[self.host] += 1
        batch = tuple(sorted(slot for at, slot in complete if at == time and slot.set == first.set))
        unlike = tuple(slot for slot in batch if self.digest_of(slot) == UNLIKE)
        for slot in batch:
            recalls, parity = self.round_of(slot)
            self._begin_round(slot, Round(recalls, 1 - parity))
        return Entry(time, True, first.set, batch, unlike=unlike), None

    def round_of(self, slot: Slot) -> Round:
        """Return the current round of a slot."""
        return self._cell(slot).round

    def digest_of(self, slot: Slot) -> int:
        """Return what the known digests of a slot make together."""
        return self._cell(slot).digest

    def has_announced(self, slot: Slot) -> bool:
        """Return whether this host has announced a slot in its current round."""
        return self.host in self._cell(slot).hosts

    def is_offered(self, slot: Slot) -> bool:
        """Return whether only host 1 of two has announced a slot, and no list is to be taken."""
        return not self._lists and self._cell(slot).hosts == {1}

    @property
    def has_room(self) -> bool:
        """Whether the ring has room for any list."""
        return self._place(self._tail) + self.ring // 4 - min(self.taken) <= self.ring

    def _cell(self, slot: Slot) -> Cell:
        return self._current.setdefault(slot, Cell())

    def _place(self, position: int) -> int:
        """Return where the list behind this position begins: no list is cut at the ring's end."""
        left = self.ring - position % self.ring
        return position + (left if left < self.ring // 4 else 0)

    def _carry_out(self, source: int, message: Message) -> None:
        for (slot, turn), digest in zip(message.slots, message.digests, strict=True):
            self._record(slot, source, message.stamp, turn, digest)
        if message.carried is not None:
            assert source == 0
            self._tail = self._place(self._tail) + message.carried.size
            assert self._tail - self.taken[self.host] <= self.ring, "the ring overflows"
            self._lists.append((message.stamp, self._tail, message.carried))
            self._latest = max(self._latest, message.stamp)

    def _finish(self, message: Message, above: int) -> Message:
        """Raise the own count, and return the message that tells it."""
        self.counts[self.host] = upto = max(message.stamp, above, self._latest)
        self._told = self.taken[self.host]
        return replace(message, upto=upto, taken=self._told)

    def _take_list(self) -> tuple[Entry, ResponseList]:
        time, self.taken[self.host], carried = self._lists.popleft()
        self.entries[self.host] += 1
        for slot in carried.recalled:
            recalls, parity = self.round_of(slot)
            self._begin_round(slot, Round(recalls + 1, parity))
        return Entry(time, False, number=carried.number), carried

    def _record(self, slot: Slot, host: int, stamp: int, turn: Round, digest: int) -> None:
        cell = self._cell(slot)
        if turn != cell.round:
            later = self._next.get(slot)
            if turn.recalls < cell.round.recalls or (later and turn.recalls < later.round.recalls):
                return
            if later is None or turn.recalls > later.round.recalls:
                later = self._next[slot] = Cell(turn)
            cell = later
        assert turn == cell.round, "later rounds with as many recalls have one parity"
        assert host not in cell.hosts, f"{slot} is announced already"
        cell.digest = compare(cell.digest, digest) if cell.hosts else digest
        cell.hosts.add(host)
        cell.time = max(cell.time, stamp)
        self._note_complete(slot)

    def _begin_round(self, slot: Slot, turn: Round) -> None:
        later = self._next.get(slot)
        if later is not None and later.round.recalls <= turn.recalls:
            assert later.round == turn, "a later round is passed"
            del self._next[slot]
            self._current[slot] = later
        else:
            self._current[slot] = Cell(turn)
        self._note_complete(slot)

    def _note_complete(self, slot: Slot) -> None:
        cell = self._cell(slot)
        if len(cell.hosts) == self.hosts:
            self._latest = max(self._latest, cell.time)


BOXES = 4
Item = tuple[Slot, Round]


@dataclass
class Payloads:
    """Which values of small tensors a host has, its own and the others'; ``payloads.h`` has the invariants.

    A host has some boxes for the payloads of each host, its own included. A payload names the slots and their
    rounds. Its sender uses the box again when these rounds are over in its log, and all hosts have told that
    they have taken that entry.
    """

    order: HostOrder
    boxes: dict[tuple[int, int], set[Item]] = field(default_factory=dict)  # by host and box
    freed: dict[int, int] = field(default_factory=dict)  # by own box

    def collect(self, slots: Iterable[Slot]) -> tuple[int, frozenset[Item]] | None:
        """Return a free box, and what goes into it, of slots that this host is about to announce."""
        items = frozenset((slot, self.order.round_of(slot)) for slot in slots)
        for box in range(BOXES):
            is_free = (self.order.host, box) not in self.boxes
            if items and is_free and self.freed.get(box, 0) <= min(self.order.entries):
                self.boxes[self.order.host, box] = set(items)
                return box, items
        return None

    def receive(self, source: int, box: int, items: frozenset[Item]) -> None:
        """Keep the payload of another host."""
        assert (source, box) not in self.boxes, "the box is in use"
        self.boxes[source, box] = set(items)
        self._drop(source, box, lambda item: item[1].recalls < self.order.round_of(item[0]).recalls)

    def has(self, entry: Entry) -> bool:
        """Return whether all hosts have sent the values of a batch that was just taken."""
        rounds = [(slot, self.order.round_of(slot)) for slot in entry.slots]
        wanted = {(slot, Round(recalls, 1 - parity)) for slot, (recalls, parity) in rounds}
        hosts = range(self.order.hosts)
        return all(
            wanted
            <= set[Item]().union(*(items for (source, _), items in self.boxes.items() if source == each))
            for each in hosts
        )

    def settle(self, entry: Entry) -> None:
        """Drop what is over after an entry was taken."""

        def over(item: Item) -> bool:
            slot, turn = item
            now = self.order.round_of(slot)
            return turn.recalls < now.recalls or (
                turn.recalls == now.recalls and turn != now and slot in entry.slots
            )

        for source, box in list(self.boxes):
            self._drop(source, box, over)

    def _drop(self, source: int, box: int, over: Callable[[Item], bool]) -> None:
        items = self.boxes[source, box]
        items -= {item for item in items if over(item)}
        if not items:
            del self.boxes[source, box]
            if source == self.order.host:
                self.freed[box] = self.order.entries[source]
