"""The order across hosts: one log on all of them, nothing stuck, whichever way messages cross."""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings, strategies as st

from tests.thinning import examples
from tests.unit.native.host_order import Entry, HostOrder, Item, Message, Payloads, ResponseList, Round, Slot

SLOTS = [Slot(0, 0), Slot(0, 1), Slot(0, 64), Slot(1, 0), Slot(1, 127)]
ZERO = SLOTS[0]
Payload = tuple[int, frozenset[Item]] | None


@dataclass
class Host:
    """One host: its order, its log, and the slots that its ranks may mark, or have marked."""

    order: HostOrder
    payloads: Payloads
    log: list[Entry | str] = field(default_factory=list)
    with_results: list[bool] = field(default_factory=list)
    delegated: set[Slot] = field(default_factory=set)
    marked: set[Slot] = field(default_factory=set)
    decided: Counter[Slot] = field(default_factory=Counter)
    returned: int = 0
    digests: dict[Slot, int] = field(default_factory=dict)

    @property
    def shared(self) -> list[Entry]:
        """The entries that all hosts have in common."""
        return [each for each in self.log if isinstance(each, Entry)]


class Cluster:
    """Hosts, and the messages between them that have not arrived; host 0 makes the lists."""

    def __init__(self, hosts: int, make: Callable[[int, int], HostOrder] = HostOrder) -> None:
        orders = [make(host, hosts) for host in range(hosts)]
        self.hosts = [Host(order, Payloads(order)) for order in orders]
        self.streams: dict[tuple[int, int], deque[tuple[Message, Payload]]] = {
            (a, b): deque() for a in range(hosts) for b in range(hosts) if a != b
        }
        self.lists: list[ResponseList] = []
        self.sent = 0
        self.open: set[Slot] = set()  # delegated, by the lists that host 0 has sent
        # all stamps: by slot, recalls and decisions of it on the sender, and host
        self.stamps: dict[tuple[Slot, int, int], dict[int, int]] = defaultdict(dict)
        self.digests: dict[tuple[Slot, int, int], dict[int, int]] = defaultdict(dict)  # likewise

    def send(self, source: int, message: Message, payload: Payload = None) -> None:
        self.sent += 1
        for slot, turn in message.slots:
            decided = self.hosts[source].decided[slot]
            assert turn.parity == decided % 2
            self.stamps[slot, turn.recalls, decided][source] = message.stamp
        for (a, _), stream in self.streams.items():
            if a == source:
                stream.append((message, payload))
        self.carry_out(source)

    def mark(self, host: int, wanted: set[Slot]) -> None:
        """All ranks of a host mark slots ready."""
        here = self.hosts[host]
        slots = wanted & here.delegated - here.marked
        if slots:
            here.marked |= slots
            self.compare_later(host, slots)
            staged = self.sent % 8  # some hosts have not staged all
            payload = here.payloads.collect(slots) if staged else None
            assert self.announce(host, slots, payload=payload)

    def compare_later(self, host: int, slots: set[Slot]) -> None:
        """Choose digests of the slots of the last word, which hosts mostly have alike."""
        here = self.hosts[host]
        for slot in slots:
            digest = here.digests[slot] = (1 + (self.sent % 7 == 0)) * (slot.number >= 64)
            self.digests[slot, here.order.round_of(slot).recalls, here.decided[slot]][host] = digest

    def announce(
        self, host: int, slots: set[Slot], made: ResponseList | None = None, payload: Payload = None
    ) -> bool:
        """Send the message with slots and a list; return False if the list has no room."""
        message = self.hosts[host].order.announce(slots, made, self.hosts[host].digests)
        if message is not None:
            self.send(host, message, payload)
        return message is not None

    def order(
        self,
        recalled: set[Slot],
        delegated: set[Slot],
        audience: set[int],
        size: int = 1,
        slots: set[Slot] | None = None,
    ) -> bool:
        """Host 0 sends a list, and slots, if it has room; a join is a list that recalls all slots."""
        here = self.hosts[0]
        recalled &= self.open
        delegated -= self.open - recalled
        made = ResponseList(
            len(self.lists), frozenset(recalled), frozenset(delegated), frozenset(audience), size
        )
        marked = (slots or set()) & here.delegated - here.marked
        before = self.open, here.marked
        self.open = self.open - recalled | delegated
        here.marked = here.marked | marked
        self.compare_later(0, marked)
        self.lists.append(made)
        if done := self.announce(0, marked, made):
            return done
        self.lists.pop()
        self.open, here.marked = before
        return False

    def batch(self, host: int) -> None:
        """A host decides on a batch of a set that lies within it."""
        self.hosts[host].log.append("batch")

    def deliver(self, a: int, b: int) -> bool:
        stream = self.streams[a, b]
        if not stream:
            return False
        message, payload = stream.popleft()
        if payload is not None:
            self.hosts[b].payloads.receive(a, *payload)
        self.hosts[b].order.receive(a, message)
        self.carry_out(b)
        return True

    def hear(self, host: int, deaf_to: int) -> None:
        """Deliver all messages for a host, but not those of one other."""
        for (a, b), stream in self.streams.items():
            while b == host and a != deaf_to and stream:
                self.deliver(a, b)

    def answer(self, host: int) -> bool:
        """Send the empty message that a host owes."""
        message = self.hosts[host].order.owed()
        if message is not None:
            self.send(host, message)
        return message is not None

    def carry_out(self, host: int) -> None:
        here = self.hosts[host]
        while (taken := here.order.take()) is not None:
            entry, made = taken
            here.log.append(entry)
            if made is None:
                self.decide(here, entry)
                here.with_results.append(here.payloads.has(entry))
            else:
                here.returned += len(here.marked & made.recalled)
                here.marked -= made.recalled
                here.delegated = here.delegated - made.recalled | made.delegated
            here.payloads.settle(entry)
        self.compare(host)

    def decide(self, here: Host, entry: Entry) -> None:
        """Check a batch: every host has announced its slots, and their highest stamps are its time."""
        assert here.marked >= set(entry.slots), "decided, but not marked here"
        here.marked -= set(entry.slots)
        assert entry.unlike == self.find_unlike(here, entry)
        for slot in entry.slots:
            stamps = self.stamps[slot, here.order.round_of(slot).recalls, here.decided[slot]]
            assert len(stamps) == len(self.hosts)
            assert max(stamps.values()) == entry.time
            here.decided[slot] += 1

    def find_unlike(self, here: Host, entry: Entry) -> tuple[Slot, ...]:
        """Return the slots of a batch for which the hosts have chosen different digests."""
        chosen = {
            slot: self.digests[slot, here.order.round_of(slot).recalls, here.decided[slot]]
            for slot in entry.slots
        }
        return tuple(slot for slot in entry.slots if len(set(chosen[slot].values())) > 1)

    def compare(self, host: int) -> None:
        mine = self.hosts[host].shared
        for other in self.hosts:
            theirs = other.shared
            common = min(len(mine), len(theirs))
            assert mine[:common] == theirs[:common]
            assert not any(
                a != b for a, b in zip(self.hosts[host].with_results, other.with_results, strict=False)
            )
        assert mine == sorted(mine)

    def drain(self) -> None:
        """Deliver and answer until nothing is left."""
        for _ in range(10_000):
            moved = [self.deliver(*pair) for pair in self.streams]
            moved += [self.answer(host) for host in range(len(self.hosts))]
            if not any(moved):
                return
        raise AssertionError("messages without end")

    def check_quiet(self) -> None:
        """Nothing travels: all logs are equal, and what is undecided was not marked on some host."""
        logs = [host.shared for host in self.hosts]
        assert all(log == logs[0] for log in logs)
        assert [entry.number for entry in logs[0] if not entry.is_batch] == list(range(len(self.lists)))
        assert len({frozenset(host.delegated) for host in self.hosts}) == 1
        assert len({tuple(host.with_results) for host in self.hosts}) == 1
        for slot in SLOTS:
            assert any(slot not in host.marked for host in self.hosts), f"slot {slot} is stuck"

    def run_collectives(self) -> None:
        """Each host carries out its log in order, and an entry needs all hosts that take part."""
        heads = [0] * len(self.hosts)
        for _ in range(sum(len(host.log) for host in self.hosts)):
            for index, host in enumerate(self.hosts):
                while heads[index] < len(host.log) and not self._needs_others(host.log[heads[index]], index):
                    heads[index] += 1
            waiting = {i: host.log[heads[i]] for i, host in enumerate(self.hosts) if heads[i] < len(host.log)}
            if not waiting:
                return
            for entry in set(waiting.values()):
                ready = {i for i, each in waiting.items() if each == entry}
                if self._members(entry) <= ready:
                    for index in ready:
                        heads[index] += 1
        assert all(head == len(host.log) for head, host in zip(heads, self.hosts, strict=True)), "a circle"

    def _needs_others(self, entry: Entry | str, host: int) -> bool:
        return isinstance(entry, Entry) and host in self._members(entry)

    def _members(self, entry: Entry | str) -> set[int]:
        assert isinstance(entry, Entry)
        return set(range(len(self.hosts))) if entry.is_batch else set(self.lists[entry.number].audience)


