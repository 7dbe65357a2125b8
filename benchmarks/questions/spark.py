"""spark: the time from pyhvd.spark.run() to the first sum, and of averaging gradients inside executors."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from typing import Any

from benchmarks.harness import FLOOR, OURS, PEER, Figures, Outcome
from benchmarks.question import Options, Question, main
from benchmarks.report import Target, show, show_bytes
from benchmarks.spark import (
    EMPTY,
    PYHVD,
    TCP,
    TREE,
    WAYS,
    describe_spark,
    spark_context,
    time_empty_job,
    time_start,
)
from benchmarks.spark_ranks import ALL

START = "from run() to the first collective"
# Each way runs so many steps per turn, since the ways cannot use the slots at the same time.
_TURN = 3


def measure(ranks: int, options: Options) -> tuple[list[Outcome], list[str]]:
    """Start a session and measure both in it."""
    with spark_context(ranks) as context:
        cold = time_start(ranks)[ALL]
        outcomes = [_start(context, ranks, options.repeats)]
        outcomes += [_averaging(context, ranks, nbytes, options) for nbytes in options.sizes]
        return outcomes, [
            describe_spark(context),
            f"{START}: in a warm session; the first time in a session it took {show(cold, 's')}",
            f"{TREE}: the driver as parameter server; a step ends when the average has been broadcast",
        ]


def _start(context: Any, ranks: int, repeats: int) -> Outcome:
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(repeats):
        for phase, seconds in time_start(ranks).items():
            found[phase].append(seconds)
        found[EMPTY].append(time_empty_job(context, ranks))
    figures = [Figures.of(name, FLOOR if name == EMPTY else OURS, found[name]) for name in found]
    return Outcome(START, 0, "s", figures)


def _averaging(context: Any, ranks: int, nbytes: int, options: Options) -> Outcome:
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    began = time.monotonic()
    while (done := len(found[PYHVD])) < options.repeats:
        if done >= 2 * _TURN and time.monotonic() > began + options.seconds:
            break
        for name, way in WAYS.items():
            found[name] += way(context, ranks, nbytes, min(_TURN, options.repeats - done))
    figures = [Figures.of(name, PEER if name == TREE else OURS, found[name]) for name in WAYS]
    return Outcome(label(nbytes), nbytes, "s", figures)


def label(nbytes: int) -> str:
    """Return the label of a case of averaging."""
    return f"a step of averaging {show_bytes(nbytes)}"


_LARGE = 100 << 20
QUESTION = Question(
    name="spark",
    title="spark: pyhvd.spark.run to the first collective, and averaging gradients inside Spark",
    sizes_are="bytes of gradients",
    sizes=(1 << 20, 10 << 20, _LARGE),
    tiny=(1 << 16,),
    repeats=12,
    probe=measure,
    targets=(
        Target("run() to the first collective", START, ALL, (), 3.0, 1.0, fewer=True, ranks=()),
        Target(
            f"{show_bytes(_LARGE)} against treeAggregate",
            label(_LARGE),
            PYHVD,
            (TREE,),
            10.0,
            100.0,
            ranks=(),
        ),
        Target("... over TCP", label(_LARGE), TCP, (TREE,), 10.0, 20.0, ranks=()),
    ),
)

if __name__ == "__main__":
    sys.exit(main(QUESTION))
