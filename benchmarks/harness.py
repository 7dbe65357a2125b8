"""Measure on every rank: contenders in turn, a barrier before each repetition, the slowest rank's time.

Owns the order of measurement and the statistics. Knows no files, flags or questions.

The harness interleaves the contenders of a case, A B C A B C ..., since the machine's speed changes: its
cores and its memory vary by a factor of two within minutes. Compare figures of one case only.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from benchmarks.machine import CorePair, Latency
from benchmarks.mpi import MPI

OURS, PEER, FLOOR = "pyhvd", "peer", "floor"
_WARM_UPS = 3


def _nothing() -> None:
    pass


def _unchecked(_thorough: bool) -> None:
    pass


@dataclass(frozen=True)
class Contender:
    """One way to do the work of a case.

    Attributes
    ----------
    name : str
        The printed name.
    run : callable
        Performs one repetition; the harness times nothing else.
    prepare, rehearse, finish : callable
        Called before the barrier that starts a repetition, between that barrier and ``run``, and after it.
    check : callable
        ``check(thorough)`` raises if the repetition's result is wrong.
    kind : str
        ``"pyhvd"``, ``"peer"``, or ``"floor"``: a lower bound of the work, not the same work.
    loops : int
        How often ``run`` does the work; the harness divides the time by this number.
    beside : str
        Name of pyhvd's contender in the table's comparison; if empty, the case's first contender.
    noisy : bool
        Whether it keeps a core busy from its start; the harness measures it after the others.
    """

    name: str
    run: Callable[[], None]
    prepare: Callable[[], None] = _nothing
    rehearse: Callable[[], None] = _nothing
    finish: Callable[[], None] = _nothing
    check: Callable[[bool], None] = _unchecked
    kind: str = PEER
    loops: int = 1
    beside: str = ""
    noisy: bool = False


@dataclass(frozen=True)
class Case:
    """Contenders that do the same work, and its size in bytes per rank."""

    label: str
    nbytes: int
    contenders: Sequence[Contender]


@dataclass(frozen=True)
class World:
    """The ranks of this job."""

    comm: MPI.Intracomm
    cores: CorePair
    notes: list[str] = field(default_factory=list)

    @property
    def rank(self) -> int:
        """This rank."""
        return self.comm.Get_rank()

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.comm.Get_size()

    def note(self, text: str) -> None:
        """Add a line to the report."""
        if text not in self.notes:
            self.notes.append(text)


@dataclass(frozen=True)
class Plan:
    """Limits of a measurement: at most ``repeats`` repetitions, and at most ``seconds`` per case.

    A peer that exceeds its share of the seconds drops out, so that a slow peer does not cost the others their
    samples. Every contender has at least ``least`` repetitions.
    """

    repeats: int
    seconds: float
    least: int = 5

    def goes_on(self, kind: str, turn: int, spent: float, all_spent: float) -> bool:
        """Return whether a contender takes part in a turn, by its own seconds and those of all contenders."""
        if turn < self.least:
            return True
        return all_spent < self.seconds and (kind == OURS or spent < self.seconds / 4)


class Figures(msgspec.Struct):
    """One contender's samples, in its case's unit and in the order of measurement, and their statistics."""

    name: str
    kind: str
    min: float
    median: float
    max: float
    p99: float
    samples: list[float]
    beside: str = ""

    @classmethod
    def of(cls, name: str, kind: str, samples: Sequence[float], beside: str = "") -> Figures:
        """Return the statistics of samples; p99 is the smallest sample that 99 % of them do not exceed."""
        ordered = sorted(samples)
        p99 = ordered[max(0, math.ceil(0.99 * len(ordered)) - 1)]
        return cls(
            name, kind, ordered[0], statistics.median(ordered), ordered[-1], p99, list(samples), beside
        )


class Outcome(msgspec.Struct):
    """The figures of one case."""

    label: str
    nbytes: int
    unit: str
    figures: list[Figures]
    latencies: list[Latency] = []

    def find(self, name: str) -> Figures | None:
        """Return a contender's figures, or None if it took no part."""
        return next((each for each in self.figures if each.name == name), None)


def ratio(above: Figures, below: Figures) -> float:
    """Return the ratio of the medians, over the repetitions in which both took part."""
    common = min(len(above.samples), len(below.samples))
    medians = [statistics.median(each.samples[:common]) for each in (above, below)]
    return medians[0] / max(medians[1], 1e-12)


def paired_ratio(above: Figures, below: Figures) -> float:
    """Return the median of the ratios of samples of the same repetition."""
    return statistics.median(a / max(b, 1e-12) for a, b in zip(above.samples, below.samples, strict=False))


def interleave(world: World, case: Case, plan: Plan) -> Outcome:
    """Measure a case; every rank gets the same outcome.

    Raises
    ------
    WrongResultError
        A contender's result is wrong.
    """
    latencies = [world.cores.measure()]
    figures: list[Figures] = []
    for noisy in (False, True):
        group = [each for each in case.contenders if each.noisy is noisy]
        if group:
            figures += _measure(world, group, plan)
            latencies.append(world.cores.measure())
    return Outcome(case.label, case.nbytes, "s", figures, latencies)


def _measure(world: World, contenders: Sequence[Contender], plan: Plan) -> list[Figures]:
    samples: list[list[float]] = [[] for _ in contenders]
    for contender in contenders:
        for _ in range(_WARM_UPS):
            _repetition(world, contender, thorough=True)
    spent = [0.0] * len(contenders)
    for turn in range(plan.repeats):
        going = [
            at for at, each in enumerate(contenders) if plan.goes_on(each.kind, turn, spent[at], sum(spent))
        ]
        for at in world.comm.bcast(going):
            start = time.monotonic()
            samples[at].append(_repetition(world, contenders[at], thorough=False))
            spent[at] += time.monotonic() - start
    slowest = world.comm.allreduce(samples, _longest)
    return [Figures.of(c.name, c.kind, times, c.beside) for c, times in zip(contenders, slowest, strict=True)]


def _repetition(world: World, contender: Contender, thorough: bool) -> float:
    contender.prepare()
    world.comm.Barrier()
    contender.rehearse()
    start = time.perf_counter()
    contender.run()
    seconds = time.perf_counter() - start
    contender.finish()
    contender.check(thorough)
    return seconds / contender.loops


def _longest(one: list[list[float]], other: list[list[float]]) -> list[list[float]]:
    return [
        [max(pair) for pair in zip(mine, theirs, strict=True)]
        for mine, theirs in zip(one, other, strict=True)
    ]
