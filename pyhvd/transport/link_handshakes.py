"""Opens and accepts one rank's TCP connections to other hosts, all at once, within a time limit.

Owns the connections until their handshake has ended, and the choice among a peer's addresses. Each connection
has a role, which says what it will be used for. The handshake is a
:class:`~pyhvd.transport.tcp.session.Session` with two records behind the proofs:

    client -> server   role
    server -> client   WELCOME         only if the server expects this role

1. The key is fresh for each :func:`~pyhvd.transport.links.open_links`, so it stands for the process set. The
   client's record proves the role, because its HMAC covers the key, both nonces and the record.
2. Nothing is parsed before the peer has proved that it holds the key. All messages have a fixed size.
3. A client proves a role on one connection at a time. So if a server gets one role twice, the client has
   given up the first connection, and the second one counts.
4. Nothing follows WELCOME until all ranks have agreed that every connection is open. So no byte of the
   connection's later use is read here.
5. Peers that are silent, or not of this job, take none of the room or time of the others: at most
   ``_STRANGERS`` unproved connections more than expected are kept, the oldest is dropped for a new one, and
   nothing here blocks for longer than ``_REST_S``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import struct
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field

from pyhvd.transport.link_layout import LinkRole
from pyhvd.transport.tcp.connection import Address, Connection
from pyhvd.transport.tcp.session import ChannelError, Role as End, Session

_ROLE = struct.Struct("!BIII")
_WELCOME = b"welcome"
_STRANGERS = 64

# Names that only Linux has; the kernel probes an idle connection after 1 s, and gives it up 4 s later.
# Not TCP_USER_TIMEOUT: it also ends a connection whose receiver is alive, but late to read.
_TUNING = (
    (socket.IPPROTO_TCP, "TCP_KEEPIDLE", 1),
    (socket.IPPROTO_TCP, "TCP_KEEPINTVL", 1),
    (socket.IPPROTO_TCP, "TCP_KEEPCNT", 4),
    (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
)

# After an attempt to accept for which there were no descriptors, in seconds.
_REST_S = 0.01
_STAGGER_S = 0.25
"""Time after which the peer's next address is tried, too, if the one before has not answered, in seconds."""


@dataclass(slots=True, eq=False)
class _Dialling:
    """A connection to be opened: the peer's addresses, and the attempts that are under way."""

    role: LinkRole
    addresses: Sequence[Address]
    next_at: float = 0.0
    tries: Counter[Address] = field(default_factory=Counter)
    attempts: dict[Address, _Attempt] = field(default_factory=dict)
    failures: dict[Address, str] = field(default_factory=dict)
    claimed: bool = False

    def report(self) -> str:
        """Return each address with the reason why it did not serve."""
        return "; ".join(
            f"{_shown(address)}: {self.failures.get(address, 'no answer')}" for address in self.addresses
        )


@dataclass(slots=True, eq=False)
class _Attempt:
    """A socket in its handshake; without a connection while TCP connects, without a dial if accepted."""

    peer: socket.socket
    dial: _Dialling | None = None
    address: Address = ("", 0)
    connection: Connection | None = None


