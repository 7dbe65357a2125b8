"""Where the agents of a set of ranks come from: by commands, one for each host, or from an earlier job.

A command's stdin and stdout are one socket, the channel, whose other end is the driver's.
"""

from __future__ import annotations

import contextlib
import os
import random
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pyhvd.job.connections import SILENT_S, ConnectionServer, Peer
from pyhvd.job.driver.generation_driver import AgentSource
from pyhvd.job.driver.kept_agents import KeptAgents
from pyhvd.job.machines.agent_pool import AgentPool
from pyhvd.job.machines.machine import HostTexts
from pyhvd.job.messages import Again, Facts, Hello, Member, Prepare, hello
from pyhvd.job.mpi.rendezvous import Rendezvous
from pyhvd.job.process.guardian import signal_group
from pyhvd.job.process.supervised import read_some
from pyhvd.job.spec import DIRECTORY, PYTHON, ElasticSpec, JobSpec, NameOf, flag_of
from pyhvd.transport.tcp.connection import Connection, Secret
from pyhvd.transport.tcp.session import ChannelError, Role, Session

SKIPPED = 1 << 16
"""The most bytes that a login shell may print before the agent starts."""
_LAST_WORDS = 4096
# The most reads at the end: a process that the command has started may go on writing.
_LAST_READS = 64
END_S = 0.5
"""After its channel has ended, a command usually has this long to end by itself."""


class AgentProcess(Protocol):
    """What started a host's agent: a command, or a task of Spark."""

    connection: Connection

    def fileno(self) -> int:
        """Return a descriptor that is readable when :meth:`listen` has something to read; -1 without one."""

    def listen(self) -> bool:
        """Read some of what it says besides the channel; return whether there was anything."""

    def end(self, patience: float = END_S) -> tuple[int, str]:
        """End it, also by force after `patience` seconds; return its exit code, and what it said."""

    def close(self) -> None:
        """Close the descriptor, after :meth:`end`."""


class AgentCommand:
    """A running command; it gets a session of its own, so that Ctrl-C does not reach it.

    Parameters
    ----------
    command : sequence of str
        The command line.
    key : bytes
        The job's key, which the agent reads from its stdin.

    Attributes
    ----------
    connection : Connection
        The driver's end of the channel.

    Raises
    ------
    OSError
        The command cannot be started.
    """

    def __init__(self, command: Sequence[str], key: bytes) -> None:
        self._words = b""
        self._errors, errors = os.pipe()
        os.set_blocking(self._errors, False)
        channel, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                list(command),
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=errors,
                start_new_session=True,
            )
        except OSError:
            os.close(self._errors)
            channel.close()
            raise
        finally:
            os.close(errors)
            theirs.close()
        with contextlib.suppress(OSError):  # a command that has ended already is noticed by reading
            channel.sendall(key.hex().encode() + b"\n")
        self.connection = Connection(channel, Session(key, Role.SERVER, skip=SKIPPED))

    def fileno(self) -> int:
        """Return a descriptor that is readable when :meth:`listen` has something to read."""
        return self._errors

    def listen(self) -> bool:
        """Read some of what the command wrote to its stderr; return whether there was anything."""
        data = read_some(self._errors) if self._errors >= 0 else b""
        self._words = (self._words + (data or b""))[-_LAST_WORDS:]
        return bool(data)

    def end(self, patience: float = END_S) -> tuple[int, str]:
        """End the command; return its exit code, and what it said.

        The command has `patience` seconds to end by itself after its channel has ended. The code is negative
        if a signal ended the command, also if this call sent it.
        """
        self.connection.close()
        try:
            code = self._process.wait(patience)
        except subprocess.TimeoutExpired:
            # All of its group: a shell does not pass the signal on.
            signal_group(self._process.pid, signal.SIGTERM)
            try:
                code = self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                signal_group(self._process.pid, signal.SIGKILL)
                code = self._process.wait()
        return code, self.said

    @property
    def said(self) -> str:
        """What the command wrote to its stderr, and to its stdout before the agent's first bytes."""
        for _ in range(_LAST_READS):
            if not self.listen():
                break
        printed = self.connection.skipped.decode(errors="replace").strip()
        words = self._words.decode(errors="replace").strip()
        return "\n".join(filter(None, [printed, words]))

    def close(self) -> None:
        """Close the descriptor, after :meth:`end`."""
        os.close(self._errors)
        self._errors = -1


@dataclass(frozen=True)
class HostSlots:
    """One host of a job: its name in messages, its number of ranks, and the command of its agent."""

    name: str
    slots: int
    command: Sequence[str]


