"""The driver's connections: who may speak, what they say, who is silent, and feeding them.

Owns: the listening sockets and the connections. Nothing that comes in is looked at before its sender has
proved that it holds the job's key. What is said, and what it means that somebody is gone, is not known here.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pyhvd.job.job_key import Secret
from pyhvd.job.messages import Beat, FromDriver, FromTask, decode_from_task, encode
from pyhvd.job.placement import Task
from pyhvd.transport.tcp.connection import HANDSHAKE_S, Connection, listen
from pyhvd.transport.tcp.session import ChannelError, Role, Session

_BEAT_S = 1.0
# A task that has missed as many beats is frozen, cut off, or without power.
SILENT_S = 5.0
# One that has missed as many will hardly answer.
_LATE_S = 2.5
_TICK_S = 0.25
# So many that have not shown who they are may hang on beside the job's own tasks.
_STRANGERS = 64


class _Readable(Protocol):
    def fileno(self) -> int: ...


@dataclass(eq=False)
class Peer:
    """Who has connected; a task once it has registered, a rank once it has started.

    Attributes
    ----------
    connection : Connection
        To it.
    task : Task or None
        What it said it is.
    rank : int
        -1 before the start.
    ended : bool
        Whether its rank has ended well.
    feed : iterator
        Messages that are sent as fast as the peer takes them.
    """

    connection: Connection
    task: Task | None = None
    rank: int = -1
    ended: bool = False
    feed: Iterator[FromDriver] = field(default_factory=lambda: iter(()))
    events: int = selectors.EVENT_READ

    def send(self, message: FromDriver) -> None:
        """Send a message now; nothing to who is gone."""
        if self.connection.open:
            self.connection.send(encode(message))


class ConnectionServer:
    """Serves the connections of one job, in the thread that calls :meth:`turn`.

    Parameters
    ----------
    secret : Secret
        The job's key.
    hosts : sequence of str
        Addresses to listen on.
    size : int
        How many tasks will come.
    on_message : callable
        Called with a peer and each message of it.
    on_lost : callable
        Called with a peer, why it is gone, and whether that took SILENT_S to see, before it is hung up on.
    """

    def __init__(
        self,
        secret: Secret,
        hosts: Sequence[str],
        size: int,
        on_message: Callable[[Peer, FromTask], None],
        on_lost: Callable[[Peer, str, bool], None],
    ) -> None:
        self.peers: list[Peer] = []
        self._secret = secret
        self._most_strangers = size + _STRANGERS
        self._on_message = on_message
        self._on_lost = on_lost
        self._selector = selectors.DefaultSelector()
        self._next_beat = 0.0
        self._patience = time.monotonic()  # silence counts from here at the earliest
        self._listeners: list[socket.socket] = []
        for host in hosts:
            self._listen(host)

    @property
    def ports(self) -> list[int]:
        """The port of each address."""
        return [listener.getsockname()[1] for listener in self._listeners]

    @property
    def selector(self) -> selectors.BaseSelector:
        """Whatever is registered here is called in each turn: the key's data, with nothing."""
        return self._selector

    def wake_for(self, source: _Readable) -> None:
        """Have turns end when something is readable that is no connection."""
        self._selector.register(source, selectors.EVENT_READ, lambda: None)

    def forget(self, source: _Readable) -> None:
        """Take back :meth:`wake_for`, if it has not been taken back before."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(source)

    def turn(self) -> None:
        """Wait for something, for a tick at most, and handle it."""
        before = time.monotonic()
        for peer in self.peers:
            self._pump(peer)
        for key, _ in self._selector.select(_TICK_S):
            key.data()
        now = time.monotonic()
        if now > before + 4 * _TICK_S:
            self._patience = now  # it was this process that stood still
        beat = now >= self._next_beat
        if beat:
            self._next_beat = now + _BEAT_S
        for peer in list(self.peers):
            if beat and peer.task is not None:
                peer.send(Beat())
            self._check(peer, now)

    def hears(self, peer: Peer) -> bool:
        """Whether a peer has spoken of late; the tasks of a host that is gone fall silent together."""
        return time.monotonic() <= max(peer.connection.heard, self._patience) + _LATE_S

    def close(self) -> None:
        """Hang up on everybody."""
        for peer in self.peers:
            peer.connection.close()
        for listener in self._listeners:
            listener.close()
        self._selector.close()

    def _listen(self, host: str) -> None:
        listener = listen(host, self._most_strangers)
        self._listeners.append(listener)
        self._selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener))

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        if sum(not peer.connection.authenticated for peer in self.peers) >= self._most_strangers:
            sock.close()
            return
        peer = Peer(Connection(sock, Session(self._secret.reveal(), Role.SERVER)))
        self.peers.append(peer)
        self._selector.register(peer.connection, selectors.EVENT_READ, lambda: self._hear(peer))

    def _pump(self, peer: Peer) -> None:
        connection = peer.connection
        while not connection.full and (message := next(peer.feed, None)) is not None:
            peer.send(message)
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.wants_write else 0)
        if wanted != peer.events:
            peer.events = wanted
            self._selector.modify(connection, wanted, lambda: self._hear(peer))

    def _hear(self, peer: Peer) -> None:
        if peer not in self.peers:
            return  # dropped by what came before it in this turn
        peer.connection.pump_out()
        try:
            for record in peer.connection.pump_in():
                self._on_message(peer, decode_from_task(record))
        except ChannelError as exc:
            self._drop(peer, f"broke off: {exc}")
            return
        if not peer.connection.open:
            self._drop(peer, "is lost: its Spark task is gone (Python worker, executor or host)")

    def _check(self, peer: Peer, now: float) -> None:
        if not peer.connection.authenticated:
            if now > peer.connection.began + HANDSHAKE_S:
                self._drop(peer, "did not show who it is")
        elif peer.task is not None and now > max(peer.connection.heard, self._patience) + SILENT_S:
            why = "its host is frozen, cut off or without power"
            self._drop(peer, f"has been silent for {SILENT_S:g} s: {why}", waited=True)

    def _drop(self, peer: Peer, why: str, waited: bool = False) -> None:
        if peer.task is not None:  # what becomes of a stranger is nobody's business
            self._on_lost(peer, why, waited)
        self._selector.unregister(peer.connection)
        peer.connection.close()
        self.peers.remove(peer)
