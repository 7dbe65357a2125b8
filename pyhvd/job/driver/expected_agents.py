"""Agents that something else starts for each host, such as an actor of Ray, and that connect by themselves.

1. :func:`living_ranks` starts ranks that live on, when the agents of all hosts have connected.
2. :class:`ExpectedHosts` starts the agents of an elastic job; :func:`run_elastic_call` is a job of one call.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from pyhvd.job.driver.agent_source import Checked, CommandSource, HostSlots
from pyhvd.job.driver.arrivals import Arrivals, ArrivedAgent
from pyhvd.job.driver.console import Console, log_warning
from pyhvd.job.driver.discovery import CallDiscovery
from pyhvd.job.driver.elastic_job import AgentStarter, ElasticJob
from pyhvd.job.driver.generation_driver import GenerationDriver
from pyhvd.job.driver.kept_agents import KeptAgents
from pyhvd.job.driver.living_ranks import LivingRanks
from pyhvd.job.driver.logged_values import Callbacks, LoggedValues
from pyhvd.job.driver.output import Output
from pyhvd.job.errors import LaunchError, StartTimeoutError
from pyhvd.job.machines.found_hosts import DiscoveryFailed, Found
from pyhvd.job.machines.membership import Membership
from pyhvd.job.machines.roster import ElasticLimits, Place
from pyhvd.job.messages import Facts
from pyhvd.job.mpi.rank_env import MPICH
from pyhvd.job.mpi.rendezvous import PmiRendezvous
from pyhvd.job.network.network_choice import Wanted
from pyhvd.job.network.network_plans import parse_wishes
from pyhvd.job.spec import JobSpec, argument_of
from pyhvd.transport.tcp.connection import Address, Secret

_log = logging.getLogger("pyhvd")
_LOOK_S = 0.01


@dataclass(frozen=True)
class AgentOrder:
    """What starts one agent must know.

    Attributes
    ----------
    host, slots : str, int
        The agent's host, and the most ranks there.
    addresses, secret, number
        See :func:`pyhvd.job.agent.arriving_agent.start_agent`.
    on_end : callable
        To be called, in any thread, with the reason when what has started the agent has ended.
    """

    host: str
    slots: int
    addresses: Sequence[Address]
    secret: Secret
    number: int
    on_end: Callable[[str], object]


StartAgent = Callable[[AgentOrder], Callable[[], object]]
"""Lets something start an agent; returns what ends that. It raises OSError if that is not possible."""


class ExpectedAgents:
    """Starts agents, and lets them connect to this process.

    Parameters
    ----------
    start : StartAgent
        Starts one.
    addresses : sequence of str
        Where this process listens.
    seconds : float
        The time limit for an agent to connect.
    remedy : str
        What the user may do if agents have not connected.
    nics : sequence of str
        The networks between the hosts, as the user wishes; empty for any.

    Attributes
    ----------
    late : str
        Ends an error about agents that have not connected.
    network : Wanted
        The networks between the hosts.
    """

    def __init__(
        self,
        start: StartAgent,
        addresses: Sequence[str],
        seconds: float,
        remedy: str,
        nics: Sequence[str] = (),
    ) -> None:
        self.late = f"within {seconds:g} s: {remedy}"
        self.network = Wanted(parse_wishes(nics), name_of=argument_of)
        self._start = start
        self._seconds = seconds
        self._secret = Secret()
        self._arrivals = Arrivals(self._secret, addresses)
        self._addresses = list(zip(addresses, self._arrivals.ports, strict=True))
        self._numbers = itertools.count()
        self._ended: queue.SimpleQueue[tuple[str, ArrivedAgent, str]] = queue.SimpleQueue()

    def start(self, host: str, slots: int) -> ArrivedAgent:
        """Start the agent of a host; :meth:`look` lets it connect."""
        number = next(self._numbers)
        agent = self._arrivals.expect(number)
        order = AgentOrder(
            *(host, slots, self._addresses, self._secret, number),
            on_end=lambda why: self._ended.put((host, agent, why)),
        )
        try:
            agent.end_starter = self._start(order)
        except BaseException:
            agent.end()
            raise
        return agent

    def look(self) -> None:
        """Let agents connect."""
        self._arrivals.take()

    def take_lost(self) -> dict[str, str]:
        """Return the hosts lost since the last call, and why; give up agents that have not connected."""
        lost = {}
        while not self._ended.empty():
            host, agent, why = self._ended.get()
            if agent.connection.open:  # else this process has ended it
                lost[host] = why
                if not agent.connection.spoken:
                    agent.connection.close()
        return lost

    def gather(self, slots: Mapping[str, int], kept: KeptAgents) -> None:
        """Start the agents of all hosts; leave them in `kept` when all have connected.

        Raises
        ------
        LaunchError
            What shall start an agent has ended, or an agent did not connect in time.
        """
        agents = {host: self.start(host, number) for host, number in slots.items()}
        until = time.monotonic() + self._seconds
        while late := [host for host, agent in agents.items() if not agent.connection.spoken]:
            self.look()
            for host, why in self.take_lost().items():
                raise LaunchError(f"the agent of host {host} could not be started: {why}")
            if time.monotonic() > until:
                missing = [list(agents).index(host) for host in late]
                raise StartTimeoutError(f"no agent has connected from {', '.join(late)} {self.late}", missing)
            time.sleep(_LOOK_S)
        for host, agent in agents.items():
            kept.keep([host], agent)

    def close(self) -> None:
        """Listen no more; agents that have connected stay."""
        self._arrivals.close()


def mpich_checked(directory: str) -> Checked:
    """Return what hosts must have whose ranks form one world of MPICH, and run in this directory."""
    return Checked(directory, "", Facts(MPICH, "MPICH", True, ""), PmiRendezvous())


@contextlib.contextmanager
def living_ranks(
    agents: ExpectedAgents,
    slots: Mapping[str, int],
    spec: JobSpec,
    directory: str,
) -> Iterator[LivingRanks]:
    """Yield ranks that live until the end of the context; see :class:`LivingRanks`.

    Parameters
    ----------
    agents : ExpectedAgents
        Starts the agents.
    slots : mapping of str to int
        The number of ranks of each host.
    spec, directory
        What the ranks run, and where.
    """

    def explain(*_: object) -> tuple[str, bool]:
        return "its agent has ended", False

    with contextlib.closing(KeptAgents()) as kept, Output() as output:
        agents.gather(slots, kept)
        agents.close()  # nobody else is expected
        hosts = [HostSlots(host, number, [host]) for host, number in slots.items()]
        source = CommandSource(spec, hosts, lambda: mpich_checked(directory), explain, kept)
        console = Console(lambda text: _log.debug("%s", text), log_warning)
        driver = GenerationDriver(spec, source, output, console, agents.network)
        living = LivingRanks(driver, source, take_lost=agents.take_lost)
        try:
            living.begin()
            yield living
        finally:
            living.end()


class ExpectedHosts(AgentStarter):
    """Finds the hosts of an elastic job, and starts their agents.

    Parameters
    ----------
    agents : ExpectedAgents
        Starts the agents.
    find : callable
        Returns the slots of each host; another thread calls it each second.
    directory : str
        Where the ranks run.

    Attributes
    ----------
    stopped : Exception or None
        Why the job shall end.
    """

    def __init__(self, agents: ExpectedAgents, find: Callable[[], Mapping[str, int]], directory: str) -> None:
        self.stopped: Exception | None = None
        self._agents = agents
        self._slots: dict[str, int] = {}
        self._lost: dict[str, str] = {}
        self._directory = directory
        self._discovery = CallDiscovery(find)

    def take(self) -> list[Found | DiscoveryFailed]:
        """Return what was found since the last call; let agents connect."""
        self._agents.look()
        results = self._discovery.take()
        for found in results:
            if isinstance(found, Found):
                self._slots |= {host.name: host.slots for host in found.hosts}
        return results

    def command(self, host: str) -> Sequence[str]:
        """See :meth:`AgentStarter.command`."""
        return [host]

    def start(self, command: Sequence[str]) -> ArrivedAgent:
        """See :meth:`AgentStarter.start`."""
        return self._agents.start(command[0], self._slots[command[0]])

    def explain(self, host: str, code: int, said: str) -> tuple[str, bool]:  # noqa: ARG002
        """See :meth:`AgentStarter.explain`."""
        return self._lost.pop(host, f"no agent has connected {self._agents.late}"), False

    def prepare(self, places: Sequence[Place]) -> tuple[list[HostSlots], Checked, Wanted]:
        """See :meth:`AgentStarter.prepare`."""
        hosts = [HostSlots(place.host, place.slots, [place.host]) for place in places]
        return hosts, mpich_checked(self._directory), self._agents.network

    def lost(self) -> Mapping[str, str]:
        """See :meth:`AgentStarter.lost`."""
        self._lost = self._agents.take_lost()
        return self._lost

    def why_over(self, number: int, now: float) -> Exception | None:  # noqa: ARG002
        """See :meth:`AgentStarter.why_over`."""
        return self.stopped

    def close(self) -> None:
        """See :meth:`AgentStarter.close`."""
        self._discovery.close()
        self._agents.close()


def run_elastic_call(
    spec: JobSpec, limits: ElasticLimits, hosts: ExpectedHosts, callbacks: Callbacks
) -> list[Any]:
    """Run the function of a job on elastic ranks; return what the last ones returned.

    A thread serves the job. This one calls the callbacks with what rank 0 logs.

    Raises
    ------
    RankFailedError, LaunchError
        Ranks fail again and again; there are not enough hosts.
    """
    logged = LoggedValues()

    def serve() -> list[Any]:
        membership = Membership(limits, time.monotonic())
        job = ElasticJob(spec, membership, hosts, hosts, output, log_warning, listener=logged)
        with contextlib.closing(job):
            return job.serve_function()

    with Output() as output, ThreadPoolExecutor(1, "pyhvd.job.elastic") as thread:
        results = thread.submit(serve)
        try:
            logged.wait([results], callbacks)
        except BaseException as exc:
            hosts.stopped = LaunchError(f"the call was ended by {type(exc).__name__}")
            raise
        return results.result()