@dataclass(frozen=True)
class Checked:
    """What all hosts must have, and how the ranks find each other.

    For the first three see :func:`problem`; `facts` are the launcher's.
    """

    directory: str
    script: str
    facts: Facts
    rendezvous: Rendezvous


Explain = Callable[[str, int, str], tuple[str, bool]]
"""Returns why a host's command failed, and whether that may pass, from its name, exit code and words."""


@dataclass(eq=False)
class HostAgent:
    """The agent of a host, and its connection, while it runs.

    Attributes
    ----------
    waking : bool
        Whether an earlier job has left it, and it has not spoken since.
    """

    number: int
    host: HostSlots
    command: AgentProcess | None = None
    peer: Peer | None = None
    waking: bool = False


@dataclass(eq=False)
class CommandSource(AgentSource):
    """Starts an agent on each host by a command, or takes one that an earlier job has left.

    Attributes
    ----------
    spec : JobSpec
        What the ranks run.
    hosts : sequence of HostSlots
        The hosts.
    find_checked : callable
        Returns what all hosts must have; called while the agents start.
    explain : callable
        See :data:`Explain`.
    kept : KeptAgents, optional
        Where agents are taken from, as far as they are there, and left.
    refused : dict of str to str
        The hosts on which ranks cannot run, and why.
    """

    spec: JobSpec
    hosts: Sequence[HostSlots]
    find_checked: Callable[[], Checked]
    explain: Explain
    kept: KeptAgents | None = None
    refused: dict[str, str] = field(default_factory=dict)
    _own: Hello = field(default_factory=hello)
    addresses = ()

    def __post_init__(self) -> None:
        names = [host.name for host in self.hosts]
        self.size = sum(host.slots for host in self.hosts)
        self.pool = AgentPool(names, starts=True)
        self.texts = HostTexts(self.size, names, self.spec.start_timeout, self.spec.name_of)
        self.secret = Secret()
        self._agents = [HostAgent(number, host) for number, host in enumerate(self.hosts)]

    def find_rendezvous(self) -> Rendezvous:
        """See :meth:`AgentSource.find_rendezvous`; look at what this host has, and others must have."""
        self._checked = self.find_checked()
        return self._checked.rendezvous

    def name_of(self, peer: Peer) -> str:
        """See :meth:`AgentSource.name_of`."""
        return self._agent_of(peer).host.name

    def _agent_of(self, peer: Peer) -> HostAgent:
        return next(agent for agent in self._agents if agent.peer is peer)

    def join(self, connections: ConnectionServer) -> None:
        """See :meth:`AgentSource.join`."""
        self._connections = connections

    def start(self, index: int) -> None:
        """See :meth:`AgentSource.start`."""
        agent = self._agents[index]
        words = agent.host.command
        kept = None if self.kept is None else self.kept.take(words)
        try:
            agent.command = command = kept or AgentCommand(words, self.secret.reveal())
        except OSError as exc:
            text = f"{words[0]} cannot be started: {exc}"
            self.pool.fail(index, text, time.monotonic(), 0.0, may_pass=False)
            return
        agent.waking = kept is not None
        agent.peer = self._connections.adopt(command.connection)
        if command.fileno() >= 0:
            self._connections.selector.register(command, selectors.EVENT_READ, lambda: self._listen(command))
        if agent.waking:
            agent.peer.send(Again())

    def greet(self, peer: Peer, greeting: Hello) -> None:
        """See :meth:`AgentSource.greet`."""
        agent = self._agent_of(peer)
        agent.waking = False
        self.pool.ahead[agent.number] = greeting.clock - time.time()
        if wrong := version_problem(self._own, greeting, self.spec.name_of):
            self._refuse(agent, wrong)
        else:
            peer.send(self._prepare(agent))

    def _prepare(self, agent: HostAgent) -> Prepare:
        """Return what an agent shall own, and look for."""
        checked, spec = self._checked, self.spec
        elastic = spec.elastic or ElasticSpec()
        return Prepare(
            *(agent.number, agent.host.slots, checked.directory, checked.script),
            function=spec.function,
            again=spec.function or spec.elastic is not None,
            elastic=spec.elastic is not None,
            preemption_command=elastic.preemption_command,
            store=elastic.store if agent.number == 0 else None,  # the host of rank 0
        )

    def admits(self, peer: Peer, member: Member) -> bool:
        """See :meth:`AgentSource.admits`."""
        agent = self._agent_of(peer)
        if (member.index, member.slots) != (agent.number, agent.host.slots) or member.facts is None:
            raise ChannelError("an agent registered as another than it is")
        checked = self._checked
        wrong = problem(checked.facts, member.facts, checked.directory, checked.script, self.spec.name_of)
        if wrong:
            self._refuse(agent, wrong)
        return not wrong

    def _refuse(self, agent: HostAgent, why: str) -> None:
        self.refused[agent.host.name] = why
        self.pool.refuse(agent.number, why, time.monotonic())

    def lose(self, peer: Peer, why: str, *, waited: bool, began: bool) -> list[str] | None:  # noqa: ARG002
        """See :meth:`AgentSource.lose`."""
        agent = self._agent_of(peer)
        if agent.waking:  # it was lost between two jobs: another is started in its place in the next turn
            self._end(agent, 0.0)
            agent.waking, agent.peer = False, None
            self.pool.start_again(agent.number)
            return None
        code, said = self._end(agent, 0.0 if waited else END_S)
        if not began:
            agent.peer = None
            if len(peer.connection.skipped) > SKIPPED:
                begins = repr(said[:80])
                said = f"{SKIPPED} bytes were printed instead of the agent's first; they begin: {begins}"
            text, may_pass = self.explain(agent.host.name, code, said)
            self.pool.fail(agent.number, text, time.monotonic(), random.random(), may_pass=may_pass)
        return said.splitlines()[-1:]

    def check(self) -> None:
        """Give up agents of an earlier job that do not answer."""
        for agent in self._agents:
            peer = agent.peer
            if agent.waking and peer is not None and self._connections.silence(peer) > SILENT_S:
                self._connections.drop(peer, "was lost between two jobs", waited=True)

    def keep_agents(self) -> None:
        """Leave the agents for a next job, after all ranks have ended."""
        assert self.kept is not None
        for agent in self._agents:
            peer, command = agent.peer, agent.command
            if peer is not None and command is not None and peer.connection.open:
                self._connections.release(peer)
                self._ignore(command)
                agent.peer = agent.command = None
                self.kept.keep(agent.host.command, command)

    def close(self) -> None:
        """See :meth:`AgentSource.close`."""
        running = [agent for agent in self._agents if agent.command is not None]
        for agent in running:
            assert agent.command is not None
            agent.command.connection.close()
        until = time.monotonic() + END_S
        for agent in running:
            self._end(agent, max(0.0, until - time.monotonic()))

    def _end(self, agent: HostAgent, patience: float) -> tuple[int, str]:
        """End an agent's command; return its exit code, and what it said."""
        command = agent.command
        assert command is not None
        ended = command.end(patience)
        self._ignore(command)
        command.close()
        agent.command = None
        return ended

    def _listen(self, command: AgentProcess) -> None:
        if not command.listen():
            self._ignore(command)

    def _ignore(self, command: AgentProcess) -> None:
        """Listen no more to what a command says besides its channel; it may have ended in this turn."""
        with contextlib.suppress(KeyError, ValueError):
            self._connections.selector.unregister(command)


