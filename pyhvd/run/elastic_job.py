"""An elastic job: it starts ranks again when ranks or hosts fail, come or go.

1. :mod:`pyhvd.job.membership` decides which hosts have ranks, and when a generation of ranks begins and ends.
2. :mod:`pyhvd.job.generation_driver` serves one generation. The agents, which hold what ranks commit, stay
   from one to the next; so do those of hosts without ranks.
3. This module acts, in one thread, and tells the machine what happens. Where agents come from, and what the
   ranks run, says a subclass.
"""

from __future__ import annotations

import contextlib
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from pyhvd.common.text import list_hosts
from pyhvd.job.agent_command import AgentCommand, AgentProcess
from pyhvd.job.discovery import Failed, Found
from pyhvd.job.errors import LaunchError
from pyhvd.job.generation_driver import GenerationDriver, Outcome, StateLostError
from pyhvd.job.hosts_machine import Interrupted, RankError
from pyhvd.job.kept_agents import KeptAgents
from pyhvd.job.membership import (
    AskToLeave,
    EndAgent,
    EndGeneration,
    Finish,
    GiveUp,
    Membership,
    Say,
    StartAgent,
    StartGeneration,
)
from pyhvd.job.status_line import StatusLine, say
from pyhvd.run.drain_socket import DrainError, DrainSocket
from pyhvd.run.function_results import error_of, take_results
from pyhvd.run.many_hosts import signals
from pyhvd.transport.tcp.connection import Secret
from pyhvd.transport.tcp.session import ChannelError

_STOP_S = 5.0
# Between two looks at agents that start, while no rank runs.
_LOOK_S = 0.05


class _EndNow(Exception):
    """The ranks of the running generation shall end."""


