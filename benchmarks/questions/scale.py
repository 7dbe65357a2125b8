"""scale: what grows with the number of ranks, from 8 to 10,000 of them on simulated hosts of 8.

pyhvd's own machines run on virtual time (:func:`pyhvd.testing.simulate`). The CPU time of each of their turns
is measured, and is part of the virtual time. The network has 25 Gbit/s and a latency of 20 us.
"""

from __future__ import annotations

import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain

from benchmarks.harness import OURS, PEER, Figures, Outcome
from benchmarks.question import Options, Question, main
from benchmarks.report import Target
from benchmarks.tensors import resnet50
from pyhvd.simulation import (
    AddSet,
    Hang,
    HostLost,
    Network,
    RankKilled,
    Simulation,
    StepEnd,
    Submit,
    Tensor,
    Wait,
    simulate,
    training,
)
from pyhvd.simulation.program import Action, Program

PER_HOST = 8
TENSORS = [Tensor(f"gradient.{i}", 4 * count) for i, count in enumerate(resnet50())]
SMALL = [Tensor("loss")]
LATE_S, FAULT_S = 0.05, 0.5

Key = tuple[str, str]
"""The unit and the name of a figure."""
Values = Mapping[Key, float]

AGREED = "s", "agreement, cached step"
MOST_CPU = "s", "CPU of the busiest process, cached step"
FIRST = "s", "first step, beside its computing"
CPU_FIRST, CPU = ("s", "CPU of rank 0, first step"), ("s", "CPU of rank 0, cached step")
SET = "s", "a process set is added"
LATE = "s", "agreement after a rank that is 50 ms late"
KILLED = "s", "a rank is killed: until all ranks know"
CRASHED, SILENT = (
    ("s", "a host crashes: until all ranks know"),
    ("s", "a host is silent: until all ranks know"),
)
RESTARTS = (
    ("s", "elastic, a host crashes: until ranks connect"),
    ("s", "elastic, a host is silent: until ranks connect"),
)
DELAYS = "one-way delays", "agreement, cached step"
MESSAGES = "messages", "of a host, cached step"
NBYTES_FIRST, NBYTES = ("KiB", "of a host, first step"), ("KiB", "of a host, cached step")
MEMORY = "MiB", "rank 0's machines"
REPORT, REPORT_CPU = (
    ("characters", "of a stall report, half of the ranks missing"),
    ("s", "CPU of a stall report"),
)
OF_RANK_0 = (CPU_FIRST, CPU, MESSAGES, NBYTES_FIRST, NBYTES, MEMORY)
"""They may grow like H log H, with H hosts."""