def version_problem(own: Hello, other: Hello, name_of: NameOf = flag_of) -> str:
    """Return what is wrong with a host's software, and the remedy; empty if nothing is."""
    if own.pyhvd != other.pyhvd:
        return (
            f"it has pyhvd {other.pyhvd}, the launcher has {own.pyhvd}: install the same version there, with"
            f" pip install pyhvd=={own.pyhvd}"
        )
    if own.python.rpartition(".")[0] != other.python.rpartition(".")[0]:
        return (
            f"it has Python {other.python}, the launcher has {own.python}: give the path of the same Python"
            f" with {name_of(PYTHON)}"
        )
    return ""


def problem(own: Facts, other: Facts, directory: str, script: str, name_of: NameOf = flag_of) -> str:
    """Return what a host lacks, and the remedy; empty if it lacks nothing."""
    if not other.mpi:
        return other.mpi_name
    if other.mpi != own.mpi:
        return (
            f"mpi4py is built on {other.mpi_name} there, which is another MPI family than the launcher's"
            f" {own.mpi_name}: install the same MPI on all hosts"
        )
    if not other.has_directory:
        return (
            f"there is no directory {directory}, or it is closed to this user: make it there, share it, or"
            f" name another with {name_of(DIRECTORY)}"
        )
    if script and not other.script:
        return f"there is no script {script} in {directory}: copy it there, or share the directory"
    if script and other.script != own.script:
        return f"the script {script} in {directory} is another than the launcher's: copy it there again"
    return ""