def play(cluster: Cluster, chance: random.Random, steps: int) -> None:
    """Take random steps; some streams are slow, so that news reaches hosts by detours."""
    hosts = len(cluster.hosts)
    slow = {pair: chance.choice((1, 1, 1, 20)) for pair in cluster.streams}
    marks = chance.choice((0.1, 0.3))
    for _ in range(steps):
        host, what = chance.randrange(hosts), chance.random()
        if what < marks:
            cluster.mark(host, {slot for slot in SLOTS if chance.random() < 0.5})
        elif what < marks + 0.05:
            cluster.answer(host)
        elif what < marks + 0.07:
            recalled = {slot for slot in SLOTS if chance.random() < 0.3}
            delegated = {slot for slot in SLOTS if chance.random() < 0.8}
            marked = {slot for slot in SLOTS if chance.random() < 0.3}
            audience = {host for host in range(hosts) if chance.random() < 0.5}
            cluster.order(recalled, delegated, audience, chance.choice((1, 1, 3, 4)), marked)
        elif what < marks + 0.09:
            cluster.batch(host)
        elif ready := [pair for pair, stream in cluster.streams.items() if stream]:
            (pair,) = chance.choices(ready, [1 / slow[each] for each in ready])
            cluster.deliver(*pair)


@pytest.mark.timeout(600)
@settings(max_examples=examples(2000, longest=True))
@given(hosts=st.integers(2, 8), seed=st.integers(0, 2**32))
def test_all_hosts_compute_one_log_and_nothing_is_stuck(hosts: int, seed: int) -> None:
    check_one_log(Cluster(hosts), seed)