def steps(size: int) -> Values:
    """Measure steps with the gradients of ResNet-50, and a process set that is added after them."""
    train = training(TENSORS, compute=0.08, steps=10)

    def program(rank: int, ranks: int) -> Iterator[Action]:
        return chain(train(rank, ranks), (AddSet(tuple(range(0, ranks, 2))), StepEnd()))

    job = _run(size, program)
    first, *cached, added = job.steps
    middle = sorted(cached, key=lambda step: step.to_begin)[len(cached) // 2]
    return {
        AGREED: middle.to_begin,
        MOST_CPU: middle.most_cpu,
        FIRST: first.seconds - first.compute,
        CPU_FIRST: first.cpu_of_rank_0,
        CPU: middle.cpu_of_rank_0,
        SET: added.seconds,
        MESSAGES: middle.messages,
        NBYTES_FIRST: first.nbytes / 1024,
        NBYTES: middle.nbytes / 1024,
        MEMORY: job.memory / (1 << 20),
    }


def delays(size: int) -> Values:
    """Count the one-way delays of a cached step: nothing else takes time."""
    network = Network(inside=0.0, wake=0.0, message_cpu=0.0, rate=1e15)
    job = _run(size, training(SMALL, compute=1e-3, steps=3), network, cpu=0.0)
    return {DELAYS: job.steps[-1].to_begin / network.latency}


def straggler(size: int) -> Values:
    """Measure when a tensor is agreed on after the last rank has submitted it, which is late."""
    job = _run(size, training(SMALL, compute=0.01, steps=4, late={size - 1: LATE_S}))
    return {LATE: job.steps[-1].to_begin}


def faults(size: int) -> Values:
    """Measure when all ranks know of a loss, and when the new ranks of an elastic job have connected."""
    found = {KILLED: _known(size, RankKilled(size // 2, FAULT_S))}
    if size <= PER_HOST:
        return found
    for silent, plain, restarts in zip((False, True), (CRASHED, SILENT), RESTARTS, strict=True):
        fault = HostLost(size // PER_HOST // 2, FAULT_S, silent)
        restart = _run(size, training(SMALL, compute=0.2, steps=1000), faults=[fault], elastic=True).restart
        assert restart is not None
        found |= {plain: _known(size, fault), restarts: restart.wired}
    return found


def stall(size: int) -> Values:
    """Measure the report when each second rank does not submit the gradients."""

    def program(rank: int, _: int) -> Iterator[Action]:
        yield from training(TENSORS, compute=0.08, steps=1)(rank, size)
        if rank % 2:
            yield Hang()
        yield Submit(TENSORS)
        yield Wait()

    job = simulate(max(size // PER_HOST, 1), min(size, PER_HOST), program, hang_reports=True, until=125.0)
    (report, *_) = job.hang_reports
    return {REPORT: len(report.text), REPORT_CPU: job.hang_report_cpu}


def _known(size: int, fault: HostLost | RankKilled) -> float:
    failure = _run(size, training(SMALL, compute=0.2, steps=1000), faults=[fault]).failure
    assert failure is not None
    assert math.isfinite(failure.known), f"{fault}: a rank never knew"
    return failure.known - failure.at


def _run(
    size: int,
    program: Program,
    network: Network | None = None,
    faults: Sequence[HostLost | RankKilled] = (),
    *,
    cpu: float | None = None,
    elastic: bool = False,
) -> Simulation:
    hosts = max(size // PER_HOST, 1)
    job = simulate(hosts, min(size, PER_HOST), program, network, faults, cpu=cpu, elastic=elastic)
    assert not job.unfinished, f"{len(job.unfinished)} ranks wait for ever"
    return job


TOPICS: tuple[Callable[[int], Values], ...] = (steps, stall, delays, straggler, faults)


def measure(ranks: int, options: Options) -> tuple[list[Outcome], list[str]]:  # noqa: ARG001
    """Simulate each number of ranks: each topic in a fresh process, two at a time."""
    largest_first = sorted(options.sizes, reverse=True)
    tasks = [(topic, size) for size in largest_first for topic in TOPICS] * options.repeats
    samples: dict[int, dict[Key, list[float]]] = {size: {} for size in options.sizes}
    begun = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(2, maxtasksperchild=1) as pool:
        for done, (size, values) in enumerate(pool.imap_unordered(_answer, tasks), 1):
            for key, value in values.items():
                samples[size].setdefault(key, []).append(value)
            if sys.stderr.isatty():
                text = f"{done} of {len(tasks)} simulations, {time.monotonic() - begun:.0f} s"
                print(text, end="\n" if done == len(tasks) else "\r", file=sys.stderr)
    outcomes = [outcome for size in options.sizes for outcome in _outcomes(size, samples[size])]
    return [*outcomes, *_growth(samples)], [f"{PER_HOST} ranks on each host; ResNet-50's 161 gradients"]


def _answer(task: tuple[Callable[[int], Values], int]) -> tuple[int, Values]:
    topic, size = task
    return size, topic(size)


def _outcomes(size: int, samples: Mapping[Key, Sequence[float]]) -> Iterator[Outcome]:
    for unit in dict.fromkeys(unit for unit, _ in samples):
        figures = [Figures.of(name, OURS, each) for (of, name), each in samples.items() if of == unit]
        yield Outcome(label(size, unit), size, unit, figures)


def _growth(samples: Mapping[int, Mapping[Key, Sequence[float]]]) -> Iterator[Outcome]:
    """Yield how much rank 0's figures grow between two numbers of ranks, over H log H of both."""
    few, many = 1024, 10000
    if few not in samples or many not in samples:
        return
    expected = _h_log_h(many) / _h_log_h(few)
    figures = []
    for unit, name in OF_RANK_0:
        pairs = zip(samples[few][unit, name], samples[many][unit, name], strict=True)
        figures.append(
            Figures.of(f"{unit} {name}", PEER, [after / before / expected for before, after in pairs])
        )
    yield Outcome(GROWTH, 0, "x", figures)


def _h_log_h(size: int) -> float:
    hosts = size / PER_HOST
    return hosts * math.log2(hosts)


GROWTH = "growth from 1,024 to 10,000 ranks, over that of H log H with H hosts"


def label(size: int, unit: str) -> str:
    """Return the label of the figures in a unit."""
    return f"{size:,} ranks, {unit}"


def _targets() -> Iterator[Target]:
    def at_most(size: int, key: Key, least: float, moonshot: float) -> Target:
        text = f"{key[1]}, {size:,} ranks"
        return Target(text, label(size, key[0]), key[1], (), least, moonshot, fewer=True, ranks=(1,))

    yield at_most(10000, DELAYS, 4 * math.log2(1250), 6)
    yield at_most(10000, MOST_CPU, 5e-3, 1e-3)
    yield at_most(10000, REPORT, 4000, 2000)
    for key in (KILLED, CRASHED, SILENT):
        yield at_most(10000, key, 8.0, 5.0)
    for size, first, cached, memory in ((1024, 0.1, 2e-3, 200), (10000, 1.5, 20e-3, 200)):
        yield at_most(size, CPU_FIRST, first, first / 10)
        yield at_most(size, CPU, cached, cached / 10)
        yield at_most(size, MEMORY, memory, memory / 100)
    for unit, name in OF_RANK_0:
        yield Target(f"{unit} {name}, growth over H log H", GROWTH, f"{unit} {name}", (), 1, 0.5, True, (1,))


QUESTION = Question(
    name="scale",
    title="scale: simulated jobs of 8 to 10,000 ranks",
    sizes_are="simulated ranks",
    sizes=(8, 64, 512, 1024, 4096, 10000),
    tiny=(8, 72),
    ranks=(1,),
    repeats=1,
    probe=measure,
    targets=tuple(_targets()),
    log_sizes=True,
    by_size=True,
)

if __name__ == "__main__":
    sys.exit(main(QUESTION))
