"""Handshakes between hosts: only the expected peers get in, and nobody delays or hinders them."""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import pytest

from pyhvd.transport.link_handshakes import Handshakes
from pyhvd.transport.link_layout import Kind, LinkRole
from pyhvd.transport.tcp.connection import Address, connect, listen, new_key

KEY = new_key()
ROLE = LinkRole(Kind.RAIL, 2, 0, 1)
LONG = 60.0
SHORT = 1.0


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with listen("127.0.0.1", 256) as made:
        yield made


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A peer that accepts connections and says nothing."""
    with listen("127.0.0.1", 256) as made:
        yield made


def address_of(listener: socket.socket) -> Address:
    host, port = listener.getsockname()[:2]
    return host, port


def refusing() -> Address:
    with listen("127.0.0.1", 1) as gone:
        return address_of(gone)


class Server(threading.Thread):
    """Accepts in its own thread."""

    def __init__(self, listener: socket.socket, role: LinkRole = ROLE, key: bytes = KEY, limit: float = LONG):
        super().__init__(daemon=True)
        self.made: dict[LinkRole, socket.socket] = {}
        self.missing: dict[LinkRole, str] = {}
        self._handshakes = Handshakes(key, [listener], {role}, {})
        self._limit = limit
        self.start()

    def run(self) -> None:
        with closing(self._handshakes) as handshakes:
            self.missing = handshakes.run(time.monotonic() + self._limit)
        self.made = handshakes.made

    def end(self) -> dict[LinkRole, socket.socket]:
        self.join(LONG)
        assert not self.is_alive()
        return self.made


def dial(
    addresses: Sequence[Address], role: LinkRole = ROLE, key: bytes = KEY, limit: float = LONG
) -> tuple[dict[LinkRole, socket.socket], dict[LinkRole, str]]:
    with closing(Handshakes(key, [], set(), {role: addresses})) as handshakes:
        missing = handshakes.run(time.monotonic() + limit)
    return handshakes.made, missing


def check_pair(one: socket.socket, other: socket.socket) -> None:
    """Assert that two sockets are connected, then close them."""
    for left, right in ((one, other), (other, one)):
        left.setblocking(True)
        right.settimeout(LONG)
        left.sendall(b"token")
        assert right.recv(64) == b"token"
    one.close()
    other.close()


def test_both_ends_get_the_connection_and_no_byte_of_the_handshake_is_left(listener: socket.socket) -> None:
    server = Server(listener)
    made, missing = dial([address_of(listener)])
    accepted = server.end()
    assert (missing, server.missing) == ({}, {})
    for peer in (made[ROLE], accepted[ROLE]):
        assert not peer.getblocking()
        assert not peer.get_inheritable()
        assert peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert peer.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
        assert peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 1
        assert peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 1
        assert peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 4
    check_pair(made[ROLE], accepted[ROLE])


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.0\r\n\r\n", b"pyhvd/1\n" + bytes(32), bytes(100_000)])
def test_strangers_do_not_hinder_the_peer(listener: socket.socket, said: bytes) -> None:
    server = Server(listener)
    strangers = [socket.create_connection(address_of(listener), LONG) for _ in range(100)]
    for stranger in strangers:
        stranger.setblocking(False)
        try:
            stranger.sendall(said)
        except OSError:
            assert len(said) > 1000, "it may be dropped before it has sent everything"
    made, _ = dial([address_of(listener)])
    check_pair(made[ROLE], server.end()[ROLE])
    for stranger in strangers:
        stranger.close()


def test_a_rank_without_descriptors_rests(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[float] = []
    accept = socket.socket.accept

    def fail(_: socket.socket) -> tuple[socket.socket, object]:
        tried.append(time.monotonic())
        if time.monotonic() > tried[0] + 0.5:
            return accept(listener)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket.socket, "accept", fail)
    server = Server(listener)
    made, _ = dial([address_of(listener)])
    check_pair(made[ROLE], server.end()[ROLE])
    assert 1 < len(tried) < 60


def test_a_stranger_is_dropped(listener: socket.socket) -> None:
    server = Server(listener, limit=SHORT)
    with socket.create_connection(address_of(listener), LONG) as stranger:
        assert stranger.recv(1) == b""
    assert server.end() == {}
    assert server.missing == {ROLE: "no connection came"}


def test_a_peer_with_another_key_gets_nothing(listener: socket.socket) -> None:
    server = Server(listener, limit=SHORT)
    wrong = new_key()
    address = address_of(listener)
    made, missing = dial([address], key=wrong, limit=SHORT)
    assert made == {}
    assert missing.keys() == {ROLE}
    assert missing[ROLE].startswith(f"127.0.0.1:{address[1]}: ")
    assert wrong.hex() not in missing[ROLE]
    assert server.end() == {}


def packed(role: LinkRole) -> bytes:
    return struct.pack("!BIII", *role)


@pytest.mark.parametrize(
    "said",
    [
        [b"x"],
        [b""],
        [packed(ROLE) * 2],
        [bytes(1 << 20)],
        [packed(ROLE._replace(kind=Kind.AGREEMENT))],
        [packed(ROLE._replace(slice=3))],
        [packed(ROLE._replace(low=1, high=2))],
    ],
)
def test_a_holder_of_the_key_with_another_role_or_message_is_refused(
    listener: socket.socket, said: list[bytes]
) -> None:
    server = Server(listener)
    connection = connect([address_of(listener)], KEY, LONG)
    for message in said:
        connection.send(message)
    connection.drain(LONG)
    until = time.monotonic() + LONG
    while connection.open and time.monotonic() < until:
        connection.wait(LONG)
        assert connection.pump_in() == []
    assert not connection.open
    connection.close()
    made, _ = dial([address_of(listener)])
    check_pair(made[ROLE], server.end()[ROLE])


def test_the_next_address_is_tried(listener: socket.socket, silent: socket.socket) -> None:
    server = Server(listener)
    made, _ = dial([refusing(), address_of(silent), address_of(listener)])
    assert made[ROLE].getpeername()[:2] == address_of(listener)
    check_pair(made[ROLE], server.end()[ROLE])


def test_an_address_that_refuses_at_first_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    address = refusing()
    handshakes = Handshakes(KEY, [], set(), {ROLE: [address]})
    refused = threading.Event()
    drop = handshakes._drop

    def noted(*args: Any) -> None:
        drop(*args)
        refused.set()

    monkeypatch.setattr(handshakes, "_drop", noted)
    thread = threading.Thread(target=handshakes.run, args=(time.monotonic() + LONG,))
    thread.start()
    assert refused.wait(LONG)
    with socket.socket() as late:
        late.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        late.bind(address)
        late.listen()
        late.setblocking(False)
        accepted = Server(late).end()
    thread.join(LONG)
    check_pair(handshakes.made[ROLE], accepted[ROLE])
    handshakes.close()


def test_the_time_limit_holds_and_each_address_is_named(silent: socket.socket) -> None:
    gone = refusing()
    begin = time.monotonic()
    made, missing = dial([gone, address_of(silent)], limit=SHORT)
    assert SHORT <= time.monotonic() - begin < LONG / 2
    assert made == {}
    told = f"127.0.0.1:{gone[1]}: Connection refused; 127.0.0.1:{address_of(silent)[1]}: no answer"
    assert missing == {ROLE: told}


def test_a_peer_that_comes_again_gets_the_newer_connection(listener: socket.socket) -> None:
    """The client has lost its first connection before the welcome arrived."""
    other = ROLE._replace(slice=0)
    handshakes = Handshakes(KEY, [listener], {ROLE, other}, {})
    thread = threading.Thread(target=handshakes.run, args=(time.monotonic() + LONG,))
    thread.start()
    first, _ = dial([address_of(listener)])
    second, _ = dial([address_of(listener)])
    last, _ = dial([address_of(listener)], other)
    thread.join(LONG)
    handshakes.close()
    first[ROLE].settimeout(LONG)
    assert first[ROLE].recv(1) == b""
    first[ROLE].close()
    check_pair(second[ROLE], handshakes.made[ROLE])
    check_pair(last[other], handshakes.made[other])


def test_many_connections_at_once(listener: socket.socket) -> None:
    roles = {LinkRole(Kind.RAIL, k, 0, g) for k in range(10) for g in range(1, 13)}
    handshakes = Handshakes(KEY, [listener], roles, {})
    thread = threading.Thread(target=handshakes.run, args=(time.monotonic() + LONG,))
    thread.start()
    addresses = [address_of(listener)]
    with closing(Handshakes(KEY, [], set(), dict.fromkeys(roles, addresses))) as dials:
        assert dials.run(time.monotonic() + LONG) == {}
    thread.join(LONG)
    handshakes.close()
    assert handshakes.made.keys() == dials.made.keys() == roles
    for role in roles:
        check_pair(dials.made[role], handshakes.made[role])
