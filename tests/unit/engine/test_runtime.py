"""When a rank may carry out a response list."""

from __future__ import annotations

import time
from collections import deque

from pyhvd.engine.runtime import ResponseQueue
from pyhvd.negotiation.messages import (
    PROTOCOL_VERSION,
    ErrorInfo,
    ErrorKind,
    ResponseList,
    decode_responses,
    encode,
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
    """The transport of rank 0 of three; records the messages."""

    def __init__(self) -> None:
        super().__init__(Tree.of(0, [0, 0, 0]), [deque() for _ in range(3)], ThreadBell(0, []))
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
