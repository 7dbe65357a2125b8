"""Agents that connect to the driver by themselves: each belongs to a task of Spark, or to an actor of Ray.

The driver looks at its sockets when :meth:`Arrivals.take` is called, in the thread that calls it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence

from pyhvd.job.driver.agent_source import END_S
from pyhvd.job.driver.discovery import INTERVAL_S
from pyhvd.job.machines.found_hosts import DiscoveryFailed, Found
from pyhvd.job.machines.member_host import FoundHost
from pyhvd.job.messages import Hello, Stop, decode_from_agent, encode
from pyhvd.transport.tcp.connection import HANDSHAKE_S, NO_DESCRIPTORS, Connection, Secret, listen
from pyhvd.transport.tcp.session import ChannelError, Role, Session

# Connections that have not authenticated themselves yet.
_MOST_STRANGERS = 64


class ArrivedAgent:
    """An agent that has connected, or that will; see :class:`~pyhvd.job.driver.agent_source.AgentProcess`.

    Parameters
    ----------
    connection : Connection
        The channel; authenticated. Before the agent has connected, nothing comes from it.

    Attributes
    ----------
    end_starter : callable
        Ends what has started the agent; :meth:`close` calls it.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.end_starter: Callable[[], object] = lambda: None

    def connect(self, connection: Connection) -> None:
        """Take the channel of an agent that was expected; close the channel if the agent was ended before."""
        if self.connection.open:
            self.connection.close()
            self.connection = connection
        else:
            connection.close()

    def fileno(self) -> int:
        """Return -1: what the agent writes to stderr is its starter's."""
        return -1

    def listen(self) -> bool:
        """Return False."""
        return False

    def end(self, patience: float = END_S) -> tuple[int, str]:  # noqa: ARG002
        """End the channel: the agent then ends by itself, and its starter with it."""
        self.connection.close()
        return 0, ""

    def stop(self, reason: str) -> None:
        """Do :meth:`end`, and tell the agent why."""
        self.connection.send(encode(Stop(reason)))
        self.connection.finish(END_S)

    def close(self) -> None:
        """End what has started the agent."""
        self.end_starter()


class Arrivals:
    """Finds the agents that have connected; in place of a :class:`~pyhvd.job.driver.discovery.Discovery`.

    Agents that are expected are not found: they belong to the caller of :meth:`expect`.

    Parameters
    ----------
    secret : Secret
        The job's key, which an agent must hold.
    addresses : sequence of str
        The addresses to listen on.
    describe : callable, optional
        Returns the host of an agent from the number that it was given and its address; None if all agents
        are expected.
    """

    def __init__(
        self,
        secret: Secret,
        addresses: Sequence[str],
        describe: Callable[[int, str], FoundHost] | None = None,
    ) -> None:
        self._secret = secret
        self._listeners = [listen(address, _MOST_STRANGERS) for address in addresses]
        self._strangers: list[tuple[Connection, str]] = []
        self._describe = describe
        self._expected: dict[int, tuple[ArrivedAgent, socket.socket]] = {}
        self._known: dict[str, tuple[FoundHost, Connection, int]] = {}
        self._next = 0.0

    @property
    def ports(self) -> list[int]:
        """The port of each address."""
        return [listener.getsockname()[1] for listener in self._listeners]

    @property
    def numbers(self) -> dict[str, int]:
        """The numbers of the agents that were found last, by the names of their hosts."""
        return {name: number for name, (_, _, number) in self._known.items()}

    def take(self) -> list[Found | DiscoveryFailed]:
        """Return the hosts whose agents are connected, once a second, and whenever there are others."""
        changed = self._know_strangers()  # before others come in their place
        for listener in self._listeners:
            self._accept(listener)
        changed |= self._know_strangers()
        gone = [name for name, (_, connection, _) in self._known.items() if not connection.open]
        for name in gone:
            del self._known[name]
        now = time.monotonic()
        if not self._known or not (changed or gone or now >= self._next):
            return []
        self._next = now + INTERVAL_S
        return [Found(tuple(host for host, _, _ in self._known.values()), ())]

    def agent(self, name: str) -> ArrivedAgent:
        """Return a host's agent, which the caller must close; raise OSError if it is gone."""
        if name not in self._known:
            raise OSError("it has ended")
        return ArrivedAgent(self._known[name][1])

    def expect(self, number: int) -> ArrivedAgent:
        """Return the agent that will connect with this number; :meth:`take` gives it its connection."""
        ours, other = socket.socketpair()
        agent = ArrivedAgent(Connection(ours, Session(self._secret.reveal(), Role.SERVER)))
        self._expected[number] = agent, other
        return agent

    def dismiss(self) -> None:
        """End all agents, also those that have connected since."""
        self.take()
        self._close_channels()

    def close(self) -> None:
        """Close the sockets, and the connections that nobody has asked for."""
        for listener in self._listeners:
            listener.close()
        for connection, _ in self._strangers:
            connection.close()
        for _, other in self._expected.values():
            other.close()
        self._close_channels()

    def _close_channels(self) -> None:
        for _, connection, _ in self._known.values():
            connection.close()

    def _accept(self, listener: socket.socket) -> None:
        """Accept connections; drop the oldest that have not proved the key if there are too many."""
        for _ in range(_MOST_STRANGERS):
            most = _MOST_STRANGERS
            try:
                peer, (address, *_) = listener.accept()
                connection = Connection(peer, Session(self._secret.reveal(), Role.SERVER))
                self._strangers.append((connection, address))
            except OSError as exc:
                if exc.errno not in NO_DESCRIPTORS or not self._strangers:
                    return
                most = 0
            silent = [each for each in self._strangers if not each[0].authenticated]
            if len(silent) > most:
                silent[0][0].close()
                self._strangers.remove(silent[0])
            elif not most:
                return

    def _know_strangers(self) -> bool:
        """Note those who hold the key and have greeted; return whether there is a new one."""
        new = False
        for stranger in list(self._strangers):
            connection, address = stranger
            greeting = None
            try:
                connection.pump_out()
                for record in connection.pump_in()[:1]:  # it comes again with the first job
                    greeting = decode_from_agent(record)
            except ChannelError:
                connection.close()
            late = time.monotonic() > connection.began + HANDSHAKE_S
            if connection.open and not connection.spoken and not late:
                continue
            self._strangers.remove(stranger)
            if connection.open and isinstance(greeting, Hello):
                new |= self._know(greeting.task, connection, address)
            else:
                connection.close()
        return new

    def _know(self, number: int, connection: Connection, address: str) -> bool:
        """Take in an agent that has greeted; return whether its host is new."""
        if number in self._expected:
            agent, other = self._expected.pop(number)
            other.close()
            agent.connect(connection)
            return False
        if self._describe is None:
            connection.close()
            return False
        host = self._describe(number, address)
        self._known[host.name] = host, connection, number
        return True
