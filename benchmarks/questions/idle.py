"""idle: a rank's CPU use while nothing is submitted."""

from __future__ import annotations

import sys

from benchmarks import probe
from benchmarks.harness import OURS, PEER, Figures, Outcome
from benchmarks.question import Options, Question, main
from benchmarks.report import Target


def measure(ranks: int, options: Options) -> tuple[list[Outcome], list[str]]:
    """Run each contender in its own job, in which it sleeps."""
    contenders, notes = probe.available()
    outcomes = []
    for seconds in options.sizes:
        found: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(options.repeats):
            for name in contenders:
                found[name].append(probe.start(ranks, name, idle=float(seconds))["idle"])
        figures = [Figures.of(name, OURS if name == probe.OURS else PEER, found[name]) for name in contenders]
        outcomes.append(Outcome(label(seconds), 0, "%", figures))
    notes.append("of one core, over all threads of the busiest process")
    return outcomes, notes


def label(seconds: int) -> str:
    """Return a case's label."""
    return f"{seconds} s of sleep"


QUESTION = Question(
    name="idle",
    title="idle: CPU of a rank while nothing is submitted",
    sizes_are="seconds",
    sizes=(10,),
    tiny=(1,),
    repeats=2,
    probe=measure,
    targets=(Target("% of a core", label(10), probe.OURS, (), 0.2, 0.01, fewer=True),),
)

if __name__ == "__main__":
    sys.exit(main(QUESTION))
