"""The simulated cluster: ranks, hosts, and what happens to all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pyhvd.controller import Coordinator
from pyhvd.negotiation.fusion import plan
from pyhvd.negotiation.messages import RequestType, Response, ResponseList
from pyhvd.testing.simulation.agreement import CoordinatorTable, HostTable, make_trees, slots_for
from pyhvd.testing.simulation.clock import Clock, Process
from pyhvd.testing.simulation.data_path import Cost
from pyhvd.testing.simulation.network import Network, Wires
from pyhvd.testing.simulation.program import Program
from pyhvd.testing.simulation.ranks import Batch, Rank, batch_of
from pyhvd.transport.link_layout import parents_of
from pyhvd.transport.tree import Tree

LINKED_HOSTS = 64
"""Up to so many hosts have links, and agree on cached tensors without messages to rank 0."""

CostOf = Callable[[RequestType, int, int, int, int], Cost]
"""Returns what a collective costs: its kind, bytes, hosts, ranks of each host, and number of tensors."""


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


@dataclass
class Step:
    """One step of the program, on all ranks.

    Attributes
    ----------
    begun_waiting : float
        The sum over ranks of the times at which they began to wait for tensors.
    last_waiting : float
        The last of them.
    ended : int
        How many ranks have ended the step.
    first_end, last_end : float
        When the first and the last rank ended it.
    totals : Totals or None
        What had been done until the last rank ended it; None: some ranks have not.
    """

    begun_waiting: float = 0.0
    last_waiting: float = 0.0
    ended: int = 0
    first_end: float = 0.0
    last_end: float = 0.0
    totals: Totals | None = None


@dataclass
class Run:
    """A batch that ran: from when the last rank entered it until its end, and its cost."""

    batch: Batch
    begin: float
    end: float
    cost: Cost


@dataclass
class _Open:
    """A batch that some ranks have entered."""

    ranks: list[Rank] = field(default_factory=list)
    latest: float = 0.0


class World:
    """The cluster, and what its ranks ask of it.

    Parameters
    ----------
    hosts, local_ranks : int
        Number of hosts, and of ranks on each.
    program : callable
        What the ranks run.
    network : Network
        Connects the hosts.
    cost_of : callable
        The data path's model.
    cpu : float or None
        See :class:`~pyhvd.testing.simulation.clock.Process`.
    sharers : float
        Likewise.
    seed : int
        Of the network's jitter.
    fusion_threshold : int
        Most bytes of a fused batch.
    cycle : float
        Seconds for which submissions gather while the program computes.
    capacity : int
        Slots of each response cache.

    Attributes
    ----------
    ranks : list of Rank
        All ranks.
    steps : list of Step
        The program's steps.
    runs : list of Run
        The batches that ran.
    ends : dict of int to (float, str)
        When, and with which text, ranks ended because of a failure or a stop.
    """

    def __init__(
        self,
        hosts: int,
        local_ranks: int,
        program: Program,
        network: Network,
        cost_of: CostOf,
        cpu: float | None,
        sharers: float,
        seed: int,
        fusion_threshold: int,
        cycle: float,
        capacity: int,
    ) -> None:
        self.hosts, self.local_ranks, self.size = hosts, local_ranks, hosts * local_ranks
        self.program, self.network = program, network
        self.fusion_threshold, self.cycle = fusion_threshold, cycle
        self.clock = Clock()
        self.wires = Wires(self.clock, network, seed)
        self.steps: list[Step] = []
        self.runs: list[Run] = []
        self.ends: dict[int, tuple[float, str]] = {}
        self._cost_of = cost_of
        self._cpu, self._sharers = cpu, sharers
        self._steps_of = [0] * self.size
        self._waits_of = [0] * self.size
        self._open: dict[object, _Open] = {}
        self._audiences: dict[int, int] = {}
        self._cached: dict[int, list[Batch]] = {}
        self.tables = self._make_tables(slots_for(capacity)) if hosts <= LINKED_HOSTS else []
        leaders = [rank - rank % local_ranks for rank in range(self.size)]
        self.ranks = [
            Rank(self, Tree.of(rank, leaders), self.tables[self.host_of(rank)] if self.tables else None)
            for rank in range(self.size)
        ]
        for table in self.tables:
            table.members = [self.ranks[rank] for rank in table.marks]
        coordinator_table = (
            CoordinatorTable(self.tables[0], slots_for(capacity), hosts > 1) if self.tables else None
        )
        self.ranks[0].coordinator_table = coordinator_table
        self.ranks[0].coordinator = Coordinator(self.size, capacity, (), coordinator_table)

    def _make_tables(self, slots: int) -> list[HostTable]:
        trees = make_trees(parents_of(self.hosts), slots) if self.hosts > 1 else [None]
        tables = []
        for host, tree in enumerate(trees):
            tables.append(HostTable(self.make_process, self.wires, self.ranks_of(host), tree, host))
        for table in tables:
            table.peers = tables
        return tables

    def run(self, until: float) -> bool:
        """Run all programs from the start up to a time (s); return whether something is still to happen."""
        for rank in self.ranks:
            self.clock.at(0.0, rank.advance)
        return self.clock.run(until)

    def make_process(self, settle: Callable[[], object], of_rank: bool = True) -> Process:
        """Return a thread of a simulated process: of a rank, which may share its core, or of the launcher."""
        return Process(self.clock, self._cpu, settle, self._sharers if of_rank else 1.0)

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
        step = self._step(self._waits_of[rank])
        self._waits_of[rank] += 1
        step.begun_waiting += self.clock.now
        step.last_waiting = max(step.last_waiting, self.clock.now)

    def note_step(self, rank: int) -> None:
        """Note that a rank has ended a step."""
        step = self._step(self._steps_of[rank])
        self._steps_of[rank] += 1
        step.ended += 1
        step.first_end = self.clock.now if step.ended == 1 else step.first_end
        step.last_end = self.clock.now
        if step.ended == self.size:
            step.totals = self.totals()

    def totals(self) -> Totals:
        """Return what has been done until now."""
        traffic = [self.wires.traffic[host] for host in range(self.hosts)]
        return Totals(
            [each.messages_in + each.messages_out for each in traffic],
            [each.bytes_in + each.bytes_out for each in traffic],
            [rank.process.busy for rank in self.ranks],
            [table.process.busy for table in self.tables],
        )

    def _step(self, number: int) -> Step:
        while len(self.steps) <= number:
            self.steps.append(Step())
        return self.steps[number]

    def note_list(self, responses: ResponseList, audience: int) -> None:
        """Note whom a response list concerns."""
        self._audiences[responses.seq] = audience

    def audience_of(self, number: int) -> int:
        """Return the ranks that a response list concerns."""
        return self._audiences[number]

    def batches_of(self, place: int, responses: Sequence[Response]) -> list[Batch]:
        """Return the batches of cached tensors at a place of the ready log, the same on all hosts."""
        if place not in self._cached:
            planned = plan(responses, self.fusion_threshold)
            self._cached[place] = [batch_of(("log", place), batch) for batch in planned]
        return self._cached[place]

    # -- batches

    def enter(self, rank: Rank, batch: Batch) -> None:
        """Let a rank take part in a batch, which ends when all ranks of its set have entered it."""
        at = self._open.setdefault(batch.key, _Open())
        at.ranks.append(rank)
        at.latest = max(at.latest, rank.process.now)
        members = rank.worker.sets[batch.process_set]
        if len(at.ranks) == len(members):
            del self._open[batch.key]
            here = len({self.host_of(each) for each in members})
            local = -(-len(members) // here)
            cost = self._cost_of(batch.kind, batch.nbytes, here, local, batch.tensors)
            end = at.latest + cost.seconds
            self.runs.append(Run(batch, at.latest, end, cost))
            self.clock.at(end, self._complete, at.ranks)

    def _complete(self, ranks: Sequence[Rank]) -> None:
        for rank in ranks:
            if not rank.error:
                rank.finish(self.clock.now)
                rank.process.resume()

    def end(self, rank: Rank, text: str) -> None:
        """End a rank because of a failure, or because the job ends."""
        if rank.rank not in self.ends:
            rank.error = text
            self.ends[rank.rank] = self.clock.now, text
