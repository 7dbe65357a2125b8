"""Agents between two jobs: a thread sends them the beats without which they would end.

Invariants
----------
1. An agent here has no rank. No thread but this one reads its connection or writes to it.
2. An agent that is taken has been heard in the last 5 s. A lost one is ended, and not given to a job.
3. Time in which this process stood still does not count: what has arrived is read before an agent is judged,
   and then for the time before it was read.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pyhvd.job.connections import BEAT_S, DRIVER_SILENT_S, SILENT_S, Standstill
from pyhvd.job.messages import Beat, decode_from_agent, encode
from pyhvd.transport.tcp.session import ChannelError

if TYPE_CHECKING:  # it takes agents from here
    from pyhvd.job.driver.agent_source import AgentProcess


class KeptAgents:
    """The agents that wait for a job, by the commands that started them; any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[tuple[Sequence[str], AgentProcess]] = []
        self._leaving: list[tuple[Sequence[str], str]] = []
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def keep(self, command: Sequence[str], agent: AgentProcess) -> None:
        """Keep an agent, which has said all about its last job; end it if this object is closed."""
        with self._lock:
            closed = self._closed.is_set()
            if not closed:
                self._waiting.append((command, agent))
                if self._thread is None:
                    self._thread = threading.Thread(target=self._beat, name="pyhvd.job.kept", daemon=True)
                    self._thread.start()
        if closed:
            _end([agent])

    def take(self, command: Sequence[str]) -> AgentProcess | None:
        """Return an agent that this command has started, and keep it no longer; None if there is none."""
        with self._lock:
            mine = [agent for known, agent in self._waiting if known == command]
            lost = [agent for agent in mine if not self._is_there(command, agent, SILENT_S)]
            taken = next((agent for agent in mine if agent not in lost), None)
            self._drop([*lost, *filter(None, [taken])])
        _end(lost)
        return taken

    def has(self, command: Sequence[str]) -> bool:
        """Return whether an agent that this command has started waits here."""
        with self._lock:
            return any(known == command for known, _ in self._waiting)

    def take_leaving(self) -> list[tuple[Sequence[str], str]]:
        """Return the commands of agents whose hosts will be taken away, each with why; it may come again."""
        with self._lock:
            leaving, self._leaving = self._leaving, []
        return leaving

    def close(self) -> None:
        """End all agents, and wait for their commands."""
        with self._lock:
            self._closed.set()
            agents = [agent for _, agent in self._waiting]
            self._waiting.clear()
        if self._thread is not None:
            self._thread.join()
        _end(agents)

    def _drop(self, agents: Sequence[AgentProcess]) -> None:
        self._waiting = [(command, agent) for command, agent in self._waiting if agent not in agents]

    def _beat(self) -> None:
        standstill = Standstill(2 * BEAT_S)
        while not self._closed.wait(BEAT_S):
            patience = math.inf if standstill.look() else DRIVER_SILENT_S
            with self._lock:
                lost = [each[1] for each in self._waiting if not self._is_there(*each, patience)]
                self._drop(lost)
            _end(lost)

    def _is_there(self, command: Sequence[str], agent: AgentProcess, patience: float) -> bool:
        """Send a beat, and return whether the agent has been heard in the last `patience` seconds."""
        connection, now = agent.connection, time.monotonic()
        try:
            connection.send(encode(Beat()))
            while records := connection.pump_in():  # the end of the channel may follow them
                messages = map(decode_from_agent, records)
                whys = [each.leaves for each in messages if isinstance(each, Beat) and each.leaves]
                self._leaving += [(command, why) for why in whys]
        except ChannelError:
            return False
        agent.listen()
        return connection.open and now <= connection.heard + patience


def _end(agents: Iterable[AgentProcess]) -> None:
    """End agents, all at the same time."""
    ending = list(agents)
    for agent in ending:
        agent.connection.close()
    for agent in ending:
        agent.end()
        agent.close()