class GaveUp(Exception):
    """The job is over, with this error."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


class _Starting:
    """An agent that is being started."""

    def __init__(self, words: Sequence[str], command: AgentProcess, until: float) -> None:
        self.words = words
        self.command = command
        self.until = until

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

    def take(self) -> list[Found | Failed]:
        """Return what was found since the last call."""


class ElasticJob(ABC):
    """One elastic job, in the thread that calls :meth:`serve`.

    Parameters
    ----------
    membership : Membership
        Decides.
    discovery : object or None
        Finds hosts, as :class:`~pyhvd.job.discovery.Discovery` does.
    status : StatusLine or None
        Shows how far the first start has come.
    start_timeout : float
        An agent must be up after so many seconds.

    Attributes
    ----------
    kept : KeptAgents
        The agents without ranks.
    status : StatusLine or None
        Shows how far the first start has come; None after it.
    commit : int
        The newest commit of which an agent has told.
    holders : set of str or None
        The hosts of the last generation whose agents are not lost; None if no generation has had ranks.
    last : GenerationDriver or None
        The last generation's, which is over.
    """

    def __init__(
        self,
        membership: Membership,
        discovery: Finds | None,
        status: StatusLine | None,
        start_timeout: float,
    ) -> None:
        self.kept = KeptAgents()
        self.status = status
        self.commit = 0
        self.holders: set[str] | None = None
        self.last: GenerationDriver | None = None
        self._membership = membership
        self._discovery = discovery
        self._start_timeout = start_timeout
        self._starting: dict[str, _Starting] = {}
        self._up: dict[str, Sequence[str]] = {}  # the commands of agents that are up, by host
        self._next: StartGeneration | None = None
        self._driver: GenerationDriver | None = None
        self._finished = False
        self._requests: DrainSocket | None = None
        with contextlib.suppress(OSError):  # without a private folder: hosts are drained by signals only
            self._requests = DrainSocket()

    @property
    def number(self) -> int:
        """The number of the last generation that was started; -1 before."""
        return self._membership.number

    # -- what a kind of hosts defines ------------------------------------------------------------------

    @abstractmethod
    def command(self, host: str) -> Sequence[str]:
        """Return the command that starts a host's agent."""

    def start_command(self, command: Sequence[str]) -> AgentProcess:
        """Start an agent; raise OSError if that is not possible."""
        return AgentCommand(command, Secret().reveal())

    def end_command(self, host: str, command: AgentProcess) -> None:  # noqa: ARG002
        """End the agent of a host that leaves the job."""
        command.end()
        command.close()

    @abstractmethod
    def explain(self, host: str, code: int, said: str) -> tuple[str, bool]:
        """Return why a host's command failed; see :data:`~pyhvd.job.hosts_driver.Explain`."""

    @abstractmethod
    def make_driver(self, begins: StartGeneration) -> GenerationDriver:
        """Return the driver of a generation, which calls :meth:`step`."""

    def signals(self, driver: GenerationDriver) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the driver gets this process's signals."""
        return signals(driver)

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
        """
        try:
            while not self._finished:
                self.step(time.monotonic())
                begins, self._next = self._next, None
                if begins is not None:
                    self._run(begins)
                elif not self._finished:
                    time.sleep(_LOOK_S)
        except GaveUp as exc:
            raise exc.error from None

    def close(self) -> None:
        """End all agents."""
        if self._requests is not None:
            self._requests.close()
        for starting in self._starting.values():
            starting.end()
        self.kept.close()

    def serve_function(self) -> list[Any]:
        """Do :meth:`serve` for ranks that run a function; return what the last ones returned.

        Raises
        ------
        RankFailedError
            Ranks fail again and again.
        """
        try:
            self.serve()
        except RankError as exc:
            error = error_of(exc)
            raise error from error.__cause__
        assert self.last is not None
        return take_results(self.last)

    # -- what happens ----------------------------------------------------------------------------------

    def step(self, now: float) -> None:
        """Tell the machine what has happened, and do what it decides."""
        self._look_at_discovery(now)
        self._look_at_agents(now)
        self.look_at_notices(now)
        if self._driver is not None:
            self._membership.committed(self._driver.commits, now)
        for action in self._membership.tick(now):
            if isinstance(action, StartGeneration):
                self._next = action
            elif isinstance(action, StartAgent):
                self._start_agent(action.host, now)
            elif isinstance(action, EndAgent):
                self._end_agent(action.host)
            elif isinstance(action, AskToLeave) and self._driver is not None:
                self._driver.ask_to_leave(action.number)
            elif isinstance(action, EndGeneration):
                raise _EndNow
            elif isinstance(action, GiveUp):
                raise GaveUp(action.error)
            elif isinstance(action, Finish):
                self._finished = True
            elif isinstance(action, Say):
                self.say(action.text)

    def _look_at_discovery(self, now: float) -> None:
        if self._discovery is None:
            return
        for found in self._discovery.take():
            if isinstance(found, Failed):
                self._membership.discovery_failed(found.why, now)
            else:
                self._membership.discover(found.hosts, now, found.problems)

    def _look_at_agents(self, now: float) -> None:
        for host, starting in list(self._starting.items()):
            if starting.is_up():
                del self._starting[host]
                self._up[host] = starting.words
                self.kept.keep(starting.words, starting.command)
                self._membership.agent_up(host, now)
            elif starting.has_failed(now):
                del self._starting[host]
                self._fail_agent(host, *starting.end(), now)
        for host, words in list(self._up.items()):
            if not self._has_ranks(host) and not self.kept.has(words):
                self._lose_agent(host, "its agent is gone", now)

    def look_at_notices(self, now: float) -> None:
        """Drain the hosts that will be taken away, as their agents or the user say."""
        if self._driver is not None:
            for host, why in self._driver.leaving.items():
                self._membership.drain(host, now, why)
            self._driver.leaving.clear()
        if self._requests is not None:
            self._requests.serve(lambda host: self._drain(host, now))
        for words, why in self.kept.take_leaving():
            for host in [host for host, known in self._up.items() if known == words]:
                self._membership.drain(host, now, why)

    def _drain(self, host: str, now: float) -> str:
        """Drain a host for the user; return what to answer."""
        if not self._membership.drain(host, now, "the user has asked for it"):
            known = list_hosts(self._membership.hosts)
            raise DrainError(f"host {host} is none of the job's hosts: {known}")
        return f"host {host} is drained: its ranks leave at their next commit or check"

    def _has_ranks(self, host: str) -> bool:
        return self._driver is not None and self._driver.serves(host)

    def _fail_agent(self, host: str, code: int, said: str, now: float) -> None:
        why, _ = self.explain(host, code, said)
        self._membership.agent_failed(host, why, now, random.random())

    def _lose_agent(self, host: str, why: str, now: float) -> None:
        self._forget(host)
        self._membership.agent_lost(host, why, now, random.random())

    def _forget(self, host: str) -> None:
        """Note that a host's agent is gone, and what it has held."""
        self._up.pop(host, None)
        if self.holders is not None:
            self.holders.discard(host)

    # -- what is decided -------------------------------------------------------------------------------

    def _start_agent(self, host: str, now: float) -> None:
        words = self.command(host)
        try:
            self._starting[host] = _Starting(words, self.start_command(words), now + self._start_timeout)
        except OSError as exc:
            self._membership.agent_failed(host, f"{words[0]} cannot be started: {exc}", now, 1.0)

    def _end_agent(self, host: str) -> None:
        self._forget(host)
        starting = self._starting.pop(host, None)
        command = self.kept.take(self.command(host)) if starting is None else None
        if starting is not None:
            starting.end()
        elif command is not None:
            self.end_command(host, command)

    def _run(self, begins: StartGeneration) -> None:
        """Run one generation to its end, and tell the machine how it ended."""
        driver = self._driver = self.make_driver(begins)
        failure: RankError | LaunchError | None = None
        try:
            with self.signals(driver):
                try:
                    driver.serve()
                except StateLostError as exc:
                    raise GaveUp(exc) from None
                except (RankError, LaunchError) as exc:
                    failure = exc
                except _EndNow:
                    driver.outcome = Outcome.LEFT
                driver.settle()
            driver.keep_agents()
        finally:
            self._driver = None
            driver.stop("the job is over", _STOP_S)
            driver.close()
            self.status = None
        self.last = driver
        done = failure is None and driver.outcome is Outcome.DONE
        self._report(driver, failure, done, time.monotonic())
        if driver.stopped_by and not done:
            raise GaveUp(Interrupted(driver.stopped_by, ""))

    def _report(self, driver: GenerationDriver, failure: Exception | None, done: bool, now: float) -> None:
        """Tell the machine how a generation ended."""
        if driver.began_from is not None and driver.began_from < self.commit:
            self.commit = driver.began_from
            self._membership.rolled_back(self.commit)
        self.commit = max([self.commit, *driver.commits.values()])
        self._membership.committed(driver.commits, now)
        for host, why in driver.refused.items():
            self._membership.agent_failed(host, why, now, random.random())
            self._end_agent(host)
        lost = dict(driver.lost)
        self.holders = None if driver.holders is None else driver.holders - set(lost)
        host = getattr(failure, "host", "")
        if failure is None:
            (self._membership.generation_done if done else self._membership.generation_left)(now)
        elif host in lost:
            self._up.pop(host, None)
            self._membership.host_failed(failure, host, lost.pop(host), now, random.random())
        else:
            self._membership.rank_failed(failure, host, now, random.random())
        for host, why in lost.items():
            self._lose_agent(host, why, now)

    def say(self, text: str) -> None:
        """Tell the user a line."""
        if self.status is not None:
            self.status.say(text)
        else:
            say(text)
