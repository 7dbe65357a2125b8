"""The simulated cluster: ranks, hosts, and what happens to all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from pyhvd.config import Config
from pyhvd.controller import Coordinator
from pyhvd.native.shared_memory import HostTree
from pyhvd.negotiation.fusion import plan
from pyhvd.negotiation.messages import Response
from pyhvd.simulation.agreement import SETS, CoordinatorTable, HostTable, slots_for
from pyhvd.simulation.clock import Clock, SimulatedProcess
from pyhvd.simulation.data_path import Cost, DataPath, Machine
from pyhvd.simulation.network import Network, Wires
from pyhvd.simulation.program import Program
from pyhvd.simulation.ranks import SimulatedBatch, SimulatedRank, batch_of
from pyhvd.transport.link_layout import parents_of
from pyhvd.transport.tree import Tree

LINKED_HOSTS = 64
"""Up to so many hosts have links, and agree on cached tensors without messages to rank 0."""


@dataclass(frozen=True)
class Totals:
    """What has been done since the job's start.

    Attributes
    ----------
    messages, nbytes : list of int
        Sent and received by each host, over the network.
    cpu, table_cpu : list of float
        CPU time (s) of each rank's background thread; and of whoever makes progress on each host's ready
        table.
    """

    messages: list[int]
    nbytes: list[int]
    cpu: list[float]
    table_cpu: list[float]

    def since(self, earlier: Totals) -> Totals:
        """Return what has been done since earlier totals."""
        pairs = zip(vars(self).values(), vars(earlier).values(), strict=True)
        return Totals(*([a - b for a, b in zip(now, then, strict=True)] for now, then in pairs))


@dataclass
class SimulatedStep:
    """One step of the program, on all ranks.

    Attributes
    ----------
    begun_waiting : float
        The sum over ranks of the times at which they began to wait for tensors.
    last_waiting : float
        The last of them.
    ended : int
        How many ranks have ended the step.
    last_end : float
        When the last rank ended it.
    totals : Totals or None
        What had been done until the last rank ended it; None: some ranks have not.
    """

    begun_waiting: float = 0.0
    last_waiting: float = 0.0
    ended: int = 0
    last_end: float = 0.0
    totals: Totals | None = None


@dataclass
class BatchRun:
    """A batch that ran: from when the last rank entered it until its end, and its cost."""

    begin: float
    end: float
    cost: Cost


@dataclass(eq=False)
class SimulatedWorld:
    """The cluster, and what its ranks ask of it.

    Parameters
    ----------
    hosts, local_ranks : int
        Number of hosts, and of ranks on each.
    program : callable
        What the ranks run.
    network : Network
        Connects the hosts.
    seed : int
        Of the network's jitter.
    machine : Machine
        What a host can do.
    knobs : Config
        Those of the ranks and of the data path.
    cpu : float or None
        See :class:`~pyhvd.simulation.clock.SimulatedProcess`.

    Attributes
    ----------
    ranks : list of SimulatedRank
        All ranks.
    steps : list of SimulatedStep
        The program's steps.
    runs : list of BatchRun
        The batches that ran.
    ends : dict of int to (float, str)
        When, and with which text, ranks ended because of a failure or a stop.
    """

    hosts: int
    local_ranks: int
    program: Program
    network: Network = field(default_factory=Network)
    seed: int = 0
    machine: Machine = field(default_factory=Machine)
    knobs: Config = field(default_factory=Config)
    cpu: float | None = None

    def __post_init__(self) -> None:
        hosts, local_ranks, knobs = self.hosts, self.local_ranks, self.knobs
        for name, value in (("hosts", hosts), ("local_ranks", local_ranks)):
            if value < 1:
                raise ValueError(f"{name}={value}: a cluster has at least 1")
        capacity = knobs.cache_capacity
        self.size = hosts * local_ranks
        self.fusion_threshold, self.cycle = knobs.fusion_threshold, knobs.cycle_time_ms / 1e3
        self.clock = Clock()
        self.wires = Wires(self.clock, self.network, self.seed)
        self.steps: list[SimulatedStep] = []
        self.runs: list[BatchRun] = []
        self.ends: dict[int, tuple[float, str]] = {}
        self._cost_of = DataPath(self.network, self.machine, knobs.chunk_size, knobs.staging_size)
        self._sharers = self.machine.sharers(hosts, local_ranks)
        self._steps_of = [0] * self.size
        self._waits_of = [0] * self.size
        # By the keys of batches that some ranks have entered: when each rank did.
        self._open: dict[object, dict[SimulatedRank, float]] = {}
        self._audiences: dict[int, int] = {}
        self._cached: dict[int, list[SimulatedBatch]] = {}
        self.tables = self._make_tables(slots_for(capacity)) if hosts <= LINKED_HOSTS else []
        self._coordinator_table = (
            CoordinatorTable(self.tables[0], slots_for(capacity), partial=hosts > 1) if self.tables else None
        )
        coordinator = Coordinator(self.size, capacity, (), self._coordinator_table)
        leaders = [rank - rank % local_ranks for rank in range(self.size)]
        self.ranks = [
            SimulatedRank(self, Tree.of(rank, leaders), None if rank else coordinator)
            for rank in range(self.size)
        ]
        for table in self.tables:
            table.members = [self.ranks[rank] for rank in table.marks]

    def _make_tables(self, slots: int) -> list[HostTable]:
        parents, tables = parents_of(self.hosts), []
        for host in range(self.hosts):
            tree = HostTree(host, parents, SETS, slots) if self.hosts > 1 else None
            tables.append(HostTable(self.make_process, self.wires, self.ranks_of(host), tree, host))
        for table in tables:
            table.peers = tables
        return tables

    def run(self, until: float) -> bool:
        """Run all programs from the start up to a time (s); return whether something is still to happen."""
        for rank in self.ranks:
            self.clock.at(0.0, rank.advance)
        return self.clock.run(until)

    def make_process(self, settle: Callable[[], object], *, of_rank: bool = True) -> SimulatedProcess:
        """Return a thread of a simulated process: of a rank, which may share its core, or of the launcher."""
        return SimulatedProcess(self.clock, self.cpu, settle, self._sharers if of_rank else 1.0)

    def host_of(self, rank: int) -> int:
        """Return a rank's host."""
        return rank // self.local_ranks

    def name_of(self, host: int) -> str:
        """Return a host's name for messages."""
        return f"h{host}"

    def ranks_of(self, host: int) -> range:
        """Return the ranks of a host."""
        return range(host * self.local_ranks, (host + 1) * self.local_ranks)

    def neighbours_of(self, host: int) -> Sequence[int]:
        """Return the hosts to which a host has a connection for the agreement, whoever they are."""
        return self.tables[host].neighbours if self.tables else ()

    # -- what ranks tell

    def note_wait(self, rank: int) -> None:
        """Note that a rank waits for its tensors."""
        step = self._next_step(self._waits_of, rank)
        step.begun_waiting += self.clock.now
        step.last_waiting = max(step.last_waiting, self.clock.now)

    def note_step(self, rank: int) -> None:
        """Note that a rank has ended a step."""
        step = self._next_step(self._steps_of, rank)
        step.ended += 1
        step.last_end = self.clock.now
        if step.ended == self.size:
            step.totals = self.totals()

    def totals(self) -> Totals:
        """Return what has been done until now."""
        traffic = [self.wires.traffic[host] for host in range(self.hosts)]
        return Totals(
            [each.messages for each in traffic],
            [each.nbytes for each in traffic],
            [rank.process.busy for rank in self.ranks],
            [table.process.busy for table in self.tables],
        )

    def _next_step(self, counts: list[int], rank: int) -> SimulatedStep:
        """Count a step of a rank; return it."""
        counts[rank] += 1
        if len(self.steps) < counts[rank]:
            self.steps.append(SimulatedStep())
        return self.steps[counts[rank] - 1]

    def announce(self, number: int, audience: int) -> bool:
        """Give rank 0's list its place in the ready log; return False if there is no room now. 0: no list."""
        self._audiences[number] = audience
        table = self._coordinator_table
        return table is None or table.announce(number, audience)

    def audience_of(self, number: int) -> int:
        """Return the ranks that a response list concerns."""
        return self._audiences[number]

    def batches_of(self, place: int, responses: Sequence[Response]) -> list[SimulatedBatch]:
        """Return the batches of cached tensors at a place of the ready log, the same on all hosts."""
        if place not in self._cached:
            planned = plan(responses, self.fusion_threshold)
            self._cached[place] = [batch_of(("log", place), batch) for batch in planned]
        return self._cached[place]

    # -- batches

    def enter(self, rank: SimulatedRank, batch: SimulatedBatch) -> None:
        """Let a rank take part in a batch, which ends when all ranks of its set have entered it."""
        entered = self._open.setdefault(batch.key, {})
        entered[rank] = rank.process.now
        members = rank.worker.sets[batch.process_set]
        if len(entered) == len(members):
            del self._open[batch.key]
            here = len({self.host_of(each) for each in members})
            local = -(-len(members) // here)
            cost = self._cost_of(batch.kind, batch.nbytes, here, local, batch.tensors)
            begin = max(entered.values())
            end = begin + cost.seconds
            self.runs.append(BatchRun(begin, end, cost))
            self.clock.at(end, self._complete, entered)

    def _complete(self, ranks: Iterable[SimulatedRank]) -> None:
        for rank in ranks:
            if not rank.error:
                rank.finish(self.clock.now)
                rank.process.resume()

    def end(self, rank: SimulatedRank, text: str) -> None:
        """End a rank because of a failure, or because the job ends."""
        if rank.rank not in self.ends:
            rank.error = text
            self.ends[rank.rank] = self.clock.now, text