def _shown(address: Address) -> str:
    """Return an address as text."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(eq=False, repr=False)  # which would show the key
class Handshakes:
    """The connections that one rank opens and accepts.

    Parameters
    ----------
    key : bytes
        The secret of this set of connections.
    listeners : sequence of socket.socket
        Listening sockets that do not block; not owned.
    accepts : set of LinkRole
        The connections that peers open.
    dials : mapping
        The peer's addresses, by the role of each connection that this rank opens.

    Attributes
    ----------
    made : dict
        The authenticated sockets, by role; owned by the caller.
    """

    key: bytes
    listeners: Sequence[socket.socket]
    accepts: set[LinkRole]
    dials: InitVar[Mapping[LinkRole, Sequence[Address]]]
    made: dict[LinkRole, socket.socket] = field(default_factory=dict)
    _strangers: dict[_Attempt, None] = field(default_factory=dict)  # in the order of their arrival
    _waking: float = 0.0  # when a dial may try its next address
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def __post_init__(self, dials: Mapping[LinkRole, Sequence[Address]]) -> None:
        self._dials = {role: _Dialling(role, addresses) for role, addresses in dials.items()}
        for listener in self.listeners:
            self._selector.register(listener, selectors.EVENT_READ)

    def run(self, until: float) -> dict[LinkRole, str]:
        """Make all connections; return, for each that is missing at ``until``, the reason.

        ``until`` is a time of time.monotonic().
        """
        expected = len(self.accepts) + len(self._dials)
        while len(self.made) < expected and (now := time.monotonic()) < until:
            if now >= self._waking:
                self._waking = min([until, *(self._dial(dial, now) for dial in self._dials.values())])
            for key, _ in self._selector.select(max(self._waking - now, 0.0)):
                if key.data is None:
                    assert isinstance(key.fileobj, socket.socket)
                    self._accept(key.fileobj)
                elif key.data.peer.fileno() >= 0:  # no event before it has dropped it
                    self._advance(key.data)
        missing = dict.fromkeys(self.accepts - self.made.keys(), "no connection came")
        return missing | {role: dial.report() for role, dial in self._dials.items() if role not in self.made}

    def close(self) -> None:
        """Close all sockets but those that were made."""
        attempts = [attempt for dial in self._dials.values() for attempt in dial.attempts.values()]
        for attempt in [*attempts, *self._strangers]:
            self._drop(attempt)
        self._selector.close()

    def _dial(self, dial: _Dialling, now: float) -> float:
        """Try the peer's next address if it is time; return when to look again."""
        free = [address for address in dial.addresses if address not in dial.attempts]
        if dial.claimed or not free:
            return now + _STAGGER_S
        if now < dial.next_at:
            return dial.next_at
        dial.next_at = now + _STAGGER_S
        address = min(free, key=lambda each: dial.tries[each])
        dial.tries[address] += 1
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        try:
            peer = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError as exc:
            dial.failures[address] = str(exc)
            return dial.next_at
        attempt = dial.attempts[address] = _Attempt(peer, dial, address)
        self._selector.register(peer, selectors.EVENT_WRITE, attempt)
        error = peer.connect_ex(address)
        if error not in (0, errno.EINPROGRESS):
            self._drop(attempt, os.strerror(error))
        return dial.next_at

    def _accept(self, listener: socket.socket) -> None:
        """Accept one connection; drop the oldest that has not proved its role if there are too many."""
        most = 2 * len(self.accepts) + _STRANGERS
        try:
            peer, _ = listener.accept()
            attempt = _Attempt(peer, connection=self._connection(peer, End.SERVER))
            self._strangers[attempt] = None
            self._selector.register(peer, selectors.EVENT_READ, attempt)
        except BlockingIOError:
            return
        except OSError:  # no descriptors are left, or the peer has gone
            most = 0
        if len(self._strangers) > most:
            self._drop(next(iter(self._strangers)))
        elif not most:  # the listener stays ready: this thread would look at it without end
            time.sleep(_REST_S)

    def _connection(self, peer: socket.socket, end: End) -> Connection:
        for level, name, value in _TUNING:
            if (option := getattr(socket, name, None)) is not None:
                peer.setsockopt(level, option, value)
        return Connection(peer, Session(self.key, end))

    def _advance(self, attempt: _Attempt) -> None:
        """Do what the socket is ready for; drop it after an error."""
        messages: list[bytes] = []
        try:
            if attempt.connection is None:
                if error := attempt.peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    raise OSError(error, os.strerror(error))
                attempt.connection = self._connection(attempt.peer, End.CLIENT)
            else:
                messages = attempt.connection.pump_in()
                if not attempt.connection.open:
                    raise ChannelError("the peer closed the connection")
            attempt.connection.pump_out()
            if attempt.dial is None:
                role = self._serve(attempt.connection, messages)
            else:
                role = self._claim(attempt.dial, attempt, attempt.connection, messages)
        except (OSError, ChannelError) as exc:
            self._drop(attempt, (isinstance(exc, OSError) and exc.strerror) or str(exc))
            return
        if role is not None:
            self._keep(role, attempt)
        else:
            writes = selectors.EVENT_WRITE if attempt.connection.wants_write else 0
            self._selector.modify(attempt.peer, selectors.EVENT_READ | writes, attempt)

    def _serve(self, connection: Connection, messages: list[bytes]) -> LinkRole | None:
        """Return the role that an authenticated client has proved, once it has sent it."""
        if not messages:
            return None
        if len(messages) > 1 or len(messages[0]) != _ROLE.size:
            raise ChannelError("the peer sent something other than a role")
        role = LinkRole(*_ROLE.unpack(messages[0]))
        if role not in self.accepts:
            raise ChannelError("the peer sent a role that is not expected here")
        connection.send(_WELCOME)
        return role

    def _claim(
        self, dial: _Dialling, attempt: _Attempt, connection: Connection, messages: list[bytes]
    ) -> LinkRole | None:
        """Send the role on the first authenticated connection; return it once the server has welcomed it."""
        if connection.authenticated and not dial.claimed:
            for other in list(dial.attempts.values()):
                if other is not attempt:
                    self._drop(other, "another address was faster")
            dial.claimed = True
            connection.send(_ROLE.pack(*dial.role))
        if messages and messages != [_WELCOME]:
            raise ChannelError("the peer sent something other than a welcome")
        return dial.role if messages else None

    def _keep(self, role: LinkRole, attempt: _Attempt) -> None:
        """Take the socket out of the handshake."""
        self._forget(attempt)
        if older := self.made.pop(role, None):
            older.close()
        assert attempt.connection is not None
        self.made[role] = attempt.connection.detach()

    def _drop(self, attempt: _Attempt, why: str = "no answer") -> None:
        """Close the socket; try the next address at once, if one has not been tried."""
        self._forget(attempt)
        attempt.peer.close()
        if dial := attempt.dial:
            dial.claimed = dial.claimed and bool(dial.attempts)
            dial.failures[attempt.address] = why
            if any(not dial.tries[address] for address in dial.addresses):
                dial.next_at = self._waking = 0.0

    def _forget(self, attempt: _Attempt) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(attempt.peer)
        self._strangers.pop(attempt, None)
        if attempt.dial is not None:
            attempt.dial.attempts.pop(attempt.address, None)
