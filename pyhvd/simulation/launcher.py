"""The launcher of a simulated job: its real machines, and messages to and from the hosts' agents.

A plain job ends when a rank or a host is lost: :class:`pyhvd.job.machines.machine.JobMachine`
decides. An elastic job starts its ranks again: :class:`pyhvd.job.machines.membership.Membership` decides.
MPI's exchange of addresses is that of :class:`pyhvd.job.mpi.pmi.PmiServer`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pyhvd.job.connections import BEAT_S, ELASTIC_BEAT_S, ELASTIC_SILENT_S, SILENT_S
from pyhvd.job.errors import RankError
from pyhvd.job.machines.agent_pool import AgentPool
from pyhvd.job.machines.machine import Begin, End, HostTexts, JobMachine
from pyhvd.job.machines.member_host import FoundHost
from pyhvd.job.machines.membership import Membership, StartAgent, StartGeneration
from pyhvd.job.machines.roster import ElasticLimits
from pyhvd.job.messages import PART, Facts, Member
from pyhvd.job.mpi.pmi import PmiServer
from pyhvd.job.mpi.rendezvous import assign
from pyhvd.job.network.network_choice import Wanted
from pyhvd.job.process.exit_report import ExitReport

if TYPE_CHECKING:
    from pyhvd.simulation.world import SimulatedWorld

HOST = -1
"""The launcher's own host."""

_FACTS = Facts("mpich", "MPICH", True, "")
_START_TIMEOUT_S = 600.0
_MESSAGE_BYTES = 400
_CARD = "tcp$host#10.0.0.1$port#40000$"
_TURN_S = 0.25
"""The launcher looks at its machine at least so often while a failure is not settled."""


class Launcher:
    """The launcher of a job that ends with its first failure.

    Parameters
    ----------
    world : SimulatedWorld
        The cluster.

    Attributes
    ----------
    process : Process
        The launcher's thread.
    error : str
        Its error; empty while there is none.
    """

    beat_s, silent_s = BEAT_S, SILENT_S

    def __init__(self, world: SimulatedWorld) -> None:
        self.error = ""
        self.process = world.make_process(self._settle, of_rank=False)
        self._world = world
        self._members = [
            Member(host, 0, world.name_of(host), world.name_of(host), world.local_ranks, _FACTS)
            for host in range(world.hosts)
        ]
        self._begin()

    def _begin(self) -> None:
        names = [member.host for member in self._members]
        size, pool = self._world.size, AgentPool(names, starts=True)
        self._machine = JobMachine(
            size, pool, HostTexts(size, names, _START_TIMEOUT_S), _START_TIMEOUT_S, wanted=Wanted(probe=False)
        )
        for member in self._members:
            refused = self._machine.register(member)
            assert not refused, refused
        actions = self._machine.tick(0.0)
        assert any(isinstance(action, Begin) for action in actions), actions
        self._machine.place(assign([member for member in self._members for _ in range(member.slots)]))

    def report(self, host: int, report: ExitReport) -> None:
        """Let a host's agent send a rank's report."""
        self._from_agent(host, self._hear, report)

    def lose_agent(self, host: int, *, waited: bool) -> None:
        """Note that an agent is gone, or with `waited` silent; as a task of the process."""
        if not self.error:
            why = f"has been silent for {self.silent_s:g} s" if waited else "is lost: its agent is gone"
            self._machine.lose(self._members[host], why, self.process.now, waited=waited)

    def _hear(self, report: ExitReport) -> None:
        if not self.error:
            self._machine.report(report, self.process.now)

    def _settle(self) -> None:
        """Do what the machine says."""
        if self.error:
            return
        now = self.process.now
        for action in self._machine.tick(now):
            if isinstance(action, End):
                assert isinstance(action.error, RankError), action.error
                self._end(action.error)
        if self._machine.failing and not self.error:
            self._world.clock.at(now + _TURN_S, self.process.wake)

    def _end(self, error: RankError) -> None:
        """End the job: all agents kill their ranks."""
        self.error = str(error)
        for host in range(self._world.hosts):
            self._to_agent(host, _MESSAGE_BYTES, self._kill_ranks, host)

    def _kill_ranks(self, host: int) -> None:
        for rank in self._world.ranks_of(host):
            self._world.end(self._world.ranks[rank], f"the job ended: {self.error}")

    def _to_agent(self, host: int, nbytes: int, arrive: Callable[..., object], *args: Any) -> None:
        self.process.spend(self._world.network.message_cpu)
        self._world.wires.send((HOST, host), (HOST, host), nbytes, self.process.now, arrive, *args)

    def _from_agent(self, host: int, task: Callable[..., object], *args: Any) -> None:
        take = partial(self.process.call, self._take, task, *args)
        self._world.wires.send((host, HOST), (host, HOST), _MESSAGE_BYTES, self._world.clock.now, take)

    def _take(self, task: Callable[..., object], *args: Any) -> None:
        self.process.spend(self._world.network.message_cpu)
        task(*args)


