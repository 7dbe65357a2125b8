"""A session over a stream socket that does not block once connected, and buffers a bounded number of bytes.

The socket is one of TCP, or one end of a socket pair whose other end is the stdin and stdout of a command.
That command has two pipes in place of a socket, if sshd made them.

Owns sockets and deadlines; knows nothing of the messages' contents.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from pyhvd.transport.tcp.pipes import PipePair
from pyhvd.transport.tcp.session import ChannelError, Role, Session

Address = tuple[str, int]

_CHUNK = 1 << 18
HANDSHAKE_S = 10.0
"""Time limit for a peer to prove that it holds the key, in seconds."""

NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors of accept() for want of something in this process or on its host."""
# Between two attempts to connect.
_AGAIN_S = 0.2
# poll() takes no times of months; who waits for longer looks at the time again.
_LONGEST_WAIT_S = 1e6
# With more unsent bytes than this, sources of messages should pause.
_FULL = 1 << 22


class Connection:
    """One end of a connection; selectors accept it in place of its socket.

    Parameters
    ----------
    peer : socket.socket or PipePair
        A connected socket, or two pipes; owned.
    session : Session
        In its initial state.

    Attributes
    ----------
    open : bool
        Whether the peer can still send; False after the end of the connection.
    heard : float
        Time of the last bytes from the peer (time.monotonic).
    spoken : bool
        Whether a message of the peer has arrived.
    """

    def __init__(self, peer: socket.socket | PipePair, session: Session) -> None:
        peer.setblocking(False)
        if not isinstance(peer, PipePair):
            with contextlib.suppress(OSError):
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = peer
        self._session = session
        self.open = True
        self.heard = time.monotonic()
        self.began = self.heard
        self.spoken = False

    def fileno(self) -> int:
        """Return the socket's file descriptor, for selectors."""
        return self._socket.fileno()

    @property
    def authenticated(self) -> bool:
        """Whether the peer has proved that it holds the key."""
        return self._session.authenticated

    @property
    def skipped(self) -> bytes:
        """What arrived before the peer's first bytes of the protocol; see :class:`Session`."""
        return self._session.skipped

    @property
    def wants_write(self) -> bool:
        """Whether there are unsent bytes."""
        return bool(self._session.outgoing)

    @property
    def full(self) -> bool:
        """Whether there are so many unsent bytes that sources of messages should pause."""
        return len(self._session.outgoing) > _FULL

    def send(self, payload: bytes) -> None:
        """Queue one message, and send without blocking; only reading notices a lost peer."""
        self._session.send(payload)
        self.pump_out()

    def pump_out(self) -> None:
        """Send without blocking."""
        out = self._session.outgoing
        try:
            while out:
                with memoryview(out)[:_CHUNK] as piece:  # released also where an error keeps a reference
                    sent = self._socket.send(piece)
                del out[:sent]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            out.clear()

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
        self.spoken = self.spoken or bool(messages)
        self.pump_out()
        return messages

    def drain(self, timeout: float) -> None:
        """Send all unsent bytes; give up after `timeout` s without progress."""
        until = time.monotonic() + timeout
        while self._session.outgoing and (left := until - time.monotonic()) > 0:
            self._wait(select.POLLOUT, left)
            before = len(self._session.outgoing)
            self.pump_out()
            if len(self._session.outgoing) < before:
                until = time.monotonic() + timeout

    def shake_hands(self, timeout: float) -> None:
        """Wait until the peer has proved that it holds the key, as a client whose first message is not sent.

        Raises
        ------
        ChannelError
            The peer does not hold the key, is gone, or did not answer within `timeout` seconds.
        """
        until = time.monotonic() + timeout
        self.pump_out()
        while not self.authenticated:
            left = until - time.monotonic()
            if left <= 0:
                raise ChannelError(f"the server did not answer within {timeout:g} s")
            self.wait(left)
            self.pump_out()
            # A server sends messages only after the client's proof, which it cannot have answered yet.
            if self.pump_in():
                raise ChannelError("the server sent a message before the client's first")

    def finish(self, timeout: float) -> None:
        """Send all unsent bytes and the end of the stream, wait until the peer closes, then close.

        Closing a socket with unread bytes resets the connection: the peer would lose bytes that it has not
        read. Pipes lose none, and an ssh whose stdin is its stdout shows the end of a command's output only
        after the command has exited. Gives up after `timeout` s without progress of the peer.
        """
        self.drain(timeout)
        if isinstance(self._socket, PipePair):
            self.close()
            return
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
        self._session.outgoing.clear()
        self._socket.close()

    def detach(self) -> socket.socket:
        """Return the socket, which the caller owns now; it belongs to no connection any more."""
        assert not isinstance(self._socket, PipePair)
        return self._socket

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the socket is readable, or writable for unsent bytes; None waits without limit."""
        self._wait(select.POLLIN | (select.POLLOUT if self.wants_write else 0), timeout)

    def _wait(self, events: int, timeout: float | None) -> None:
        """Wait for one of these events; select() would refuse descriptors above 1023."""
        poll = select.poll()
        if isinstance(self._socket, PipePair) and events & select.POLLOUT:
            poll.register(self._socket.writer, select.POLLOUT)
            events &= ~select.POLLOUT
        if events:
            poll.register(self, events)
        poll.poll(None if timeout is None else min(timeout, _LONGEST_WAIT_S) * 1000)


def connect(addresses: Sequence[Address], key: bytes, timeout: float = HANDSHAKE_S) -> Connection:
    """Return a connection to the first of a server's addresses that answers and holds the key.

    Try again after an error: the server drops connections while strangers keep it busy.

    Raises
    ------
    ChannelError
        No address did so within `timeout` seconds; the text has the errors of all attempts, by address: the
        last attempt may have had too little time to meet the cause.
    """
    until = time.monotonic() + timeout
    failures: dict[str, list[str]] = {}
    while True:
        for place, address in enumerate(addresses):
            # An address that drops packets must leave time for the others.
            share = (until - time.monotonic()) / (len(addresses) - place)
            try:
                return connect_once(address, key, max(share, 0.01))
            except (OSError, ChannelError) as exc:
                met = failures.setdefault(f"{address[0]}:{address[1]}", [])
                if str(exc) not in met:
                    met.append(str(exc))
        if time.monotonic() + _AGAIN_S >= until:
            whys = "; ".join(f"{name}: {', then '.join(met)}" for name, met in failures.items())
            raise ChannelError(f"no connection within {timeout:g} s ({whys})")
        time.sleep(_AGAIN_S)


def connect_once(address: Address, key: bytes, timeout: float) -> Connection:
    """Return a connection to a server that answers at this address and holds the key.

    Raises
    ------
    OSError
        TCP does not connect within `timeout` seconds.
    ChannelError
        The peer does not prove the key within `timeout` seconds.
    """
    until = time.monotonic() + timeout
    connection = Connection(socket.create_connection(address, timeout=timeout), Session(key, Role.CLIENT))
    try:
        connection.shake_hands(until - time.monotonic())
    except BaseException:
        connection.close()
        raise
    return connection


def listen(host: str, backlog: int, ports: Sequence[int] = (0,)) -> socket.socket:
    """Return a non-blocking listening socket on a free port of `host`: on one of `ports`; 0 is any."""
    first = random.randrange(len(ports))  # processes that look at the same time rarely try the same
    *others, last = [*ports[first:], *ports[:first]]
    for port in others:
        with contextlib.suppress(OSError):
            return _listen_on(host, port, backlog)
    return _listen_on(host, last, backlog)


def _listen_on(host: str, port: int, backlog: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if port:  # connections of an earlier job may linger there
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(backlog)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def new_key() -> bytes:
    """Return a new random key."""
    return os.urandom(32)


@dataclass(frozen=True, eq=False, repr=False)
class Secret:
    """A key, a new one by default, that neither repr, nor str, nor an error's text shows.

    In Spark it travels to the tasks inside the closure that Spark sends them. On many hosts it is the first
    line of each agent's stdin.
    """

    _key: bytes = field(default_factory=new_key)

    def reveal(self) -> bytes:
        """Return the key."""
        return self._key
