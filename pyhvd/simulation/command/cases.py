"""Simulations of a cluster, and of changes to it; large ones run in processes of their own, side by side."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace

from pyhvd.backends.two_level import piece_across
from pyhvd.config import Config
from pyhvd.simulation import (
    HostLost,
    Machine,
    Network,
    Part,
    Simulation,
    StepReport,
    simulate,
    training_in_parts,
)
from pyhvd.simulation.command.gradients import Gradients
from pyhvd.simulation.world import LINKED_HOSTS
from pyhvd.transport.hosts import chunk_across

MOST_WORK = 10_000_000
"""Ranks x gradients of the largest cluster. 1,250 hosts x 8 ranks with 161 gradients take 1.4 GB."""
_MOST_STEPS = 400_000
"""Ranks x steps until a fault."""
_SMALL = 2_000
"""Up to so many ranks, of all simulations together, processes would not pay."""
_MOST_PROCESSES = 4
_AFTER_FAULT_S = 3600.0
_LEAST = {"chunk_size": 16384}
LARGE = 2_000
"""A cluster with more ranks takes long to simulate: only the changes that may help most are tried."""
LEAST_GAIN, _NOISE = 0.01, 0.1
"""Smaller gains count as none: as a part of the step, and of its agreement, whose CPU is measured."""

Progress = Callable[[int, int], None]
"""Called with the number of simulations that have ended, and of all."""


class FlagError(ValueError):
    """Flags do not fit each other, or make a simulation too large; the text names them."""


@dataclass(frozen=True)
class Case:
    """One simulation of training: its parts, steps and late ranks, and further arguments of ``simulate``."""

    hosts: int
    local_ranks: int
    parts: tuple[Part, ...]
    steps: int
    network: Network
    machine: Machine
    config: Config
    late: Mapping[int, float] | None = None
    faults: tuple[HostLost, ...] = ()
    elastic: bool = False
    seed: int = 0
    cpu: float | None = None

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.hosts * self.local_ranks

    def simulate(self) -> Simulation:
        """Run the simulation."""
        given = dict(vars(self))
        parts, steps, late = (given.pop(name) for name in ("parts", "steps", "late"))
        step = sum(part.compute for part in parts) + max((late or {}).values(), default=0.0)
        until = _AFTER_FAULT_S * (1 + steps) + steps * step
        return simulate(program=training_in_parts(parts, steps, late), until=until, **given)


def efficiency(one_host: Simulation, job: Simulation) -> float:
    """Return how long a step takes on one host, as a part of its time in the job."""
    return usual_step(one_host).seconds / usual_step(job).seconds


def usual_step(job: Simulation) -> StepReport:
    """Return the step of median length, apart from the first one."""
    later = sorted(job.steps[1:], key=lambda step: step.seconds)
    return later[len(later) // 2]


@dataclass(frozen=True)
class Change:
    """A change to the cluster: how long a step would take, and which part of its time that saves."""

    label: str
    seconds: float
    gain: float

    def helps(self, step: StepReport) -> bool:
        """Return whether it saves more of a step than what may be noise."""
        return self.gain * step.seconds > max(LEAST_GAIN * step.seconds, _NOISE * step.agreement)


@dataclass(frozen=True)
class Answer:
    """What the simulations have shown.

    Attributes
    ----------
    job : Simulation
        The cluster as given.
    one_host : Simulation
        One of its hosts.
    changes : list of Change
        The best first.
    by_hosts : list of Simulation
        1, 2, 4 ... hosts, up to the number given; empty if not asked for.
    faulty : Simulation or None
        The job that loses hosts.
    lost : int
        How many it loses.
    """

    job: Simulation
    one_host: Simulation
    changes: list[Change]
    by_hosts: list[Simulation]
    faulty: Simulation | None = None
    lost: int = 0


def ask(
    case: Case,
    gradients: Gradients,
    parts: int | None,
    *,
    by_hosts: bool,
    faults: tuple[HostLost, ...],
    elastic: bool,
    progress: Progress,
) -> Answer:
    """Simulate a cluster, and what would help.

    Parameters
    ----------
    case : Case
        The cluster as given.
    gradients : Gradients
        What a step submits.
    parts : int or None
        In how many parts it does so, if the program may change that.
    by_hosts : bool
        Whether to simulate fewer hosts too.
    faults, elastic
        What is lost in one more simulation.
    progress : callable
        See :data:`Progress`.
    """
    if case.ranks * len(gradients.ready) > MOST_WORK:
        raise FlagError(
            f"argument --hosts: all ranks submit {case.ranks * len(gradients.ready):,} gradients in a step"
            f" together: expected at most {MOST_WORK:,}"
        )
    changed = changes(case, gradients, parts)
    powers = [1 << k for k in range((case.hosts - 1).bit_length())]  # of 2, below the number of hosts
    fewer = [replace(case, hosts=hosts) for hosts in (powers if by_hosts else powers[:1])]
    job, *others = run_all([case, *changed.values(), *fewer], progress)
    small = others[len(changed) :]
    given = usual_step(job).seconds
    lengths = [usual_step(other).seconds for other in others[: len(changed)]]
    found = [Change(label, took, 1 - took / given) for label, took in zip(changed, lengths, strict=True)]
    return Answer(
        job,
        small[0] if small else job,
        sorted(found, key=lambda change: change.seconds),
        [*small, job] if by_hosts else [],
        _lose(case, given, faults, elastic=elastic) if faults else None,
        len({fault.host for fault in faults}),
    )


def _lose(case: Case, step: float, faults: tuple[HostLost, ...], *, elastic: bool) -> Simulation:
    """Simulate a job that trains until hosts are lost."""
    last = max(fault.at for fault in faults)
    steps = int(last / step) + 3
    if steps * case.ranks > _MOST_STEPS:
        latest = step * _MOST_STEPS / case.ranks
        raise FlagError(
            f"argument --lose: {steps:,} steps would be simulated until {last:g} s: expected at most"
            f" {latest:.3g} s"
        )
    return replace(case, steps=steps, faults=faults, elastic=elastic).simulate()


def changes(case: Case, gradients: Gradients, parts: int | None) -> dict[str, Case]:
    """Return what could make a step faster, by labels; changes without any effect are left out."""
    network, machine, config = case.network, case.machine, case.config
    found: dict[str, Case] = {}
    if case.hosts > 1:
        found["a link of twice the rate"] = replace(case, network=replace(network, rate=2 * network.rate))
        if network.latency:
            found["half the latency"] = replace(case, network=replace(network, latency=network.latency / 2))
    smaller = gradients.halved().in_parts(len(case.parts))
    found["half the bytes, as by Compression.fp16"] = replace(case, parts=tuple(smaller))
    if case.local_ranks > machine.cores:
        found["twice the cores"] = replace(case, machine=replace(machine, cores=2 * machine.cores))
    if case.late:
        found["no late ranks"] = replace(case, late=None)
    if case.ranks <= LARGE:
        found |= _other_parts(case, gradients, parts)
    for knob, value in _knobs(case, gradients.nbytes):
        label = f"PYHVD_{knob.upper()}={value}"
        found[label] = replace(case, config=replace(config, **{knob: value}))  # type: ignore[arg-type]
    return found


def _other_parts(case: Case, gradients: Gradients, parts: int | None) -> dict[str, Case]:
    found = {}
    if parts:
        for other in (2 * parts, parts // 2):
            cut = tuple(gradients.in_parts(other)) if other else ()
            if other and len(cut) != len(case.parts):
                found[f"gradients submitted in {len(cut)} parts"] = replace(case, parts=cut)
    return found


def _knobs(case: Case, nbytes: int) -> Iterator[tuple[str, int]]:
    """Yield the knobs that matter here, each with a larger and a smaller value."""
    config, large = case.config, case.ranks > LARGE
    largest = max(sum(tensor.nbytes for tensor in part.tensors) for part in case.parts)
    chunked = "staging_size" if case.hosts > LINKED_HOSTS else "chunk_size"
    for knob, most in (("fusion_threshold", nbytes), (chunked, largest))[large:]:
        value = getattr(config, knob)
        for other in (4 * value,) if large else (4 * value, value // 4):
            # A limit matters only if it is lower than what it limits, and only its effect counts.
            lower, higher = sorted((_effect(case, knob, value), _effect(case, knob, other)))
            if other >= _LEAST.get(knob, 1) and lower < min(higher, most):
                yield knob, other


def _effect(case: Case, knob: str, value: int) -> int:
    """Return the bytes that a knob of this value means on the case's hosts."""
    if knob == "chunk_size" and case.hosts > 1:
        return chunk_across(value, case.hosts)
    return piece_across(value, case.local_ranks) if knob == "staging_size" else value


