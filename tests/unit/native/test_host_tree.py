"""The tree of hosts: one log on all of them, nothing stuck, and few messages from each host."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from pyhvd.transport.link_layout import parents_of
from tests.thinning import examples
from tests.unit.native.host_order import Entry, Payloads, ResponseList, Slot
from tests.unit.native.host_tree import HostTree, Post
from tests.unit.native.test_host_order import SLOTS, ZERO, Cluster, Host, Payload, check_one_log

DEEP = {
    "chain": [-1, 0, 1, 2],
    "star": [-1, 0, 0, 0],
    "two tops": [-1, -1, 0, 0, 1],
    "three levels": [-1, -1, 0, 0, 1, 2, 2, 4, 7],
}


class TreeCluster(Cluster):
    """Hosts in a tree, and the messages between neighbours that have not arrived."""

    def __init__(
        self, parents: Sequence[int], make: Callable[[int, Sequence[int]], HostTree] = HostTree
    ) -> None:
        super().__init__(len(parents))
        self.trees = [make(host, parents) for host in range(len(parents))]
        self.hosts = [Host(tree.upper, Payloads(tree.upper)) for tree in self.trees]
        self.streams = {
            (a, b): deque() for a, tree in enumerate(self.trees) for b in (*tree.above, *tree.below)
        }
        self.sent_by = Counter[int]()
        # which hosts have marked a slot, by slot, recalls and decisions of it there
        self.marks: dict[tuple[Slot, int, int], set[int]] = defaultdict(set)

    def announce(
        self, host: int, slots: set[Slot], made: ResponseList | None = None, payload: Payload = None
    ) -> bool:
        here = self.hosts[host]
        if made is not None:
            post = self.trees[host].announce((), made)
            if post is None:
                return False
            self._post(host, post)
        for slot in slots:
            self.marks[slot, self._recalls(here, slot), here.decided[slot]].add(host)
        for set_id in {slot.set for slot in here.marked}:
            marked = {slot for slot in here.marked if slot.set == set_id}
            post = self.trees[host].announce(marked, None, here.digests)
            assert post is not None
            self._post(host, post)
        self.carry_out(host)
        return True

    def deliver(self, a: int, b: int) -> bool:
        if not (stream := self.streams[a, b]):
            return False
        self.trees[b].receive(a, stream.popleft()[0])
        self.announce(b, set())
        return True

    def answer(self, host: int) -> bool:
        post = self.trees[host].owed()
        self._post(host, post)
        self.carry_out(host)
        return bool(post)

    def carry_out(self, host: int) -> None:
        here = self.hosts[host]
        while (taken := self.trees[host].take()) is not None:
            entry, made, post = taken
            self._post(host, post)
            here.log.append(replace(entry, time=len(here.shared)))  # every order has its own times
            if made is None:
                self.decide(here, entry)
            else:
                here.returned += len(here.marked & made.recalled)
                here.marked -= made.recalled
                here.delegated = here.delegated - made.recalled | made.delegated
        self.compare(host)

    def decide(self, here: Host, entry: Entry) -> None:
        """Check a batch: every host has marked its slots."""
        assert here.marked >= set(entry.slots), "decided, but not marked here"
        here.marked -= set(entry.slots)
        assert entry.unlike == self.find_unlike(here, entry)
        for slot in entry.slots:
            assert len(self.marks[slot, self._recalls(here, slot), here.decided[slot]]) == len(self.hosts)
            here.decided[slot] += 1

    def _recalls(self, here: Host, slot: Slot) -> int:
        return here.order.round_of(slot).recalls

    def _post(self, source: int, post: Post) -> None:
        self.sent += len(post)
        self.sent_by[source] += len(post)
        for target, message in post:
            self.streams[source, target].append((message, None))  # in a tree there are no payloads


@pytest.mark.timeout(600)
@settings(max_examples=examples(2000, longest=True))
@given(parents=st.sampled_from(list(DEEP.values())), seed=st.integers(0, 2**32))
def test_one_log_in_a_deep_tree(parents: list[int], seed: int) -> None:
    check_one_log(TreeCluster(parents), seed)


@pytest.mark.timeout(600)
@settings(max_examples=examples(200, longest=True))
@given(hosts=st.integers(9, 24), seed=st.integers(0, 2**32))
def test_one_log_beyond_eight_hosts(hosts: int, seed: int) -> None:
    check_one_log(TreeCluster(parents_of(hosts)), seed)


@pytest.mark.parametrize(("hosts", "most", "delays"), [(8, 7, 1), (9, 4, 3), (16, 6, 3), (64, 14, 3)])
def test_messages_and_delays_of_an_agreement(hosts: int, most: int, delays: int) -> None:
    """All hosts mark a slot at once, and then all messages pass one connection at a time."""
    cluster = TreeCluster(parents_of(hosts))
    cluster.order(set(), set(SLOTS), set())
    cluster.drain()
    for turn in range(5):
        cluster.sent_by.clear()
        for host in range(hosts):
            cluster.mark(host, {ZERO})
        passed = 0
        while in_flight := [pair for pair, stream in cluster.streams.items() for _ in stream]:
            passed += 1
            for pair in in_flight:
                cluster.deliver(*pair)
        assert [len(host.shared) for host in cluster.hosts] == [turn + 2] * hosts
        assert passed == delays
        assert max(cluster.sent_by.values()) == most
        assert not any(cluster.answer(host) for host in range(hosts))
