"""Messages between hosts over connections of pyhvd's own, and all others by another control transport.

Owns the frames on control connections: a length of 4 bytes, and a message. The background thread alone uses
these connections.

1. A rank has a control connection to each rank on another host that is beside it in the tree of messages.
   All messages between these two ranks use it, so they stay in order. All other messages use the inner
   transport.
2. Nothing blocks. Bytes that the socket does not take wait here until it does.
3. A length above ``MOST_BYTES`` ends the connection before anything is stored for it.
4. All connections are in one epoll set, on which the fast path sleeps. Its descriptor is readable when bytes
   have arrived, when a socket takes bytes that wait, and when a connection has ended.
5. A connection that ends is an error, unless the peer has said goodbye. Messages that came before the end are
   received first.
"""

from __future__ import annotations

import errno
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pyhvd.errors import TransportError
from pyhvd.transport.control import GOODBYE, ControlTransport, Message, Sending

MOST_BYTES = 1 << 28
"""Most bytes of one message; the requests for a million tensors have fewer."""
_LENGTH = struct.Struct("!I")
_PIECE = 1 << 18
_DRAIN_LOOK_S = 1e-3


class ControlConnection:
    """One end of a connection that carries messages.

    Parameters
    ----------
    rank : int
        The rank at the other end.
    peer : socket.socket
        Connected, and does not block; not owned.
    events : select.epoll
        The set of all connections; it reports what this one waits for.

    Attributes
    ----------
    failure : int or None
        The errno with which the connection has ended without a goodbye; 0: the peer closed it.
    """

    def __init__(self, rank: int, peer: socket.socket, events: select.epoll) -> None:
        self.rank = rank
        self.failure: int | None = None
        self._peer = peer
        self._events = events
        self._in = bytearray()
        self._out = bytearray()
        self._passed = 0  # bytes that have left `_out`
        self._is_full = False  # the socket; then `events` reports when it takes bytes again
        self._heard_goodbye = self._has_ended = False
        events.register(peer, select.EPOLLIN)

    def send(self, payload: bytes) -> int:
        """Send a message, or keep its bytes; it has left once :meth:`push` returns this number or more."""
        self._out += _LENGTH.pack(len(payload))
        self._out += payload
        end = self.written
        if not self._is_full:
            self.push()
        return end

    @property
    def written(self) -> int:
        """How many bytes have left, or wait."""
        return self._passed + len(self._out)

    def push(self) -> int:
        """Send what the socket takes; return how many bytes have left, ever. Bytes after the end are lost."""
        is_full = False
        if self._has_ended:
            self._drop(len(self._out))
        try:
            while self._out:
                with memoryview(self._out)[:_PIECE] as piece:
                    count = self._peer.send(piece)
                self._drop(count)
        except BlockingIOError:
            is_full = True
        except OSError:  # pull() reports the end, after the messages that came before it
            self._drop(len(self._out))
        if is_full != self._is_full:
            self._is_full = is_full
            self._events.modify(self._peer, select.EPOLLIN | (select.EPOLLOUT if is_full else 0))
        return self._passed

    def pull(self) -> list[Message]:
        """Return the messages that have arrived."""
        try:
            data = self._peer.recv(_PIECE)
        except BlockingIOError:
            return []
        except OSError as exc:
            return self._end(exc.errno or errno.EIO)
        if not data:
            return self._end(0)
        self._in += data
        arrived: list[Message] = []
        start = 0
        while len(self._in) >= start + _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._in, start)
            if length > MOST_BYTES:
                self._end(errno.EPROTO)
                break
            end = start + _LENGTH.size + length
            if len(self._in) < end:
                break
            arrived.append((self.rank, self._in[start + _LENGTH.size : end]))
            start = end
        del self._in[:start]
        self._heard_goodbye = self._heard_goodbye or (self.rank, GOODBYE) in arrived
        return arrived

    def _drop(self, count: int) -> None:
        del self._out[:count]
        self._passed += count

    def _end(self, number: int) -> list[Message]:
        """Note that the connection has ended; return no messages."""
        self._has_ended, self._is_full = True, False
        self._events.unregister(self._peer)
        if not self._heard_goodbye:
            self.failure = number
        return []


@dataclass(slots=True, eq=False)
class _LinkSending:
    """A message that has left once so many bytes have."""

    connection: ControlConnection
    end: int

    def gone(self) -> bool:
        """Return whether the socket has taken the message."""
        return self.connection.push() >= self.end


class LinkTransport:
    """Messages to ranks beside this one on other hosts, and an inner transport for all others.

    See :class:`pyhvd.transport.control.ControlTransport`.

    Parameters
    ----------
    inner : ControlTransport
        Its ``wait`` also ends when the descriptor of :meth:`fileno` is readable; owned.
    peers : mapping of int to socket.socket
        The control connections, by rank; they live longer than this object's use.
    error_of : callable
        ``error_of(rank, number)`` returns the exception for a connection that has failed with an errno, or 0.
    """

    def __init__(
        self,
        inner: ControlTransport,
        peers: Mapping[int, socket.socket],
        error_of: Callable[[int, int], Exception],
    ) -> None:
        self.rank, self.size, self.tree = inner.rank, inner.size, inner.tree
        self.wake = inner.wake
        self.wait = inner.wait
        self._inner = inner
        self._error_of = error_of
        self._events = select.epoll()
        self._connections = {
            peer.fileno(): ControlConnection(rank, peer, self._events) for rank, peer in peers.items()
        }
        self._by_rank = {each.rank: each for each in self._connections.values()}

    def fileno(self) -> int:
        """Return the descriptor that is readable when :meth:`receive` has something to do."""
        return self._events.fileno()

    def send(self, destination: int, payload: bytes) -> Sending:
        """Start sending a message; do not block."""
        if (connection := self._by_rank.get(destination)) is None:
            return self._inner.send(destination, payload)
        if len(payload) > MOST_BYTES:
            raise TransportError(
                f"a message to rank {destination} has {len(payload)} bytes, but at most {MOST_BYTES} can be"
                " sent: submit fewer tensors at once"
            )
        return _LinkSending(connection, connection.send(payload))

    def receive(self) -> list[Message]:
        """Return the messages that have arrived; send what waited.

        Raises
        ------
        Exception
            The one of ``error_of``: a connection has failed, and nothing has arrived.
        """
        arrived = self._inner.receive()
        while events := self._events.poll(0):
            for fd, event in events:
                if event & select.EPOLLOUT:
                    self._connections[fd].push()
                if event & ~select.EPOLLOUT:
                    arrived += self._connections[fd].pull()
            if arrived:
                return arrived
        for connection in self._by_rank.values():
            if not arrived and (number := connection.failure) is not None:
                connection.failure = None  # reported once: this rank may have more to receive
                raise self._error_of(connection.rank, number)
        return arrived

    def drain(self, timeout: float) -> bool:
        """Wait at most ``timeout`` s until all messages have been sent; return whether they have."""
        until = time.monotonic() + timeout
        waiting = [_LinkSending(each, each.written) for each in self._by_rank.values()]
        while waiting := [each for each in waiting if not each.gone()]:
            if time.monotonic() >= until:
                return False
            time.sleep(_DRAIN_LOOK_S)
        return self._inner.drain(until - time.monotonic())

    def close(self) -> None:
        """Free the transport's resources; collective."""
        self._events.close()
        self._inner.close()