def check_one_log(cluster: Cluster, seed: int) -> None:
    hosts = len(cluster.hosts)
    cluster.order(set(), set(SLOTS), set())
    play(cluster, random.Random(seed), 60 * hosts)
    cluster.drain()
    cluster.check_quiet()
    assert cluster.order(set(), set(), set(), size=4), "no room for a list, though all are taken"
    cluster.drain()
    # Once every host marks everything, every delegated slot is decided, also after recalls.
    for host in range(hosts):
        cluster.mark(host, set(SLOTS))
    cluster.drain()
    cluster.check_quiet()
    assert not any(host.marked for host in cluster.hosts)
    cluster.run_collectives()


@pytest.mark.parametrize("hosts", [2, 3, 8])
def test_one_message_of_each_host_decides_a_slot(hosts: int) -> None:
    """The last host needs one message, and no host answers, though the counts differ."""
    cluster = Cluster(hosts)
    cluster.order(set(), set(SLOTS), set())
    cluster.drain()
    for slot in SLOTS[1:]:
        cluster.mark(1, {slot})
    cluster.drain()
    for turn in range(10):
        sent = cluster.sent
        for host in (*range(turn % hosts, hosts), *range(turn % hosts)):
            cluster.mark(host, {ZERO})
            for pair in cluster.streams:
                cluster.deliver(*pair)
        assert cluster.sent == sent + hosts
        assert all(host.shared[-1].slots == (ZERO,) for host in cluster.hosts)
        assert not any(cluster.answer(host) for host in range(hosts))


@pytest.mark.parametrize("hosts", [2, 3, 8])
def test_single_slots_always_travel_with_their_values(hosts: int) -> None:
    """Four boxes are enough: the next message of each host frees the box of the last one."""
    cluster = Cluster(hosts)
    cluster.order(set(), set(SLOTS), set())
    cluster.drain()
    cluster.sent = 1
    for turn in range(20):
        for host in range(hosts):
            cluster.sent = 1
            cluster.mark((host + turn) % hosts, {ZERO})
        cluster.drain()
    assert cluster.hosts[0].with_results == [True] * 20


def test_messages_that_cross_may_need_an_empty_one() -> None:
    cluster = Cluster(2)
    cluster.order(set(), set(SLOTS[:3]), set())
    cluster.drain()
    cluster.mark(0, {SLOTS[1]})
    cluster.mark(0, {SLOTS[2]})
    cluster.mark(0, {ZERO})
    cluster.mark(1, {ZERO})
    cluster.deliver(1, 0)
    for _ in range(3):
        cluster.deliver(0, 1)
    assert [len(host.shared) for host in cluster.hosts] == [1, 1]  # host 1's count is below slot 0's time
    assert [cluster.answer(host) for host in (0, 1)] == [False, True]
    cluster.deliver(1, 0)
    assert [host.shared[-1].slots for host in cluster.hosts] == [(ZERO,), (ZERO,)]


