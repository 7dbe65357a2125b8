"""Connections over loopback: deadlines, strangers, and messages larger than socket buffers."""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from pyhvd.transport.tcp import connection
from pyhvd.transport.tcp.connection import Connection, connect, listen, new_key
from pyhvd.transport.tcp.pipes import PipePair
from pyhvd.transport.tcp.session import MAX_RECORD, ChannelError, Role, Session

KEY = new_key()
_PATIENCE_S = 20.0


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with listen("127.0.0.1", 8) as made:
        yield made


def test_listening_on_a_range_of_ports(listener: socket.socket) -> None:
    taken = listener.getsockname()[1]
    with pytest.raises(OSError, match="in use"):
        listen("127.0.0.1", 1, range(taken, taken + 1))
    for _ in range(8):
        # The ports of a range are tried from a random one on.
        with listen("127.0.0.1", 1, [taken, 0]) as other:
            assert other.getsockname()[1] != taken


def serve(listener: socket.socket, key: bytes, kept: list[Connection]) -> None:
    """Accept one client and complete the handshake."""
    select.select([listener], [], [], _PATIENCE_S)
    peer, _ = listener.accept()
    connection = Connection(peer, Session(key, Role.SERVER))
    kept.append(connection)
    until = time.monotonic() + _PATIENCE_S
    try:
        while not connection.authenticated and connection.open and time.monotonic() < until:
            select.select([connection], [], [], _PATIENCE_S)
            connection.pump_in()
    except ChannelError:
        connection.close()


def both(
    listener: socket.socket, key: bytes = KEY, timeout: float = _PATIENCE_S
) -> tuple[Connection, Connection]:
    kept: list[Connection] = []
    thread = threading.Thread(target=serve, args=(listener, KEY, kept))
    thread.start()
    try:
        client = connect([listener.getsockname()[:2]], key, timeout)
    finally:
        thread.join(_PATIENCE_S)
    return client, kept[0]


def receive(connection: Connection, count: int, other: Connection) -> list[bytes]:
    messages: list[bytes] = []
    until = time.monotonic() + _PATIENCE_S
    while len(messages) < count and time.monotonic() < until:
        select.select([connection], [other] if other.wants_write else [], [], 1.0)
        other.pump_out()
        messages += connection.pump_in()
    return messages


def test_messages_go_both_ways(listener: socket.socket) -> None:
    client, server = both(listener)
    client.send(b"to the server")
    assert receive(server, 1, client) == [b"to the server"]
    server.send(b"to the client")
    assert receive(client, 1, server) == [b"to the client"]
    client.close()
    assert receive_end(server) == []
    server.close()


def test_who_finishes_loses_nothing_though_it_leaves_something_unread(listener: socket.socket) -> None:
    client, server = both(listener)
    server.send(b"never read")
    for number in range(64):
        client.send(bytes([number]) * 65536)
    thread = threading.Thread(target=client.finish, args=(1e9,))
    thread.start()
    time.sleep(0.2)  # by now it has filled the buffers
    messages: list[bytes] = []
    while server.open:
        select.select([server], [], [], _PATIENCE_S)
        messages += server.pump_in()
    server.close()
    thread.join(_PATIENCE_S)
    assert not thread.is_alive()
    assert messages == [bytes([number]) * 65536 for number in range(64)]


def test_who_finishes_does_not_wait_for_ever(listener: socket.socket) -> None:
    client, server = both(listener)
    begin = time.monotonic()
    client.finish(0.2)
    assert time.monotonic() - begin < _PATIENCE_S / 2
    assert not client.open
    server.close()


def receive_end(connection: Connection) -> list[bytes]:
    select.select([connection], [], [], _PATIENCE_S)
    messages = connection.pump_in()
    assert not connection.open
    return messages


def test_more_than_the_buffers_hold_waits_without_blocking(listener: socket.socket) -> None:
    client, server = both(listener)
    sent = [bytes([number]) * MAX_RECORD for number in range(16)]
    for message in sent:
        client.send(message)
    assert (client.wants_write, client.full) == (True, True)
    assert receive(server, len(sent), client) == sent
    assert (client.wants_write, client.full) == (False, False)
    client.close()
    server.close()


def test_a_wrong_key_is_told_without_the_key(listener: socket.socket) -> None:
    wrong = new_key()
    with pytest.raises(ChannelError, match="no connection within") as caught:
        both(listener, wrong, 0.5)
    assert wrong.hex() not in str(caught.value)


