"""A model of the order across hosts: how hosts agree on cached tensors, and on one log, without a sequencer.

Each host has a :class:`HostOrder`. A host announces a slot when all its ranks have marked the slot ready. It
numbers its messages by a *count*. A message goes to every other host, and the messages of one host arrive in
the order of sending. The slots and lists of a message get the stamp ``first``; afterwards the host's count is
``upto``. Host 0 also announces response lists, which recall and delegate slots.

An *entry* of the log is a response list, with its stamp as its time, or a slot that every host has announced,
with the highest of its stamps as its time. The log is in the order of (time, lists before slots, number).
An entry is *final* on a host when the counts of all hosts, as known there, have reached its time.

Invariants:

1. The order of the log depends on stamps alone. Stamps travel in messages that keep their order, so all
   hosts compute one log.
2. A host carries out an entry only when it is final, and in the order of the log. All later announcements of
   a host get stamps above its count, so no entry can still come before a final one.
3. A count never goes back. An announced slot stays announced until the log decides it or recalls it.
4. An announcement carries the *round* of its slot on the sender: the number of its recalls in the sender's
   log, and the parity of its decisions. An announcement of an earlier round is void: the recall comes before
   it in every log. One of a later round waits until the receiver's log has come there. A host may be ahead of
   another by any number of recalls of a slot, but by one decision at most, as a decision needs every host.
5. The batches of sets that lie within one host are put into that host's log between the entries, wherever
   the host likes. No other host sees them, so hosts cannot wait for each other in a circle.
6. Sets over several, but not all, hosts use response lists only. Every host has every list in its log,
   whether it takes part or not.

One delay is enough for a slot: a host that announces one raises its count above all counts that it knows. So
its count has reached the stamps that the others will give, and the last announcement makes the slot final
everywhere. Only where messages cross does a host owe an *empty* message: an entry's time is above the host's
own count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, order=True)
class Round:
    """How often a slot was recalled, and the parity of its decisions."""

    recalls: int = 0
    parity: int = 0


@dataclass(frozen=True)
class ResponseList:
    """A response list of the coordinator: the slots that it recalls, those that it then delegates."""

    number: int
    recalled: frozenset[int] = frozenset()
    delegated: frozenset[int] = frozenset()
    audience: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Message:
    """What one host tells all others; without slots and lists it is an empty one."""

    first: int
    upto: int
    slots: tuple[tuple[int, Round], ...] = ()
    lists: tuple[ResponseList, ...] = ()


@dataclass(frozen=True, order=True)
class Entry:
    """An entry of the log; ``slot`` is -1 for a list, ``number`` is -1 for a slot."""

    time: int
    is_slot: bool
    slot: int = -1
    number: int = -1


@dataclass
class HostOrder:
    """One host's view of the order.

    Parameters
    ----------
    host : int
        This host; host 0 has the coordinator.
    hosts : int
        Number of hosts.

    Attributes
    ----------
    counts : list of int
        The count of each host, as known here.
    """

    host: int
    hosts: int
    counts: list[int] = field(init=False)
    _stamps: dict[int, dict[int, int]] = field(default_factory=dict)
    _rounds: dict[int, Round] = field(default_factory=dict)
    _early: dict[int, list[tuple[int, int, Round]]] = field(default_factory=dict)
    _lists: deque[tuple[int, ResponseList]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.counts = [0] * self.hosts

    def announce(self, slots: Iterable[int], lists: Iterable[ResponseList] = ()) -> Message:
        """Announce slots that are complete on this host, and on host 0 response lists; return the message."""
        first = self.counts[self.host] + 1
        message = tuple((slot, self.round_of(slot)) for slot in sorted(slots))
        ordered = tuple(lists)
        for slot, turn in message:
            assert self.host not in self._stamps.get(slot, {}), f"slot {slot} is announced already"
            self._record(slot, self.host, first, turn)
        self._lists.extend((first, each) for each in ordered)
        self.counts[self.host] = upto = max(first, self._latest(), max(self.counts) + 1)
        return Message(first, upto, message, ordered)

    def owed(self) -> Message | None:
        """Return the empty message that this host owes, or None: an entry's time is above its own count."""
        own, latest = self.counts[self.host], self._latest()
        if latest <= own:
            return None
        self.counts[self.host] = latest
        return Message(own + 1, latest)

    def receive(self, source: int, message: Message) -> None:
        """Take the next message of another host."""
        assert message.first == self.counts[source] + 1, "a message is missing"
        assert message.upto >= message.first
        for slot, turn in message.slots:
            self._record(slot, source, message.first, turn)
        self._lists.extend((message.first, each) for each in message.lists)
        self.counts[source] = message.upto

    def take(self) -> tuple[Entry, ResponseList | None] | None:
        """Return the next entry of the log if it is final, and its list."""
        entries = [Entry(time, True, slot) for slot, time in self._complete()]
        if self._lists:
            entries.append(Entry(self._lists[0][0], False, number=self._lists[0][1].number))
        entry = min(entries, default=None)
        if entry is None or min(self.counts) < entry.time:
            return None
        if entry.is_slot:
            recalls, parity = self.round_of(entry.slot).recalls, self.round_of(entry.slot).parity
            self._begin_round(entry.slot, Round(recalls, 1 - parity))
            return entry, None
        _, carried = self._lists.popleft()
        for slot in carried.recalled:
            turn = self.round_of(slot)
            self._begin_round(slot, Round(turn.recalls + 1, turn.parity))
        return entry, carried

    def round_of(self, slot: int) -> Round:
        """Return the current round of a slot."""
        return self._rounds.get(slot, Round())

    def _latest(self) -> int:
        """Return the highest time of the entries that are known here."""
        times = [time for _, time in self._complete()] + [stamp for stamp, _ in self._lists]
        return max(times, default=0)

    def _complete(self) -> list[tuple[int, int]]:
        """Return the slots that every host has announced, with their times."""
        return [(slot, max(by.values())) for slot, by in self._stamps.items() if len(by) == self.hosts]

    def _record(self, slot: int, host: int, stamp: int, turn: Round) -> None:
        mine = self.round_of(slot)
        if turn == mine:
            self._stamps.setdefault(slot, {})[host] = stamp
        elif turn.recalls >= mine.recalls:
            self._early.setdefault(slot, []).append((host, stamp, turn))

    def _begin_round(self, slot: int, turn: Round) -> None:
        self._rounds[slot] = turn
        self._stamps.pop(slot, None)
        for host, stamp, of in self._early.pop(slot, []):
            self._record(slot, host, stamp, of)
