"""An elastic job: its ranks are started again when some fail, or when hosts come and go.

1. :mod:`pyhvd.job.machines.membership` decides which hosts take part, and when ranks are started.
2. :mod:`pyhvd.job.driver.generation_driver` serves each set of ranks. Between two of them the agents stay in
   :class:`~pyhvd.job.driver.kept_agents.KeptAgents`, with what ranks commit.
3. This module acts, in one thread, and tells the machine what happens. An :class:`AgentStarter` knows where
   agents come from.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import secrets
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pyhvd.common.text import list_hosts
from pyhvd.job.commits.resume_file import ResumeError, ResumeFile
from pyhvd.job.connections import Standstill
from pyhvd.job.driver.agent_source import AgentProcess, Checked, CommandSource, HostSlots
from pyhvd.job.driver.console import Console, StatusLine, Terminal, noting_signals, wake_by
from pyhvd.job.driver.drain_socket import DrainError, DrainSocket
from pyhvd.job.driver.generation_driver import CallListener, GenerationDriver
from pyhvd.job.driver.held_commits import HeldCommits, Outcome, StateLostError
from pyhvd.job.driver.kept_agents import KeptAgents
from pyhvd.job.driver.output import Output
from pyhvd.job.errors import Interrupted, LaunchError, RankError, Suspended
from pyhvd.job.machines.found_hosts import DiscoveryFailed, Found
from pyhvd.job.machines.machine import Say
from pyhvd.job.machines.membership import (
    AskToLeave,
    EndAgent,
    EndGeneration,
    Finish,
    GiveUp,
    Membership,
    StartAgent,
    StartGeneration,
    Suspend,
)
from pyhvd.job.machines.roster import Place
from pyhvd.job.messages import Leave
from pyhvd.job.mpi.rank_env import JOB
from pyhvd.job.network.network_choice import Wanted
from pyhvd.job.process.signals import ENDING
from pyhvd.job.rank.call import as_function_errors
from pyhvd.job.spec import JobSpec
from pyhvd.transport.tcp.session import ChannelError

_STOP_S = 5.0
# Between two looks at agents that start, while no rank runs.
_LOOK_S = 0.05
# This process stood still if it has not looked for so long.
_STILL_S = 2.0


class _EndNow(Exception):
    """The ranks of the running generation shall end."""


@dataclass(eq=False)
class _GaveUp(Exception):
    """The job is over, with this error."""

    error: Exception


@dataclass
class _Starting:
    """An agent that is being started."""

    words: Sequence[str]
    command: AgentProcess
    until: float

    def is_up(self) -> bool:
        """Return whether the agent has spoken, so that its side of the handshake is over too.

        What it said is dropped: it greets again before its first job.
        """
        connection = self.command.connection
        try:
            connection.pump_out()
            connection.pump_in()
        except ChannelError:
            connection.close()
            return False
        return connection.spoken

    def has_failed(self, now: float) -> bool:
        """Return whether it will not come up."""
        self.command.listen()
        return now > self.until or not self.command.connection.open

    def end(self) -> tuple[int, str]:
        """End it; return its exit code, and what it said."""
        ended = self.command.end()
        self.command.close()
        return ended


class Finds(Protocol):
    """Finds hosts, or fails to."""

    def take(self) -> list[Found | DiscoveryFailed]:
        """Return what was found since the last call."""


class AgentStarter(Protocol):
    """Starts and ends the agents of an elastic job, and knows what their hosts must have."""

    def command(self, host: str) -> Sequence[str]:
        """Return the command that starts a host's agent."""

    def start(self, command: Sequence[str]) -> AgentProcess:
        """Start an agent; raise OSError if that is not possible."""

    def end(self, host: str, agent: AgentProcess) -> None:  # noqa: ARG002
        """End the agent of a host that leaves the job."""
        agent.end()
        agent.close()

    def explain(self, host: str, code: int, said: str) -> tuple[str, bool]:
        """Return why a host's command failed; see :data:`~pyhvd.job.driver.agent_source.Explain`."""

    def prepare(self, places: Sequence[Place]) -> tuple[list[HostSlots], Checked, Wanted]:
        """Return the hosts of a generation, what they must have, and the network; may raise LaunchError."""

    def leaving(self) -> Mapping[str, str]:
        """Return the hosts that will be taken away, and why, as a cluster knows; they may come again."""
        return {}

    def lost(self) -> Mapping[str, str]:
        """Return the hosts that are lost, and why, as a cluster knows, each once."""
        return {}

    def why_over(self, number: int, now: float) -> Exception | None:  # noqa: ARG002
        """Return why the job cannot go on after this generation, as a cluster knows; None if it can."""
        return None

    def close(self) -> None:
        """Free what the agents needed, after they have ended."""


