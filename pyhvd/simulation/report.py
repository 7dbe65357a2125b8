"""What a simulation has shown: its steps, where their time went, and what became of faults."""

from __future__ import annotations

import gc
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import BuiltinFunctionType, FunctionType, ModuleType

from pyhvd.simulation.data_path import Cost
from pyhvd.simulation.faults import KILLED, LOST, Faults
from pyhvd.simulation.launcher import ElasticLauncher
from pyhvd.simulation.stalls import HangReport
from pyhvd.simulation.world import BatchRun, SimulatedStep, SimulatedWorld, Totals

_CODE = (type, ModuleType, FunctionType, BuiltinFunctionType)


@dataclass(frozen=True)
class StepReport:
    """One step, from the end of the step before it on the last rank until its own end there.

    All times are seconds. ``compute + late + agreement + link + cpu + latency`` is ``seconds``.

    Attributes
    ----------
    seconds : float
        Its length.
    compute : float
        Until the mean rank waits for its tensors.
    late : float
        From then until the last rank does so.
    agreement : float
        After that: while no collective runs.
    link, cpu, latency : float
        After that: while collectives run, and what bounds them: the busiest link, the busiest host's cores,
        or the number of one-way delays.
    hidden : float
        Collectives that ran before, so beside the computing of some rank.
    to_begin : float
        From when the last rank waits until the first collective that begins after that; 0 if there is none.
    messages, nbytes : int
        The most messages, and bytes of messages, that any host sent and received over the network. They are
        those of the negotiation and the agreement, without the collectives' data.
    data_bytes : int
        Bytes of the collectives' data, with headers, that the busiest host sent.
    cpu_of_rank_0, most_cpu : float
        CPU time of rank 0's background thread, and of the busiest simulated process.
    """

    seconds: float
    compute: float
    late: float
    agreement: float
    link: float
    cpu: float
    latency: float
    hidden: float
    to_begin: float
    messages: int
    nbytes: int
    data_bytes: int
    cpu_of_rank_0: float
    most_cpu: float


@dataclass(frozen=True)
class Failure:
    """What became of faults.

    Attributes
    ----------
    at : float
        When (s) the first one happened.
    noticed : float
        When somebody first saw it; inf if nobody did.
    known : float
        When the last rank that was left had an error; inf if one never had.
    cause : str
        The launcher's error; empty if it has none.
    texts : dict of str to int
        The errors of the ranks that were left, and how many ranks had each.
    """

    at: float
    noticed: float
    known: float
    cause: str
    texts: dict[str, int]


@dataclass(frozen=True)
class Restart:
    """How an elastic job started its ranks again; seconds since the first fault.

    Attributes
    ----------
    ended : float
        All ranks of the generation that failed had ended.
    told : float
        The last host was told to start ranks.
    wired : float
        The last rank knew the addresses of all others.
    """

    ended: float
    told: float
    wired: float


@dataclass(frozen=True)
class Simulation:
    """What a simulated job did.

    Attributes
    ----------
    hosts, local_ranks : int
        Number of hosts, and of ranks on each.
    seconds : float
        Virtual time at its end.
    steps : list of StepReport
        The steps that all ranks ended.
    unfinished : list of int
        Ranks whose program did not end, and that have no error: they wait for ever.
    memory : int
        Bytes that rank 0's coordinator and worker hold.
    failure : Failure or None
        What became of faults; None without any.
    restart : Restart or None
        How an elastic job started its ranks again; None if it did not.
    hang_reports : list of HangReport
        What rank 0 reported of tensors that some ranks had not submitted.
    hang_report_cpu : float
        CPU time (s) of the longest look that rank 0 had for them.
    """

    hosts: int
    local_ranks: int
    seconds: float
    steps: list[StepReport] = field(default_factory=list)
    unfinished: list[int] = field(default_factory=list)
    memory: int = 0
    failure: Failure | None = None
    restart: Restart | None = None
    hang_reports: list[HangReport] = field(default_factory=list)
    hang_report_cpu: float = 0.0


