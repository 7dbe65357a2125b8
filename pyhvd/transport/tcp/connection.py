"""A session over a TCP socket: never blocks once it is connected, bounded in what it keeps.

Owns: sockets and deadlines. What a message means is its user's business.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Sequence

from pyhvd.transport.tcp.session import ChannelError, Role, Session

Address = tuple[str, int]

_CHUNK = 1 << 18
# A peer that does not show who it is by then is hung up on.
HANDSHAKE_S = 10.0
# What waits to be sent beyond this is too much: senders should stop for now.
_FULL = 1 << 22


class Connection:
    """One end of a connection; for selectors it stands for its socket.

    Parameters
    ----------
    peer : socket.socket
        Connected; owned from now on.
    session : Session
        In its initial state.

    Attributes
    ----------
    open : bool
        Whether the peer can still say something; cleared at the end of the connection.
    heard : float
        When bytes of the peer last came (time.monotonic).
    """

    def __init__(self, peer: socket.socket, session: Session) -> None:
        peer.setblocking(False)
        with contextlib.suppress(OSError):
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = peer
        self._session = session
        self._out = bytearray(session.take_outgoing())
        self.open = True
        self.heard = time.monotonic()
        self.began = self.heard

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    @property
    def authenticated(self) -> bool:
        """Whether the peer has proved that it holds the key."""
        return self._session.authenticated

    @property
    def wants_write(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._out)

    @property
    def full(self) -> bool:
        """Whether so much waits to be sent that its sources should pause."""
        return len(self._out) > _FULL

    def send(self, payload: bytes) -> None:
        """Send one message, or as much of it as goes now; a peer that is gone is noticed when reading."""
        self._session.send(payload)
        self._out += self._session.take_outgoing()
        self.pump_out()

    def pump_out(self) -> None:
        """Send what goes now."""
        try:
            while self._out:
                sent = self._socket.send(memoryview(self._out)[:_CHUNK])
                del self._out[:sent]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._out.clear()

    def pump_in(self) -> list[bytes]:
        """Return the messages that have arrived; clears `open` at the end of the connection.

        Raises
        ------
        ChannelError
            The peer does not hold the key, or broke the protocol, or was cut off inside a message: hang up.
        """
        try:
            data = self._socket.recv(_CHUNK)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:
            data = b""
        try:
            if not data:
                self.open = False
                self._session.end()
                return []
            self.heard = time.monotonic()
            messages = self._session.receive(data)
        except ChannelError:
            self.open = False
            raise
        self._out += self._session.take_outgoing()
        self.pump_out()
        return messages

    def drain(self, timeout: float) -> None:
        """Send what waits, until the peer has taken nothing of it for `timeout` seconds."""
        until = time.monotonic() + timeout
        while self._out and (left := until - time.monotonic()) > 0:
            self._wait(select.POLLOUT, left)
            before = len(self._out)
            self.pump_out()
            if len(self._out) < before:
                until = time.monotonic() + timeout

    def finish(self, timeout: float) -> None:
        """Send what waits and that nothing follows, and wait until the peer hangs up; then close.

        A socket that is closed while something in it is unread resets the connection, which takes from the
        peer what that has not read yet. Gives up when the peer takes nothing, or does not hang up, for
        `timeout` seconds.
        """
        self.drain(timeout)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        until = time.monotonic() + timeout
        with contextlib.suppress(ChannelError):
            while self.open and (left := until - time.monotonic()) > 0:
                self._wait(select.POLLIN, left)
                self.pump_in()
        self.close()

    def close(self) -> None:
        """Hang up."""
        self.open = False
        self._out.clear()
        self._socket.close()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for something to read, or for room for what waits to be sent; None: as long as it takes."""
        self._wait(select.POLLIN | (select.POLLOUT if self.wants_write else 0), timeout)

    def _wait(self, events: int, timeout: float | None) -> None:
        """Wait for one of these events. (select() knows no descriptor above 1023.)"""
        poll = select.poll()
        poll.register(self, events)
        poll.poll(None if timeout is None else timeout * 1000)


def connect(addresses: Sequence[Address], key: bytes, timeout: float = HANDSHAKE_S) -> Connection:
    """Connect to the first of a server's addresses that answers and holds the key.

    Raises
    ------
    ChannelError
        None did so within `timeout` seconds; the text says for each one why.
    """
    until = time.monotonic() + timeout
    failures = []
    for place, address in enumerate(addresses):
        # An address that swallows packets must leave time for the others.
        share = (until - time.monotonic()) / (len(addresses) - place)
        try:
            return _connect_one(address, key, max(share, 0.01))
        except (OSError, ChannelError) as exc:
            failures.append(f"{address[0]}:{address[1]}: {exc}")
    raise ChannelError(f"no connection within {timeout:g} s ({'; '.join(failures)})")


def _connect_one(address: Address, key: bytes, timeout: float) -> Connection:
    until = time.monotonic() + timeout
    connection = Connection(socket.create_connection(address, timeout=timeout), Session(key, Role.CLIENT))
    connection.pump_out()
    try:
        while not connection.authenticated:
            left = until - time.monotonic()
            if left <= 0:
                raise ChannelError("the server did not answer in time")
            connection.wait(left)
            connection.pump_out()
            # Nobody has been told who this is, so that the server has nothing to say beyond the handshake.
            if connection.pump_in():
                raise ChannelError("the server spoke before it was asked")
    except BaseException:
        connection.close()
        raise
    return connection


def listen(host: str, backlog: int) -> socket.socket:
    """Return a non-blocking listening socket on a free port of `host`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((host, 0))
        listener.listen(backlog)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def new_key() -> bytes:
    """Return a fresh key."""
    return os.urandom(32)