@dataclass(frozen=True)
class Generation:
    """One set of ranks that is being served, or was: its driver, its agents, and what their hosts hold."""

    driver: GenerationDriver
    source: CommandSource
    held: HeldCommits


@dataclass(eq=False)
class ElasticJob:
    """One elastic job, in the thread that calls :meth:`serve`.

    Attributes
    ----------
    spec : JobSpec
        What the ranks run.
    membership : Membership
        Decides.
    starter : AgentStarter
        Starts agents.
    discovery : object or None
        Finds hosts, as :class:`~pyhvd.job.driver.discovery.Discovery` does.
    output : Output
        Shows the ranks' output.
    say : callable
        Shows a line of the job's own.
    status : StatusLine, optional
        Shows how far the first start has come; None if a program has started this job, which then keeps its
        signals and stdin.
    resume : ResumeFile, optional
        Lets a later run of the job go on; SIGTERM to this process then suspends the job.
    listener : CallListener, optional
        Hears what ranks log.
    last : Generation or None
        The last generation, which is over.
    """

    spec: JobSpec
    membership: Membership
    starter: AgentStarter
    discovery: Finds | None
    output: Output
    say: Callable[[str], None]
    status: StatusLine | None = None
    resume: ResumeFile | None = None
    listener: CallListener | None = None
    last: Generation | None = None
    _kept: KeptAgents = field(default_factory=KeptAgents)  # without ranks
    _commit: int = 0  # the newest of which an agent has told
    _holders: set[str] | None = None  # of the last generation, but for those that are lost
    _starting: dict[str, _Starting] = field(default_factory=dict)
    _standstill: Standstill = field(default_factory=lambda: Standstill(_STILL_S))
    _up: dict[str, Sequence[str]] = field(default_factory=dict)  # the commands of agents that are up, by host
    _next: StartGeneration | None = None
    _running: Generation | None = None
    _finished: bool = False
    _signals: list[int] = field(default_factory=list)  # of which nobody has taken notice yet
    _shall_suspend: bool = False
    _wake: int = -1  # readable after each of them
    _requests: DrainSocket | None = None

    def __post_init__(self) -> None:
        self.spec = dataclasses.replace(self.spec, env={**self.spec.env, JOB: secrets.token_hex(3)})
        if self.resume is not None and self.resume.first:
            self._holders = set()  # the store may have a commit of an earlier run
        with contextlib.suppress(OSError):  # without a private folder: hosts are drained by signals only
            self._requests = DrainSocket()

    # -- its life --------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Run generations until the ranks of one have all returned.

        Raises
        ------
        LaunchError
            There are not enough hosts.
        RankError
            Ranks fail again and again.
        Interrupted
            A signal ended the job.
        Suspended
            The ranks have committed and left; a later run goes on.
        """
        noting = contextlib.nullcontext(-1) if self.status is None else noting_signals(self._note_signal)
        try:
            with noting as self._wake:
                self._serve()
        except _GaveUp as exc:
            raise exc.error from None

    def _note_signal(self, number: int) -> None:
        """Note a signal; the first SIGTERM suspends a job that can be resumed."""
        if number == signal.SIGTERM and self.resume is not None and not self._shall_suspend:
            self._shall_suspend = True
        else:
            self._signals.append(number)

    def _serve(self) -> None:
        while not self._finished:
            self._step(time.monotonic())
            begins, self._next = self._next, None
            if not self._finished:
                self._heed_signals()
            if begins is not None:
                self._run(begins)
            elif not self._finished:
                time.sleep(_LOOK_S)

    def _heed_signals(self) -> None:
        """Follow signals that came between two generations, when there were no ranks to pass them on to."""
        while self._signals:
            number = self._signals.pop(0)
            if number in ENDING:
                raise _GaveUp(Interrupted(number, ""))
            if number == signal.SIGTSTP:
                os.kill(os.getpid(), signal.SIGSTOP)

    def close(self) -> None:
        """End all agents."""
        if self._requests is not None:
            self._requests.close()
        for starting in self._starting.values():
            starting.end()
        self._kept.close()
        self.starter.close()

    def serve_function(self) -> list[Any]:
        """Do :meth:`serve` for ranks that run a function; return what the last ones returned.

        Raises
        ------
        RankFailedError
            Ranks fail again and again.
        """
        with as_function_errors():
            self.serve()
        assert self.last is not None
        return self.last.driver.take_results()

    # -- what happens ----------------------------------------------------------------------------------

    def _step(self, now: float) -> None:
        """Tell the machine what has happened, and do what it decides."""
        if (error := self.starter.why_over(self.membership.number, now)) is not None:
            raise _GaveUp(error)
        self._look_at_discovery(now)
        self._look_at_agents(now)
        self._look_at_notices()
        if self._shall_suspend:
            self.membership.suspend("the launcher got SIGTERM")
        if self._running is not None:
            self.membership.committed(self._running.held.commits, now)
        for action in self.membership.tick(now):
            if isinstance(action, StartGeneration):
                self._next = action
            elif isinstance(action, StartAgent):
                self._start_agent(action.host, now)
            elif isinstance(action, EndAgent):
                self._end_agent(action.host)
            elif isinstance(action, AskToLeave) and self._running is not None:
                self._running.driver.ask_to_leave(Leave(action.number, action.suspends))
            elif isinstance(action, EndGeneration):
                raise _EndNow
            elif isinstance(action, GiveUp):
                raise _GaveUp(action.error)
            elif isinstance(action, Finish):
                self._finished = True
            elif isinstance(action, Suspend):
                raise _GaveUp(self._suspended())
            elif isinstance(action, Say):
                self.say(action.text)

    def _suspended(self) -> Suspended:
        begin = f"commit {self._commit}" if self._commit else "the beginning"
        path = "" if self.resume is None else f" with --elastic-resume {self.resume.path}"
        return Suspended(f"pyhvd: the job is suspended: the next run{path} goes on from {begin}")

    def _look_at_discovery(self, now: float) -> None:
        if self.discovery is None:
            return
        for found in self.discovery.take():
            if isinstance(found, DiscoveryFailed):
                self.membership.discovery_failed(found.why, now)
            else:
                self.membership.discover(found.hosts, now, found.problems)

    def _look_at_agents(self, now: float) -> None:
        stood_still = self._standstill.look()
        for host, why in self.starter.lost().items():
            if self._running is not None:
                self._running.driver.lose_host(host, why)
        for host, starting in list(self._starting.items()):
            starting.until += stood_still
            if starting.is_up():
                del self._starting[host]
                self._up[host] = starting.words
                self._kept.keep(starting.words, starting.command)
                self.membership.agent_up(host, now)
            elif starting.has_failed(now):
                del self._starting[host]
                why, _ = self.starter.explain(host, *starting.end())
                self.membership.agent_lost(host, why, now, random.random())
        placed = [] if self._running is None else self._running.source.pool.names
        for host, words in list(self._up.items()):
            if host not in placed and not self._kept.has(words):
                self._lose_agent(host, "its agent is gone", now)

    def _look_at_notices(self) -> None:
        """Drain the hosts that will be taken away, as their agents, their cluster or the user say."""
        if self._running is not None:
            for host, why in self._running.held.leaving.items():
                self.membership.drain(host, why)
            self._running.held.leaving.clear()
        for host, why in self.starter.leaving().items():
            self.membership.drain(host, why)
        if self._requests is not None:
            self._requests.serve(self._drain)
        for words, why in self._kept.take_leaving():
            for host in [host for host, known in self._up.items() if known == words]:
                self.membership.drain(host, why)

    def _drain(self, host: str) -> str:
        """Drain a host for the user; return what to answer."""
        if not self.membership.drain(host, "the user has asked for it"):
            known = list_hosts(self.membership.hosts)
            raise DrainError(f"host {host} is none of the job's hosts: {known}")
        return f"host {host} is drained: its ranks leave at their next commit or check"

    def _lose_agent(self, host: str, why: str, now: float) -> None:
        self._forget(host)
        self.membership.agent_lost(host, why, now, random.random())

    def _forget(self, host: str) -> None:
        """Note that a host's agent is gone, and what it has held."""
        self._up.pop(host, None)
        if self._holders is not None:
            self._holders.discard(host)

    # -- what is decided -------------------------------------------------------------------------------

    def _start_agent(self, host: str, now: float) -> None:
        words = self.starter.command(host)
        try:
            agent = self.starter.start(words)
            self._starting[host] = _Starting(words, agent, now + self.spec.start_timeout)
        except OSError as exc:
            self.membership.agent_lost(host, f"{words[0]} cannot be started: {exc}", now, 1.0)

    def _end_agent(self, host: str) -> None:
        self._forget(host)
        starting = self._starting.pop(host, None)
        agent = self._kept.take(self.starter.command(host)) if starting is None else None
        if starting is not None:
            starting.end()
        elif agent is not None:
            self.starter.end(host, agent)

    def _make(self, begins: StartGeneration) -> Generation:
        hosts, checked, network = self.starter.prepare(begins.places)
        source = CommandSource(self.spec, hosts, lambda: checked, self.starter.explain, self._kept)
        held = HeldCommits(begins.number, self._commit, self._holders)
        terminal = None
        if self.status is not None:
            terminal = Terminal(self.status, reads=self.last is None, signals=self._signals)
        console = Console(self.say, self.say, terminal)
        driver = GenerationDriver(
            *(self.spec, source, self.output, console, network, held, self._step, self.listener)
        )
        if terminal is not None:
            wake_by(driver.selector, self._wake)
        return Generation(driver, source, held)

    def _run(self, begins: StartGeneration) -> None:
        """Run one generation to its end, and tell the machine how it ended."""
        if self.resume is not None:
            try:
                self.resume.note(begins.number)
            except ResumeError as exc:
                raise _GaveUp(LaunchError(str(exc))) from exc
        running = self._running = self._make(begins)
        driver, failure = running.driver, None
        try:
            failure = _serve_generation(running)
            driver.settle()
            running.source.keep_agents()
        finally:
            self._running = None
            driver.stop("the job is over", _STOP_S)
            driver.close()
        self.last = running
        done = failure is None and running.held.outcome is Outcome.DONE
        self._report(running, failure, time.monotonic(), done=done)
        if not done:  # the ranks may have left for another reason since they got the signal
            self._signals[:0] = filter(None, [driver.machine.stopped_by])
            self._heed_signals()

    def _report(self, over: Generation, failure: Exception | None, now: float, *, done: bool) -> None:
        """Tell the machine how a generation ended."""
        held = over.held
        if held.began_from is not None and held.began_from < self._commit:
            self._commit = held.began_from
            self.membership.rolled_back(self._commit)
        self._commit = max([self._commit, *held.commits.values()])
        self.membership.committed(held.commits, now)
        for host, why in over.source.refused.items():
            self.membership.agent_lost(host, why, now, random.random())
            self._end_agent(host)
        lost = dict(held.lost)
        self._holders = None if held.holders is None else held.holders - set(lost)
        host = getattr(failure, "host", "")
        if failure is None:
            self.membership.generation_over(now, done=done)
        elif isinstance(failure, RankError) and failure.parted and held.outcome is not Outcome.LEFT:
            self.membership.ranks_parted(failure, now)
        elif host in lost:
            self._up.pop(host, None)
            self.membership.host_failed(failure, host, lost.pop(host), now, random.random())
        else:
            self.membership.rank_failed(failure, host, now, random.random())
        for host, why in lost.items():
            self._lose_agent(host, why, now)


def _serve_generation(running: Generation) -> RankError | LaunchError | None:
    """Serve a generation; return why it failed, if it did."""
    try:
        running.driver.serve()
    except StateLostError as exc:
        raise _GaveUp(exc) from None
    except (RankError, LaunchError) as exc:
        return exc
    except _EndNow:
        running.held.outcome = Outcome.LEFT
    return None