def test_a_server_that_says_nothing_is_given_up(listener: socket.socket) -> None:
    with pytest.raises(ChannelError, match="the server did not answer within"):
        connect([listener.getsockname()[:2]], KEY, 0.2)


def test_a_client_that_was_dropped_tries_again(listener: socket.socket) -> None:
    """The server drops connections while strangers keep it busy."""
    kept: list[Connection] = []

    def drop_two_and_serve() -> None:
        for _ in range(2):
            select.select([listener], [], [], _PATIENCE_S)
            listener.accept()[0].close()
        serve(listener, KEY, kept)

    thread = threading.Thread(target=drop_two_and_serve)
    thread.start()
    client = connect([listener.getsockname()[:2]], KEY, _PATIENCE_S)
    thread.join(_PATIENCE_S)
    assert client.authenticated
    client.close()
    kept[0].close()


def test_the_next_address_is_tried(listener: socket.socket) -> None:
    with listen("127.0.0.1", 1) as gone:
        dead = gone.getsockname()[:2]
    kept: list[Connection] = []
    thread = threading.Thread(target=serve, args=(listener, KEY, kept))
    thread.start()
    client = connect([dead, listener.getsockname()[:2]], KEY, _PATIENCE_S)
    thread.join(_PATIENCE_S)
    assert client.authenticated
    client.close()
    kept[0].close()


def test_sending_to_a_peer_that_is_gone_does_no_harm(listener: socket.socket) -> None:
    client, server = both(listener)
    server.close()
    for _ in range(4):
        client.send(bytes(1000))
    assert receive_end(client) == []
    client.close()


def test_a_session_over_a_pair_of_sockets() -> None:
    one, other = socket.socketpair()
    key = new_key()
    server = Connection(one, Session(key, Role.SERVER, skip=100))
    client = Connection(other, Session(key, Role.CLIENT))
    while not (client.authenticated and server.authenticated):
        client.pump_out()
        server.pump_in()
        client.pump_in()
    client.send(b"hello")
    assert server.pump_in() == [b"hello"]
    client.close()
    assert server.pump_in() == []
    assert not server.open
    server.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="two pipes need epoll")
def test_a_session_over_two_pipes_whose_reader_is_slow() -> None:
    reader, to_client = os.pipe()
    from_client, writer = os.pipe()
    key = new_key()
    client = Connection(PipePair(reader, writer), Session(key, Role.CLIENT))
    server = Connection(PipePair(from_client, to_client), Session(key, Role.SERVER))
    while not (client.authenticated and server.authenticated):
        client.pump_out()
        server.pump_in()
        client.pump_in()
    message = bytes(MAX_RECORD)
    for _ in range(2):  # a pipe holds 1 MiB at most
        client.send(message)
    assert [client.wants_write] == [True]
    assert not select.select([client], [], [], 0)[0]
    got: list[bytes] = []
    while len(got) < 2:
        assert select.select([server], [], [], _PATIENCE_S)[0]
        got += server.pump_in()
        assert not client.wants_write or select.select([client], [], [], _PATIENCE_S)[0]
        client.pump_out()
    assert got == [message] * 2
    assert [client.wants_write] == [False]
    client.send(b"the end")
    threading.Thread(target=client.finish, args=(_PATIENCE_S,)).start()
    assert select.select([server], [], [], _PATIENCE_S)[0]
    assert server.pump_in() == [b"the end"]
    while server.open:
        server.wait(_PATIENCE_S)
        server.pump_in()
    server.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="two pipes need epoll")
def test_what_a_pipe_without_a_reader_does_not_take_is_dropped() -> None:
    reader, to_client = os.pipe()
    gone, writer = os.pipe()
    client = Connection(PipePair(reader, writer), Session(KEY, Role.CLIENT))
    os.close(gone)
    client.pump_out()
    assert not client.wants_write
    client.close()
    os.close(to_client)


def test_the_error_has_the_causes_of_all_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last attempt may have no time left, and meet no cause."""
    met = iter(["refused", "refused", "wrong key", *["timed out"] * 1000])

    def fail(*_: object) -> None:
        raise ChannelError(next(met))

    monkeypatch.setattr(connection, "connect_once", fail)
    monkeypatch.setattr(connection, "_AGAIN_S", 0.001)
    with pytest.raises(ChannelError) as caught:
        connect([("h", 1)], KEY, 0.1)
    assert str(caught.value) == "no connection within 0.1 s (h:1: refused, then wrong key, then timed out)"
