"""Messages over control connections: whole, in order, without blocking; and how a connection ends."""

from __future__ import annotations

import errno
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator

import pytest

from pyhvd.errors import TransportError
from pyhvd.transport import link_control
from pyhvd.transport.control import GOODBYE, Message
from pyhvd.transport.inprocess import InProcessTransport, ThreadBell
from pyhvd.transport.link_control import LinkTransport
from pyhvd.transport.tree import Tree

HOSTS = [0, 1, 1]
"""Rank 0 is alone on its host; rank 1 leads the other host."""


class Failed(Exception):
    """Carries the rank and the errno of a connection."""


def pair() -> tuple[socket.socket, socket.socket]:
    """Return the ends of a TCP connection; neither blocks."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    for each in (one, other):
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        each.setblocking(False)
    return one, other


class Ranks:
    """The transports of all ranks, of which 0 and 1 have a connection."""

    def __init__(self) -> None:
        boxes: list[deque[Message]] = [deque() for _ in HOSTS]
        bells = [threading.Event() for _ in HOSTS]
        self.sockets = dict(enumerate(pair()))
        self.arrived: list[list[Message]] = [[], []]
        self.transports = []
        for rank in range(len(HOSTS)):
            inner = InProcessTransport(Tree.of(rank, HOSTS), boxes, ThreadBell(rank, bells))
            peers = {1 - rank: self.sockets[rank]} if rank in self.sockets else {}
            self.transports.append(LinkTransport(inner, peers, Failed))

    def receive(self, rank: int, count: int = 1) -> list[Message]:
        """Return some messages; while there are fewer, let the other end send."""
        arrived = self.arrived[rank]
        while len(arrived) < count:
            if not select.select([self.transports[rank]], [], [], 0.01)[0]:
                self.arrived[1 - rank] += self.transports[1 - rank].receive()
            arrived += self.transports[rank].receive()
        self.arrived[rank] = []
        return arrived


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    for each in made.transports:
        each.close()
    for peer in made.sockets.values():
        peer.close()


def reset(peer: socket.socket) -> None:
    """Close a socket so that its peer is reset."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()


def test_messages_arrive_in_order(ranks: Ranks) -> None:
    sent = [b"", b"a", bytes(1000), b"b" * 70_000, b""]
    sendings = [ranks.transports[0].send(1, each) for each in sent]
    assert all(sending.gone() for sending in sendings)
    assert ranks.receive(1, len(sent)) == [(0, each) for each in sent]
    ranks.transports[1].send(0, b"answer")
    assert ranks.receive(0) == [(1, b"answer")]
    assert ranks.transports[1].receive() == []


def test_other_ranks_use_the_inner_transport(ranks: Ranks) -> None:
    ranks.transports[2].send(1, b"local")
    ranks.transports[2].send(0, b"out of band")
    ranks.transports[0].send(1, b"link")
    assert ranks.receive(1, 2) == [(2, b"local"), (0, b"link")]
    assert ranks.receive(0) == [(2, b"out of band")]


def test_a_message_arrives_in_pieces(ranks: Ranks) -> None:
    for byte in struct.pack("!I", 2) + b"ab":
        assert ranks.transports[1].receive() == []
        ranks.sockets[0].send(bytes([byte]))
        select.select([ranks.transports[1]], [], [], 1)
    assert ranks.transports[1].receive() == [(0, b"ab")]


def test_large_messages_cross_each_other(ranks: Ranks) -> None:
    large = [bytes([rank]) * (9 << 20) for rank in range(2)]
    first, second = (ranks.transports[rank].send(1 - rank, large[rank]) for rank in range(2))
    last = ranks.transports[0].send(1, b"after it")
    assert not any(sending.gone() for sending in (first, second, last))
    assert not ranks.transports[0].drain(0.01)
    assert ranks.receive(1, 2) == [(0, large[0]), (0, b"after it")]
    assert all(sending.gone() for sending in (first, last))
    assert ranks.transports[0].drain(0)
    assert ranks.receive(0) == [(1, large[1])]
    assert second.gone()


def test_the_descriptor_is_readable_when_there_is_work(ranks: Ranks) -> None:
    def readable() -> list[bool]:
        found, _, _ = select.select(ranks.transports[:2], [], [], 0.05)
        return [each in found for each in ranks.transports[:2]]

    assert readable() == [False, False]
    sending = ranks.transports[0].send(1, bytes(9 << 20))
    assert readable() == [False, True]
    ranks.transports[1].receive()
    assert readable()[0]  # its socket takes bytes again
    ranks.receive(1)
    assert sending.gone()
    assert readable() == [False, False]


def test_a_message_has_a_largest_size(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_control, "MOST_BYTES", 100)
    with pytest.raises(TransportError, match=r"message to rank 1 has 101 bytes, but at most 100 can be sent"):
        ranks.transports[0].send(1, bytes(101))
    ranks.transports[0].send(1, bytes(100))
    ranks.sockets[0].send(struct.pack("!I", 101))
    assert ranks.receive(1) == [(0, bytes(100))]
    with pytest.raises(Failed) as caught:
        ranks.receive(1)
    assert caught.value.args == (0, errno.EPROTO)


@pytest.mark.parametrize("by_reset", [False, True])
def test_an_end_is_reported_once_after_the_messages_before_it(ranks: Ranks, by_reset: bool) -> None:
    ranks.transports[0].send(1, b"last")
    select.select([ranks.transports[1]], [], [], 1)
    (reset if by_reset else socket.socket.close)(ranks.sockets[0])
    select.select([ranks.transports[1]], [], [], 1)
    assert ranks.transports[1].receive() == [(0, b"last")]
    with pytest.raises(Failed) as caught:
        ranks.receive(1)
    assert caught.value.args == (0, errno.ECONNRESET if by_reset else 0)
    assert ranks.transports[1].receive() == []
    assert ranks.transports[1].send(0, bytes(9 << 20)).gone()  # nobody will read it
    assert ranks.transports[1].drain(0)


def test_a_reset_while_bytes_wait(ranks: Ranks) -> None:
    sending = ranks.transports[1].send(0, bytes(9 << 20))
    reset(ranks.sockets[0])
    select.select([ranks.transports[1]], [], [], 1)
    with pytest.raises(Failed):
        ranks.receive(1)
    assert sending.gone()
    assert ranks.transports[1].drain(0)


def test_a_peer_may_leave_after_its_goodbye(ranks: Ranks) -> None:
    ranks.transports[1].send(0, b"x")
    ranks.transports[1].send(0, GOODBYE)
    ranks.sockets[1].close()
    assert ranks.receive(0, 2) == [(1, b"x"), (1, b"")]
    for _ in range(3):
        assert ranks.transports[0].receive() == []
    assert not select.select([ranks.transports[0]], [], [], 0)[0]
