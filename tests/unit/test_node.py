"""What a node of the tree sends, to whom, and when a rank may carry out a response list."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from hypothesis import given, settings, strategies as st

from pyhvd.controller import LAST_LIST_SECONDS, Coordinator, Node, Worker
from pyhvd.negotiation.leader import PATIENCE
from pyhvd.negotiation.messages import (
    PROTOCOL_VERSION,
    Aside,
    ErrorInfo,
    ErrorKind,
    MergedList,
    RelayedList,
    Request,
    RequestList,
    ResponseList,
    StackRequest,
    StillInRound,
    StillWaiting,
    decode_merged,
    decode_out_of_band,
    decode_relayed,
    decode_requests,
    decode_responses,
    encode,
    pack_ranks,
    unpack_ranks,
)
from pyhvd.transport.tree import Tree
from tests.thinning import examples
from tests.unit.negotiation.simulation import allreduce

END = ErrorInfo(ErrorKind.SHUT_DOWN, "the end", 0)


class Parcel:
    """A message whose sending completes when the test sets ``out``."""

    def __init__(self) -> None:
        self.out = False

    def gone(self) -> bool:
        """Return whether the message has been sent."""
        return self.out


class Scripted(Coordinator):
    """A coordinator with given answers; records what it receives."""

    def __init__(self, *answers: tuple[ResponseList, int]) -> None:
        super().__init__(3, 0)
        self.answers = deque(answers)
        self.received: list[MergedList] = []
        self.recalled: list[StillWaiting] = []

    def receive(self, message: MergedList, now: float = 0.0) -> None:
        """Record a message."""
        self.received.append(message)

    def recall(self, message: StillWaiting) -> None:
        """Record a recall."""
        self.recalled.append(message)

    def respond(self) -> ResponseList | None:
        """Return the next answer."""
        return self.answers[0][0] if self.answers else None

    def audience(self, message: ResponseList) -> int:
        """Return whom the next answer concerns, and remove the answer if it is this one."""
        assert message is self.answers[0][0]
        return self.answers[0][1]


class Harness:
    """A node, by default that of rank 0 of three on one host; records messages."""

    def __init__(
        self, *answers: tuple[ResponseList, int], rank: int = 0, hosts: Sequence[int] = (0, 0, 0)
    ) -> None:
        self.sent: list[tuple[int, bytes, Parcel]] = []
        self.asides: list[tuple[int, object, float]] = []
        self.announced: list[tuple[int, int]] = []
        self.full = False
        self.coordinator = None if rank else Scripted(*answers)
        worker = Worker(rank, len(hosts))
        self.node = Node(
            Tree.of(rank, hosts), worker, self.coordinator, self.send, self.announce, self.take_aside
        )

    def send(self, rank: int, payload: bytes) -> Parcel:
        """Record a message."""
        self.sent.append((rank, payload, Parcel()))
        return self.sent[-1][2]

    def announce(self, number: int, ranks: int) -> bool:
        """Record an announcement, if the log is not full."""
        if not self.full:
            self.announced.append((number, ranks))
            assert self.coordinator is not None
        return not self.full

    def take_aside(self, source: int, message: Aside, now: float) -> None:
        """Record an out-of-band message."""
        self.asides.append((source, message, now))

    def publish(self) -> None:
        """Let rank 0 publish all answers."""
        assert self.coordinator is not None
        while self.coordinator.answers:
            assert self.node.respond(0.0)
            self.coordinator.answers.popleft()


def a_list(seq: int, stop: ErrorInfo | None = None) -> ResponseList:
    return ResponseList(PROTOCOL_VERSION, seq, stop=stop)


def a_message(*names: str) -> RequestList:
    return RequestList(PROTOCOL_VERSION, 0, requests=[(0, allreduce(name)) for name in names])


# -- response lists


def test_a_list_waits_until_it_has_gone_out_to_all() -> None:
    rank_0 = Harness((a_list(1), 0b111))
    node = rank_0.node
    rank_0.publish()
    assert rank_0.announced == [(1, 0b111)]
    assert [rank for rank, _, _ in rank_0.sent] == [1, 2]
    assert {decode_responses(payload, 7).seq for _, payload, _ in rank_0.sent} == {1}
    assert node.first(0.0) is None
    rank_0.sent[1][2].out = True
    assert node.first(0.0) is None
    rank_0.sent[0][2].out = True
    assert node.first(0.0) == a_list(1)
    assert node.due(0.0) is None
    assert node.pop() == a_list(1)
    assert node.first(0.0) is None


def test_a_list_waits_for_earlier_ones_of_other_ranks_and_for_no_later_ones() -> None:
    """Rank 1 may wait in the first list for rank 2, which has not received that list yet."""
    rank_0 = Harness((a_list(1), 0b110), (a_list(2), 0b011), (a_list(3), 0b111))  # 1: not for this rank
    node, sent = rank_0.node, rank_0.sent
    rank_0.publish()
    assert [rank for rank, _, _ in sent] == [1, 2, 1, 1, 2]
    sent[0][2].out = True
    sent[2][2].out = True
    assert node.first(0.0) is None
    sent[1][2].out = True
    first = node.first(0.0)
    assert first is not None
    assert first.seq == 2
    node.pop()
    assert node.first(0.0) is None


def test_the_last_list_waits_for_a_short_time_only() -> None:
    """A rank may have died or stopped, so the wait for its message has a limit."""
    rank_0 = Harness((a_list(1, END), 0b111))
    node = rank_0.node
    assert not node.has_ended()
    rank_0.publish()
    assert node.has_ended()
    assert node.first(LAST_LIST_SECONDS / 2) is None
    assert node.due(LAST_LIST_SECONDS / 2) == LAST_LIST_SECONDS
    assert node.first(LAST_LIST_SECONDS) == a_list(1, END)
    assert node.due(LAST_LIST_SECONDS) is None


def test_a_list_without_room_in_the_ready_log_is_held() -> None:
    rank_0 = Harness((a_list(1), 0b111))
    rank_0.full = True
    assert [rank_0.node.respond(0.0), rank_0.node.held] == [False, a_list(1)]
    assert not rank_0.sent
    rank_0.full = False
    assert [rank_0.node.respond(0.0), rank_0.node.held] == [True, None]
    assert len(rank_0.sent) == 2


def test_a_list_that_has_arrived_need_not_wait() -> None:
    rank_1 = Harness(rank=1)
    rank_1.node.take(0, encode(a_list(1)), 0.0)
    rank_1.node.take(0, bytearray(encode(a_list(2))), 0.0)
    assert [rank_1.node.first(0.0), rank_1.node.pop().seq, rank_1.node.pop().seq] == [a_list(1), 1, 2]
    assert not rank_1.sent
    assert not rank_1.node.respond(0.0), "only rank 0 responds"


HOSTS = [0, 0, 2, 2, 4, 4]


def test_rank_0_sends_a_list_to_leaders_for_their_ranks() -> None:
    rank_0 = Harness((a_list(1), 0b101010), hosts=HOSTS)
    rank_0.publish()
    sent = {rank: payload for rank, payload, _ in rank_0.sent}
    assert sent.pop(1) == encode(a_list(1))
    relayed = {rank: decode_relayed(payload, 7) for rank, payload in sent.items()}
    assert {rank: unpack_ranks(each.ranks) for rank, each in relayed.items()} == {2: 0b001000, 4: 0b100000}
    assert {decode_responses(each.payload, 7).seq for each in relayed.values()} == {1}


def test_a_leader_passes_a_list_on_before_it_runs_the_list() -> None:
    leader = Harness(rank=2, hosts=HOSTS)
    node, sent = leader.node, leader.sent
    for seq, ranks in ((1, 0b1000), (2, 0b1100), (3, 0b0100)):
        node.take(0, encode(RelayedList(PROTOCOL_VERSION, pack_ranks(ranks), encode(a_list(seq)))), 0.0)
    assert [(rank, decode_responses(payload, 7).seq) for rank, payload, _ in sent] == [(3, 1), (3, 2)]
    assert node.first(0.0) is None
    sent[1][2].out = True
    assert node.first(0.0) is None, "list 1 has not left"
    sent[0][2].out = True
    assert node.first(0.0) == a_list(2)
    assert not node.has_ended()


# -- requests


def test_a_rank_sends_its_requests_to_the_rank_above() -> None:
    rank_3 = Harness(rank=3, hosts=HOSTS)
    rank_3.node.submit(a_message("x"), 0.0)
    rank_3.node.stop(END, 0.0)
    assert [rank for rank, _, _ in rank_3.sent] == [2, 2]
    first, last = (decode_requests(payload, 7) for _, payload, _ in rank_3.sent)
    assert first == a_message("x")
    assert last.stop == END
    assert not rank_3.node.flush(1e9)


def test_a_leader_merges_requests_until_they_are_due() -> None:
    leader = Harness(rank=2, hosts=HOSTS)
    node = leader.node
    node.submit(a_message("x"), 1.0)
    assert node.due(1.0) == 1.0 + PATIENCE
    assert not node.flush(1.0)
    node.take(3, encode(a_message("x")), 1.001)
    assert node.due(1.001) == 1.0, "both have submitted it"
    assert node.flush(1.001)
    ((rank, payload, _),) = leader.sent
    assert rank == 0
    (part,) = decode_merged(payload, 7).parts
    assert unpack_ranks(part.ranks) == 0b1100
    assert node.due(2.0) is None
    assert not node.flush(2.0)


class Hooks:
    """Records what ranks requested."""

    def __init__(self) -> None:
        self.active: list[object] = []
        self.heard: list[tuple[int, list[str]]] = []

    def requested(self, rank: int, tensors: list[tuple[int, Request]]) -> None:
        """Record requests."""
        self.heard.append((rank, [request.name for _, request in tensors]))


def test_rank_0_notifies_active_hooks_of_requests() -> None:
    hooks, rank_0 = Hooks(), Harness(hosts=HOSTS)
    node = Node(
        rank_0.node.tree,
        Worker(0, 6),
        Coordinator(6, 0),
        rank_0.send,
        rank_0.announce,
        rank_0.take_aside,
        hooks,
    )
    node.submit(a_message("x"), 0.0)
    hooks.active = [hooks]
    node.submit(a_message("y"), 0.0)
    node.take(2, encode(MergedList.of(2, a_message("z"))), 0.0)
    assert hooks.heard == [(0, ["y"]), (2, ["z"])]


# -- out-of-band messages


def test_out_of_band_messages_go_to_rank_0_directly() -> None:
    told = StillWaiting(PROTOCOL_VERSION, {0: b"\x01"})
    for rank in (1, 2, 3):
        other = Harness(rank=rank, hosts=HOSTS)
        other.node.tell_rank_0(told, 0.0)
        ((target, payload, _),) = other.sent
        assert (target, decode_out_of_band(payload, 7)) == (0, told)
    rank_0 = Harness(hosts=HOSTS)
    rank_0.node.take(3, encode(told), 0.0)
    rank_0.node.tell_rank_0(told, 0.0)
    assert rank_0.coordinator is not None
    assert rank_0.coordinator.recalled == [told, told]
    assert not rank_0.asides


def test_other_out_of_band_messages_have_no_place_in_the_order() -> None:
    rank_1, rank_0 = Harness(rank=1), Harness()
    question, note = StackRequest(PROTOCOL_VERSION, 7), StillInRound(PROTOCOL_VERSION, 0, "p.")
    rank_1.node.take(0, encode(question), 2.0)
    rank_0.node.tell_rank_0(note, 3.0)
    assert rank_1.asides == [(0, question, 2.0)]
    assert rank_0.asides == [(0, note, 3.0)]
    assert not rank_1.sent + rank_0.sent
    assert rank_1.node.first(2.0) is None


# -- all nodes together


class Cluster:
    """Nodes whose messages arrive, and leave their senders, when the test says so.

    Each rank has submitted the same tensors, in an order of its own and by messages of one tensor.
    """

    def __init__(
        self, hosts: Sequence[int], fan_out: int, capacity: int, orders: Sequence[list[str]]
    ) -> None:
        size = len(hosts)
        self.now = 0.0
        self.wires: dict[tuple[int, int], deque[tuple[bytes, Parcel]]] = {}
        self.lists: list[list[tuple[int, Parcel]]] = [[] for _ in hosts]  # those that a rank has sent down
        self.left = [deque(order) for order in orders]
        self.in_flight: list[set[str]] = [set() for _ in hosts]
        self.ran: list[list[str]] = [[] for _ in hosts]
        self.ended: list[int] = []
        self.nodes = [
            Node(
                tree := Tree.of(rank, hosts, fan_out),
                Worker(rank, size),
                None if rank else Coordinator(size, capacity),
                partial(self.send, tree),
                lambda *_: True,
                lambda *_: None,
            )
            for rank in range(size)
        ]

    def send(self, tree: Tree, target: int, payload: bytes) -> Parcel:
        """Let a message be under way."""
        assert target in tree.neighbours
        self.wires.setdefault((tree.rank, target), deque()).append((payload, parcel := Parcel()))
        if target in tree.children:
            inner = decode_relayed(payload, 7).payload if target in tree.leaders else payload
            self.lists[tree.rank].append((decode_responses(inner, 7).seq, parcel))
        return parcel

    def submit(self, rank: int) -> None:
        """Submit a rank's next tensor."""
        name, node = self.left[rank].popleft(), self.nodes[rank]
        self.in_flight[rank].add(name)
        node.submit(node.worker.compose([(0, allreduce(name))]), self.now)

    def deliver(self, wire: tuple[int, int]) -> None:
        """Let the oldest message of two ranks leave and arrive."""
        payload, parcel = self.wires[wire].popleft()
        parcel.out = True
        self.nodes[wire[1]].take(wire[0], payload, self.now)

    def turn(self, rank: int) -> None:
        """Do what is due on a rank, and carry out its lists."""
        node = self.nodes[rank]
        node.flush(self.now)
        while node.respond(self.now):
            pass
        while (responses := node.first(self.now)) is not None:
            assert all(parcel.out for number, parcel in self.lists[rank] if number <= responses.seq)
            assert node.pop() is responses
            names = [each.request.name for each in node.worker.process(responses)]
            node.worker.carried_out()
            self.ran[rank] += names
            self.in_flight[rank].difference_update(names)
            self.ended += [rank] if responses.stop is not None else []

    def moves(self) -> list[Callable[[], object]]:
        """Return what can happen next."""
        ranks = range(len(self.nodes))
        free = [rank for rank in ranks if self.left[rank] and self.left[rank][0] not in self.in_flight[rank]]
        can: list[Callable[[], object]] = [partial(self.submit, rank) for rank in free]
        can += [partial(self.deliver, wire) for wire, messages in self.wires.items() if messages]
        return can or [self.wait] * any(node.due(self.now) is not None for node in self.nodes)

    def wait(self) -> None:
        """Let time pass until all leaders are due."""
        self.now += PATIENCE


NAMES = ["a", "b", "c"]


@settings(max_examples=examples(500, longest=True))
@given(data=st.data())
def test_all_ranks_run_the_same_lists_in_any_interleaving(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 6))
    hosts = sorted(data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)))
    orders = [data.draw(st.permutations(NAMES)) + data.draw(st.permutations(NAMES)) for _ in hosts]
    fan_out, capacity = data.draw(st.integers(1, 2)), data.draw(st.sampled_from([0, 2, 8]))
    cluster = Cluster([hosts.index(host) for host in hosts], fan_out, capacity, orders)
    while can := cluster.moves():
        can[data.draw(st.integers(0, len(can) - 1))]()
        cluster.turn(data.draw(st.integers(0, count - 1)))
        if not cluster.moves():
            for rank in range(count):
                cluster.turn(rank)
    assert cluster.ran == [cluster.ran[0]] * count
    assert sorted(cluster.ran[0]) == sorted(NAMES * 2)
    cluster.nodes[-1].stop(END, cluster.now)
    while can := cluster.moves() or [cluster.wait] * (len(cluster.ended) < count):
        can[0]()
        for rank in range(count):
            cluster.turn(rank)
    assert sorted(cluster.ended) == list(range(count))
