"""When a rank may carry out a response list."""

from __future__ import annotations

import time
from collections import deque

from pyhvd.engine.runtime import ResponseQueue
from pyhvd.negotiation.messages import (
    PROTOCOL_VERSION,
    ErrorInfo,
    ErrorKind,
    RelayedList,
    ResponseList,
    decode_relayed,
    decode_responses,
    encode,
    pack_ranks,
    unpack_ranks,
)
from pyhvd.transport.inprocess import InProcessTransport, ThreadBell
from pyhvd.transport.tree import Tree


class Parcel:
    """A message whose sending completes when the test sets ``out``."""

    def __init__(self) -> None:
        self.out = False

    def gone(self) -> bool:
        """Return whether the message has been sent."""
        return self.out


class Carrier(InProcessTransport):
    """The transport of a rank, by default rank 0 of three; records the messages."""

    def __init__(self, tree: Tree | None = None) -> None:
        super().__init__(tree or Tree.of(0, [0, 0, 0]), [deque() for _ in range(3)], ThreadBell(0, []))
        self.sent: list[tuple[int, bytes, Parcel]] = []

    def send(self, destination: int, payload: bytes) -> Parcel:
        """Record a message."""
        self.sent.append((destination, payload, Parcel()))
        return self.sent[-1][2]


def a_list(seq: int, stop: ErrorInfo | None = None) -> ResponseList:
    return ResponseList(PROTOCOL_VERSION, seq, stop=stop)


def test_a_list_waits_until_it_has_gone_out_to_all() -> None:
    carrier = Carrier()
    queue = ResponseQueue(carrier)
    queue.publish(a_list(1), 0b111)
    assert [rank for rank, _, _ in carrier.sent] == [1, 2]
    assert {decode_responses(payload).seq for _, payload, _ in carrier.sent} == {1}
    assert queue.first() is None
    carrier.sent[1][2].out = True
    assert queue.first() is None
    carrier.sent[0][2].out = True
    assert queue.first() == a_list(1)
    assert queue.look_at() is None
    assert queue.pop() == a_list(1)
    assert queue.first() is None


def test_a_list_waits_for_earlier_ones_of_other_ranks_and_for_no_later_ones() -> None:
    """Rank 1 may wait in the first list for rank 2, which has not received that list yet."""
    carrier = Carrier()
    queue = ResponseQueue(carrier)
    queue.publish(a_list(1), 0b110)  # not for this rank
    queue.publish(a_list(2), 0b011)
    queue.publish(a_list(3), 0b111)
    assert [rank for rank, _, _ in carrier.sent] == [1, 2, 1, 1, 2]
    carrier.sent[0][2].out = True
    carrier.sent[2][2].out = True
    assert queue.first() is None
    carrier.sent[1][2].out = True
    first = queue.first()
    assert first is not None
    assert first.seq == 2
    queue.pop()
    assert queue.first() is None


def test_the_last_list_waits_for_a_short_time_only() -> None:
    """A rank may have died or stopped, so the wait for its message has a limit."""
    queue = ResponseQueue(Carrier())
    stop = a_list(1, ErrorInfo(ErrorKind.SHUT_DOWN, "the end", 0))
    begun = time.monotonic()
    queue.publish(stop, 0b111)
    assert queue.first() is None
    until = queue.look_at()
    assert until is not None
    assert begun < until < begun + 10
    while queue.first() is None:
        assert time.monotonic() < begun + 10
    assert time.monotonic() >= until
    assert queue.look_at() is None


def test_what_has_arrived_need_not_wait() -> None:
    carrier = Carrier()
    queue = ResponseQueue(InProcessTransport(Tree.of(1, [0, 0, 0]), carrier._boxes, ThreadBell(1, [])))
    queue.hear(encode(a_list(1)))
    queue.hear(bytearray(encode(a_list(2))))
    assert [queue.pop().seq, queue.pop().seq] == [1, 2]
    assert not carrier.sent


HOSTS = [0, 0, 2, 2, 4, 4]


def test_rank_0_sends_a_list_to_leaders_for_their_ranks() -> None:
    carrier = Carrier(Tree.of(0, HOSTS))
    ResponseQueue(carrier).publish(a_list(1), 0b101010)
    sent = {rank: payload for rank, payload, _ in carrier.sent}
    assert sent.pop(1) == encode(a_list(1))
    relayed = {rank: decode_relayed(payload) for rank, payload in sent.items()}
    assert {rank: unpack_ranks(each.ranks) for rank, each in relayed.items()} == {2: 0b001000, 4: 0b100000}
    assert {decode_responses(each.payload).seq for each in relayed.values()} == {1}


def test_a_leader_passes_a_list_on_before_it_runs_the_list() -> None:
    carrier = Carrier(Tree.of(2, HOSTS))
    queue = ResponseQueue(carrier)
    for seq, ranks in ((1, 0b1000), (2, 0b1100), (3, 0b0100)):
        queue.hear(encode(RelayedList(PROTOCOL_VERSION, pack_ranks(ranks), encode(a_list(seq)))))
    assert [(rank, decode_responses(payload).seq) for rank, payload, _ in carrier.sent] == [(3, 1), (3, 2)]
    assert queue.first() is None
    carrier.sent[1][2].out = True
    assert queue.first() is None, "list 1 has not left"
    carrier.sent[0][2].out = True
    assert queue.first() == a_list(2)
    assert not queue.has_ended()