def cluster_of(hosts: int) -> Cluster:
    """Return hosts that know that slot 0 is delegated."""
    cluster = Cluster(hosts)
    cluster.order(set(), {ZERO}, set())
    cluster.drain()
    return cluster


def check_next_round(cluster: Cluster, expected: Round) -> None:
    """Deliver all messages, and decide slot 0 once more."""
    cluster.drain()
    cluster.check_quiet()
    for host in range(len(cluster.hosts)):
        cluster.mark(host, {ZERO})
    cluster.drain()
    cluster.check_quiet()
    assert {host.order.round_of(ZERO) for host in cluster.hosts} == {expected}


def test_an_announcement_waits_for_the_decision_before_it() -> None:
    """Host 0 announces the slot again before host 2 has heard host 1's first announcement."""
    cluster = cluster_of(3)
    for host in range(3):
        cluster.mark(host, {ZERO})
    cluster.hear(0, deaf_to=0)
    cluster.mark(0, {ZERO})
    cluster.hear(2, deaf_to=1)
    assert [len(host.shared) for host in cluster.hosts] == [2, 1, 1]
    cluster.hear(2, deaf_to=0)
    assert cluster.hosts[2].shared == cluster.hosts[0].shared
    check_next_round(cluster, Round(0, 0))


def test_an_announcement_waits_for_the_recall_before_it() -> None:
    """Host 1 announces the slot again before host 2 has heard that host 3 has answered the list."""
    cluster = cluster_of(4)
    cluster.order({ZERO}, {ZERO}, set())
    for host in (1, 2, 3):
        cluster.deliver(0, host)
        cluster.answer(host)
    cluster.hear(1, deaf_to=1)
    cluster.mark(1, {ZERO})
    cluster.hear(2, deaf_to=3)
    assert [len(host.shared) for host in cluster.hosts] == [1, 2, 1, 1]
    check_next_round(cluster, Round(1, 1))


def test_an_announcement_behind_a_recall_is_void() -> None:
    """Host 2, whose count is high, announces the slot before it has heard of the recall; host 1 has heard."""
    cluster = Cluster(3)
    cluster.order(set(), set(SLOTS[:3]), set())
    cluster.drain()
    for slot in SLOTS[1:3]:
        cluster.mark(2, {slot})
        cluster.deliver(2, 1)
    cluster.order({ZERO}, {ZERO}, set())
    cluster.deliver(0, 1)
    cluster.answer(1)
    assert cluster.hosts[1].order.round_of(ZERO) == Round(recalls=1)
    cluster.mark(2, {ZERO})
    cluster.deliver(2, 1)
    cluster.mark(1, {ZERO})
    cluster.drain()
    assert cluster.hosts[2].returned == 1
    check_next_round(cluster, Round(1, 1))


@pytest.mark.parametrize("hosts", [2, 3, 8])
def test_the_message_that_completes_slots_makes_one_batch_of_them(hosts: int) -> None:
    """Though the other hosts announced them one by one."""
    cluster = Cluster(hosts)
    cluster.order(set(), set(SLOTS), set())
    cluster.drain()
    for slot in SLOTS:
        for host in range(1, hosts):
            cluster.mark(host, {slot})
            cluster.drain()
    cluster.mark(0, set(SLOTS))
    cluster.drain()
    assert [entry.slots for entry in cluster.hosts[0].shared[1:]] == [tuple(SLOTS[:3]), tuple(SLOTS[3:])]


def test_lists_wait_until_all_hosts_have_taken_the_earlier_ones() -> None:
    """Host 1 hears nothing: the ring of 16 has room for five lists of size 3, and none behind them."""
    cluster = Cluster(2)
    assert [cluster.order(set(), set(), set(), size=3) for _ in range(7)] == [True] * 5 + [False] * 2
    cluster.drain()
    assert cluster.order(set(), set(), set(), size=3)


def test_a_host_tells_when_it_has_taken_more_than_half_of_the_ring() -> None:
    cluster = Cluster(2)
    assert all(cluster.order(set(), set(), set(), size=3) for _ in range(5))
    cluster.hear(1, deaf_to=1)
    assert cluster.answer(1)  # and then takes all lists
    cluster.hear(0, deaf_to=0)
    assert len(cluster.hosts[1].log) == 5
    assert not cluster.order(set(), set(), set(), size=3)
    assert cluster.answer(1)
    assert not cluster.answer(1)
    cluster.hear(0, deaf_to=0)
    assert cluster.order(set(), set(), set(), size=3)
