"""The driver's connections: authenticating peers, receiving from them, feeding them, noticing silence.

Owns the listening sockets and the connections. It decodes nothing until the sender has proved that it holds
the job's key. It does not know what a message means, nor what follows when a peer is lost.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pyhvd.job.messages import Beat, FromAgent, FromDriver, Member, decode_from_agent, encode
from pyhvd.job.spec import DRIVER_TIMEOUT
from pyhvd.transport.tcp.connection import HANDSHAKE_S, NO_DESCRIPTORS, Connection, Secret, listen
from pyhvd.transport.tcp.session import ChannelError, Role, Session

BEAT_S = 1.0
"""Between two beats of the driver, and of an agent."""
ELASTIC_BEAT_S = 0.5
"""Between two beats of an agent of an elastic job."""
DRIVER_SILENT_S = 20.0
"""After this long, an agent says that its driver is silent, and a driver that it stood still."""
# An agent that misses five beats is frozen, cut off, or without power.
# Those of elastic jobs beat twice as often.
SILENT_S = 5.0
ELASTIC_SILENT_S = 2.5
# After this long, a peer is unlikely to answer.
_LATE_S = 2.5
_TICK_S = 0.25
# How many unauthenticated connections may be open beside those of the job's own agents.
_STRANGERS = 64


@dataclass
class Standstill:
    """Notices that this process stood still: it was stopped, or had no core.

    Attributes
    ----------
    usual : float
        The most seconds between two looks of a process that does not stand still.
    at : float
        When it looked last (time.monotonic).
    """

    usual: float
    at: float = field(default_factory=time.monotonic)

    def look(self) -> float:
        """Return for how many seconds this process stood still since the last look; 0 if it did not."""
        before, self.at = self.at, time.monotonic()
        return self.at - before if self.at > before + self.usual else 0.0


@dataclass(eq=False)
class Peer:
    """A connected process: an agent after it has registered, with ranks after they have started.

    `feeds` yield messages to send as fast as the peer receives them, one feed after the other. The driver
    itself started the process of an `adopted` peer.
    """

    connection: Connection
    member: Member | None = None
    ranks: frozenset[int] = frozenset()
    feeds: deque[Iterator[FromDriver]] = field(default_factory=deque)
    events: int = selectors.EVENT_READ
    adopted: bool = False

    def take_next(self) -> FromDriver | None:
        """Return the next message of the feeds; None if there is none."""
        while self.feeds:
            if (message := next(self.feeds[0], None)) is not None:
                return message
            self.feeds.popleft()
        return None

    def send(self, message: FromDriver) -> None:
        """Send a message now; do nothing if the connection is closed."""
        if self.connection.open:
            self.connection.send(encode(message))


class OnLost(Protocol):
    """Called before an agent is disconnected; `waited`: it took `silent_s` to see the loss."""

    def __call__(self, peer: Peer, why: str, *, waited: bool) -> None: ...


@dataclass(eq=False)
class ConnectionServer:
    """Serves the connections of one job, in the thread that calls :meth:`turn`.

    It calls `on_message` with a peer and each of its messages, and `on_lost` before it disconnects an agent.
    A peer is silent only while this process looks at it: what has arrived is read first, and time in which
    the process stood still does not count.

    Attributes
    ----------
    gone : str
        Why a connection may end.
    patience : float
        The seconds after which agents end if they hear nothing; the beats say so.
    stood_still : float
        The seconds for which this process stood still before or in the last turn.
    peers : list of Peer
        The connected processes.
    silent_s : float
        An agent that is silent for this many seconds is lost.
    selector : selectors.BaseSelector
        Each turn calls the data of its ready keys, without arguments.
    """

    secret: Secret
    hosts: Sequence[str]
    size: int
    on_message: Callable[[Peer, FromAgent], None]
    on_lost: OnLost
    gone: str = "its agent is gone"
    patience: float = DRIVER_TIMEOUT.default
    stood_still: float = 0.0
    peers: list[Peer] = field(default_factory=list)
    silent_s: float = SILENT_S
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _next_beat: float = 0.0
    _standstill: Standstill = field(default_factory=lambda: Standstill(4 * _TICK_S))
    # No peer counts as silent from an earlier time.
    _silent_since: float = field(default_factory=time.monotonic)
    _resting: list[socket.socket] = field(default_factory=list)  # listeners, until the next beat

    def __post_init__(self) -> None:
        self._most_strangers = self.size + _STRANGERS
        self._listeners = [listen(host, self._most_strangers) for host in self.hosts]
        for listener in self._listeners:
            self._attend(listener)

    @property
    def ports(self) -> list[int]:
        """The port of each address."""
        return [listener.getsockname()[1] for listener in self._listeners]

    def turn(self) -> None:
        """Wait for events, at most one tick, and handle them."""
        for peer in self.peers:
            self._pump(peer)
        for key, _ in self.selector.select(_TICK_S):
            key.data()
        self.stood_still = self._standstill.look()
        now = self._standstill.at
        if self.stood_still:
            self._silent_since = now
        beat = now >= self._next_beat
        if beat:
            self._next_beat = now + BEAT_S
            while self._resting:
                self._attend(self._resting.pop())
        for peer in list(self.peers):
            if beat and peer.member is not None:
                peer.send(Beat(patience=self.patience))
            self._check(peer, now)

    def turns(self, seconds: float) -> Iterator[None]:
        """Take turns for so many seconds, without those in which this process stands still."""
        until = self._standstill.at + seconds
        while self._standstill.at < until:
            yield
            self.turn()
            until += self.stood_still

    def go_on(self) -> float:
        """Note that this process has stopped itself; return for how many seconds."""
        seconds = self._standstill.look()
        self._silent_since = self._standstill.at
        return seconds

    def adopt(self, connection: Connection) -> Peer:
        """Serve a connection to a process that the driver has started; return the peer.

        Such a peer may take long to authenticate itself. Its loss is always told.
        """
        peer = Peer(connection, adopted=True)
        self._add(peer)
        return peer

    def release(self, peer: Peer) -> None:
        """Serve a connection no longer, and leave it open."""
        self.selector.unregister(peer.connection)
        self.peers.remove(peer)

    def silence(self, peer: Peer) -> float:
        """Return for how many seconds a peer had said nothing at the end of the last turn."""
        return self._standstill.at - max(peer.connection.heard, self._silent_since)

    def hears(self, peer: Peer) -> bool:
        """Return whether a peer spoke recently; the agents of a lost host fall silent together."""
        return self.silence(peer) <= _LATE_S

    def close(self) -> None:
        """Close all connections and sockets."""
        for peer in self.peers:
            peer.connection.close()
        for listener in self._listeners:
            listener.close()
        self.selector.close()

    def _attend(self, listener: socket.socket) -> None:
        self.selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener))

    def _accept(self, listener: socket.socket) -> None:
        """Accept one connection; drop the oldest that has not proved the key if there are too many."""
        most = self._most_strangers
        try:
            sock, _ = listener.accept()
            self._add(Peer(Connection(sock, Session(self.secret.reveal(), Role.SERVER))))
        except OSError as exc:
            if exc.errno not in NO_DESCRIPTORS:
                return
            most = 0
        strangers = [peer for peer in self.peers if not (peer.connection.authenticated or peer.adopted)]
        if len(strangers) > most:
            self.drop(strangers[0], "did not authenticate itself before others came")
        elif not most:  # the listener stays ready: this thread would look at it without end
            self.selector.unregister(listener)
            self._resting.append(listener)

    def _add(self, peer: Peer) -> None:
        self.peers.append(peer)
        self.selector.register(peer.connection, selectors.EVENT_READ, lambda: self._hear(peer))

    def _pump(self, peer: Peer) -> None:
        connection = peer.connection
        while not connection.full and (message := peer.take_next()) is not None:
            peer.send(message)
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.wants_write else 0)
        if wanted != peer.events:
            peer.events = wanted
            self.selector.modify(connection, wanted, lambda: self._hear(peer))

    def _hear(self, peer: Peer) -> None:
        if peer not in self.peers:
            return  # an earlier event of this turn dropped it
        peer.connection.pump_out()
        try:
            for record in peer.connection.pump_in():
                self.on_message(peer, decode_from_agent(record))
        except ChannelError as exc:
            self.drop(peer, f"broke the connection: {exc}")
            return
        if not peer.connection.open:
            self.drop(peer, f"is lost: {self.gone}")

    def _check(self, peer: Peer, now: float) -> None:
        if not peer.connection.authenticated:
            if not peer.adopted and now > peer.connection.began + HANDSHAKE_S:
                self.drop(peer, "did not authenticate itself")
        elif peer.member is not None and self.silence(peer) > self.silent_s:
            why = "its host is frozen, cut off or without power"
            self.drop(peer, f"has been silent for {self.silent_s:g} s: {why}", waited=True)

    def drop(self, peer: Peer, why: str, *, waited: bool = False) -> None:
        """Disconnect a peer, and tell its loss."""
        if peer.member is not None or peer.adopted:
            self.on_lost(peer, why, waited=waited)
        self.selector.unregister(peer.connection)
        peer.connection.close()
        self.peers.remove(peer)