# -- running -------------------------------------------------------------------------------------------


def run_all(cases: Sequence[Case], progress: Progress) -> list[Simulation]:
    """Return the results of simulations, in the same order."""
    progress(0, len(cases))
    processes = min(os.cpu_count() or 1, _MOST_PROCESSES, len(cases))
    if sum(case.ranks for case in cases) <= _SMALL or processes == 1:
        jobs = []
        for case in cases:
            jobs.append(case.simulate())
            progress(len(jobs), len(cases))
        return jobs
    return _run_in_processes(cases, processes, progress)


def _run_in_processes(cases: Sequence[Case], processes: int, progress: Progress) -> list[Simulation]:
    context = multiprocessing.get_context("spawn")
    # Each simulation has a process of its own, whose memory is then free again.
    at_interrupt = signal.SIGINT, signal.SIG_DFL  # end
    pool = ProcessPoolExecutor(processes, context, signal.signal, at_interrupt, max_tasks_per_child=1)
    try:
        by_size = sorted(range(len(cases)), key=lambda i: -cases[i].ranks)
        futures = {pool.submit(_run_alone, cases[i]): i for i in by_size}
        jobs: dict[int, Simulation] = {}
        for future in as_completed(futures):
            jobs[futures[future]] = future.result()
            progress(len(jobs), len(cases))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return [jobs[i] for i in range(len(cases))]


def _run_alone(case: Case) -> Simulation:
    """Run a simulation in a process that does nothing else, and then ends."""
    gc.disable()
    job = case.simulate()
    gc.freeze()  # the process ends: nothing needs to be collected
    return job
