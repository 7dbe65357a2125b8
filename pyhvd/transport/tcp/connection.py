"""A session over a TCP socket that does not block once connected, and buffers a bounded number of bytes.

Owns sockets and deadlines; knows nothing of the messages' contents.
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
HANDSHAKE_S = 10.0
"""Time limit for a peer to prove that it holds the key, in seconds."""

# With more unsent bytes than this, sources of messages should pause.
_FULL = 1 << 22


class Connection:
    """One end of a connection; selectors accept it in place of its socket.

    Parameters
    ----------
    peer : socket.socket
        A connected socket; owned.
    session : Session
        In its initial state.

    Attributes
    ----------
    open : bool
        Whether the peer can still send; False after the end of the connection.
    heard : float
        Time of the last bytes from the peer (time.monotonic).
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
        """Return the socket's file descriptor, for selectors."""
        return self._socket.fileno()

    @property
    def authenticated(self) -> bool:
        """Whether the peer has proved that it holds the key."""
        return self._session.authenticated

    @property
    def wants_write(self) -> bool:
        """Whether there are unsent bytes."""
        return bool(self._out)

    @property
    def full(self) -> bool:
        """Whether there are so many unsent bytes that sources of messages should pause."""
        return len(self._out) > _FULL

    def send(self, payload: bytes) -> None:
        """Queue one message, and send without blocking; only reading notices a lost peer."""
        self._session.send(payload)
        self._out += self._session.take_outgoing()
        self.pump_out()

    def pump_out(self) -> None:
        """Send without blocking."""
        try:
            while self._out:
                sent = self._socket.send(memoryview(self._out)[:_CHUNK])
                del self._out[:sent]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._out.clear()

    def pump_in(self) -> list[bytes]:
        """Return the messages that have arrived; clear `open` at the end of the connection.

        Raises
        ------
        ChannelError
            The peer does not hold the key, broke the protocol, or was cut off inside a message: close.
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
        """Send all unsent bytes; give up after `timeout` s without progress."""
        until = time.monotonic() + timeout
        while self._out and (left := until - time.monotonic()) > 0:
            self._wait(select.POLLOUT, left)
            before = len(self._out)
            self.pump_out()
            if len(self._out) < before:
                until = time.monotonic() + timeout

    def finish(self, timeout: float) -> None:
        """Send all unsent bytes and the end of the stream, wait until the peer closes, then close.

        Closing a socket with unread bytes resets the connection: the peer would lose bytes that it has not
        read. Gives up after `timeout` s without progress of the peer.
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
        """Close the connection; drop unsent bytes."""
        self.open = False
        self._out.clear()
        self._socket.close()

    def detach(self) -> socket.socket:
        """Return the socket, which the caller owns now; it belongs to no connection any more."""
        return self._socket

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the socket is readable, or writable for unsent bytes; None waits without limit."""
        self._wait(select.POLLIN | (select.POLLOUT if self.wants_write else 0), timeout)

    def _wait(self, events: int, timeout: float | None) -> None:
        """Wait for one of these events; select() would refuse descriptors above 1023."""
        poll = select.poll()
        poll.register(self, events)
        poll.poll(None if timeout is None else timeout * 1000)


def connect(addresses: Sequence[Address], key: bytes, timeout: float = HANDSHAKE_S) -> Connection:
    """Return a connection to the first of a server's addresses that answers and holds the key.

    Raises
    ------
    ChannelError
        No address did so within `timeout` seconds; the text says why for each.
    """
    until = time.monotonic() + timeout
    failures = []
    for place, address in enumerate(addresses):
        # An address that drops packets must leave time for the others.
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
                raise ChannelError(f"the server did not answer within {timeout:g} s")
            connection.wait(left)
            connection.pump_out()
            # The server does not know this client yet, so it sends nothing but the handshake.
            if connection.pump_in():
                raise ChannelError("the server sent a message before the client's first")
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
    """Return a new random key."""
    return os.urandom(32)