def report_on(world: SimulatedWorld, happened: Faults) -> Simulation:
    """Return what a simulation has shown."""
    stalls = world.ranks[0].stalls
    return Simulation(
        world.hosts,
        world.local_ranks,
        world.clock.now,
        list(_steps(world)),
        [rank.rank for rank in world.ranks if not rank.done and not rank.error],
        _memory_of(world.ranks[0].node.coordinator, world.ranks[0].worker),
        _failure(world, happened) if happened.faults else None,
        _restart(happened),
        stalls.reports if stalls else [],
        stalls.longest if stalls else 0.0,
    )


def _memory_of(*roots: object) -> int:
    """Return the bytes of objects, and of all that they refer to but code and the simulated cluster."""
    seen: set[int] = set()
    left, nbytes = list(roots), 0
    while left:
        each = left.pop()
        outside = type(each).__module__.startswith(__package__) or isinstance(each, _CODE)
        if id(each) not in seen and not outside:
            seen.add(id(each))
            nbytes += sys.getsizeof(each)
            left += gc.get_referents(each)
    return nbytes


def _steps(world: SimulatedWorld) -> Iterator[StepReport]:
    begin = SimulatedStep(
        totals=Totals([0] * world.hosts, [0] * world.hosts, [0.0] * world.size, [0.0] * len(world.tables))
    )
    for before, step in pairwise([begin, *world.steps]):
        if before.totals is None or step.totals is None:
            return
        runs = [run for run in world.runs if before.last_end <= run.begin < step.last_end]
        spent = step.totals.since(before.totals)
        data = round(sum(run.cost.link for run in runs) * world.network.rate)
        yield _step(before.last_end, step, sorted(runs, key=lambda run: run.begin), spent, world.size, data)


def _step(
    begin: float, step: SimulatedStep, runs: Sequence[BatchRun], spent: Totals, size: int, data_bytes: int
) -> StepReport:
    waits, mean = step.last_waiting, step.begun_waiting / size
    hidden, covered = 0.0, begin
    shares = {"link": 0.0, "cpu": 0.0, "latency": 0.0}
    for run in runs:  # those of different process sets may overlap
        hidden += max(min(run.end, waits) - max(run.begin, covered), 0.0)
        shown = max(run.end - max(run.begin, covered, waits), 0.0)
        covered = max(covered, run.end)
        for name, share in _shares(run.cost).items():
            shares[name] += shown * share
    return StepReport(
        seconds=step.last_end - begin,
        compute=mean - begin,
        late=waits - mean,
        agreement=step.last_end - waits - sum(shares.values()),
        **shares,
        hidden=hidden,
        to_begin=next((run.begin - waits for run in runs if run.begin >= waits), 0.0),
        messages=max(spent.messages),
        nbytes=max(spent.nbytes),
        data_bytes=data_bytes,
        cpu_of_rank_0=spent.cpu[0],
        most_cpu=max([*spent.cpu, *spent.table_cpu]),
    )


def _shares(cost: Cost) -> dict[str, float]:
    """Return which part of a collective's time each limit accounts for."""
    parts = {"link": cost.link, "cpu": cost.cpu, "latency": cost.latency}
    whole = sum(parts.values())
    return {name: part / whole for name, part in parts.items()} if whole else {"cpu": 1.0}


def _failure(world: SimulatedWorld, happened: Faults) -> Failure:
    survivors = [rank for rank in world.ranks if rank.error not in (LOST, KILLED)]
    knew = [world.ends[rank.rank][0] if rank.error else math.inf for rank in survivors if not rank.done]
    return Failure(
        at=min(fault.at for fault in happened.faults),
        noticed=min(happened.noticed, default=math.inf),
        known=max(knew, default=math.inf),
        cause=happened.launcher.error,
        texts=dict(Counter(rank.error for rank in survivors if rank.error)),
    )


def _restart(happened: Faults) -> Restart | None:
    launcher = happened.launcher
    if not isinstance(launcher, ElasticLauncher) or not launcher.wired:
        return None
    at = min(fault.at for fault in happened.faults)
    return Restart(launcher.ended - at, launcher.told - at, launcher.wired - at)
