"""metrics: the same work with and without the times of hvd.metrics(), in one interleaved run.

Counters are always on: only a comparison with a version without counters can show their cost.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from benchmarks import peers
from benchmarks.harness import OURS, Case, Contender, World
from benchmarks.question import Question, main
from benchmarks.questions.latency import LOOPS, pyhvd_synchronous
from benchmarks.questions.resnet import label
from benchmarks.report import Target, show_bytes
from benchmarks.tensors import Tensors, resnet50
from pyhvd.engine import context

ON = "pyhvd, with times"
OFF = "pyhvd, without"


def cases(world: World, sizes: Sequence[int]) -> Iterator[Case]:
    """Yield a case per number of gradients; 1 means synchronous calls with one tensor of 4 bytes."""
    for count in sizes:
        if count > 1:
            tensors = Tensors(resnet50()[:count], world.rank, world.size)
            made = peers.pyhvd_singly(tensors, f"metrics.{count}")
            yield Case(label(count), tensors.nbytes, switched(made))
        else:
            tensors = Tensors([1], world.rank, world.size, loops=LOOPS)
            made = pyhvd_synchronous(tensors, "metrics.small")
            yield Case(show_bytes(tensors.nbytes), tensors.nbytes, switched(made))


def switched(made: Contender) -> list[Contender]:
    """Return two contenders with the same arrays and names: one with times, one without."""
    return [
        replace(made, name=name, kind=OURS, prepare=_prepared(made, timed))
        for name, timed in ((ON, True), (OFF, False))
    ]


def _prepared(made: Contender, timed: bool) -> Callable[[], None]:
    def prepare() -> None:
        context.current().runtime.meter.timed = timed
        made.prepare()

    return prepare


QUESTION = Question(
    name="metrics",
    title="metrics: what measuring times for hvd.metrics() costs",
    sizes_are="number of ResNet-50's gradients; 1: one tensor of 4 bytes, many times",
    sizes=(1, 161),
    tiny=(5,),
    repeats=400,
    cases=cases,
    targets=(
        Target("resnet, with times over without", label(161), ON, (OFF,), 1.02, 1.01, fewer=True),
        Target("4 bytes, with times over without", "4 B", ON, (OFF,), 1.25, 1.05, fewer=True),
    ),
)

if __name__ == "__main__":
    sys.exit(main(QUESTION))