class ElasticLauncher(Launcher):
    """The launcher of an elastic job: it starts the next generation when a rank or a host is lost.

    The ranks of that generation exchange their addresses, and do not run.

    Attributes
    ----------
    ended : float
        When the last agent had killed the ranks of the generation that failed.
    told : float
        When the last agent was told to start ranks.
    wired : float
        When the last rank of the next generation knew all addresses.
    fork_s, reap_s : float
        Seconds from an agent's order to a rank that runs; and to the end of ranks that were killed. Measured
        on one host: docs/elastic.md.
    """

    beat_s, silent_s = ELASTIC_BEAT_S, ELASTIC_SILENT_S
    fork_s, reap_s = 0.04, 0.01

    def _begin(self) -> None:
        super()._begin()
        self.ended = self.told = self.wired = 0.0
        self._numbers = {member.host: member.index for member in self._members}
        self._alive = set(range(self._world.hosts))
        self._lost: dict[str, str] = {}
        self._ending: set[int] = set()
        hosts = [FoundHost(member.host, member.slots) for member in self._members]
        size = self._world.size
        self._membership = Membership(ElasticLimits(self._world.local_ranks, size, size), 0.0, hosts)
        while self._membership.number < 0:
            for action in self._membership.tick(0.0):
                if isinstance(action, StartAgent):
                    self._membership.agent_up(action.host, 0.0)

    def lose_agent(self, host: int, *, waited: bool) -> None:
        """See :meth:`Launcher.lose_agent`."""
        self._alive.discard(host)
        self._lost[self._world.name_of(host)] = "is lost"
        super().lose_agent(host, waited=waited)
        self._note_ended(host)

    def _end(self, error: RankError) -> None:
        """End the generation: all agents kill their ranks, and say so."""
        self.error = str(error)
        self._failure = error
        self._ending = set(self._alive)
        for host in self._alive:
            self._to_agent(host, _MESSAGE_BYTES, self._reap, host)

    def _reap(self, host: int) -> None:
        self._kill_ranks(host)
        self._world.clock.after(self.reap_s, self._from_agent, host, self._note_ended, host)

    def _note_ended(self, host: int) -> None:
        if host in self._ending:
            self._ending.discard(host)
            if not self._ending:
                self.ended = self.process.now
                self._report_end(self._failure, self.ended)

    def _report_end(self, failure: RankError, now: float) -> None:
        """Tell the membership how the generation ended, and do what it says."""
        machine, host = self._membership, failure.host
        if host in self._lost:
            machine.host_failed(failure, host, self._lost.pop(host), now, 0.0)
        else:
            machine.rank_failed(failure, host, now, 0.0)
        for each, why in self._lost.items():
            machine.agent_lost(each, why, now, 0.0)
        for action in machine.tick(now):
            if isinstance(action, StartGeneration):
                self._start([(self._numbers[place.host], place.slots) for place in action.places])

    def _start(self, places: Sequence[tuple[int, int]]) -> None:
        self._pmi = PmiServer([host for host, (_, slots) in enumerate(places) for _ in range(slots)])
        self._host_of = [host for host, slots in places for _ in range(slots)]
        self._unwired = len(self._host_of)
        for rank, host in enumerate(self._host_of):
            self._to_agent(host, _MESSAGE_BYTES, self._fork, host, rank)
        self.told = self.process.now

    def _fork(self, host: int, rank: int) -> None:
        """Start a rank; it tells its address, and waits until all have done so."""
        lines = [f"cmd=put kvsname=kvs key=P{rank}-businesscard value={_CARD}", "cmd=barrier_in"]
        for line in lines:
            self._world.clock.after(self.fork_s, self._from_agent, host, self._hear_pmi, rank, line)

    def _hear_pmi(self, rank: int, line: str) -> None:
        answers = self._pmi.handle(rank, line)
        if len(answers) > 1:  # all are in the barrier: the agents get what was put, and answer by it
            for values in self._pmi.take_unshared(PART // 2):
                nbytes = sum(len(key) + len(value) for key, value in values.items())
                for there in set(self._host_of):
                    self._to_agent(there, nbytes, _look)
        for target, answer in answers:
            arrive = self._note_wired if len(answers) > 1 else _look
            self._to_agent(self._host_of[target], len(answer), arrive)

    def _note_wired(self) -> None:
        self._unwired -= 1
        if not self._unwired:
            self.wired = self._world.clock.now


def _look() -> None:
    """Do nothing but arrive: a process then settles."""
