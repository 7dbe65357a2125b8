"""ray: the start of ranks on Ray beside pyhvd.Hosts, their processor time, calls, and an elastic restart."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from benchmarks.harness import FLOOR, OURS, Figures, Outcome
from benchmarks.question import Options, Question, main
from benchmarks.ray import (
    HOSTS,
    RAY,
    Start,
    describe_ray,
    ray_here,
    start_on_hosts,
    start_on_ray,
    time_restart,
)
from benchmarks.report import Target

START = "from start() to the result of the first allreduce"
CPU = "processor time of driver, actors, agents and ranks until then"
FIRST_RUN, LATER_RUN = "the first run() of an allreduce", "the second run()"
RESTART = "from the end of a rank to the next allreduce of all, elastic"
_WAYS: Mapping[str, Callable[[int], Start]] = {RAY: start_on_ray, HOSTS: start_on_hosts}


def measure(ranks: int, options: Options) -> tuple[list[Outcome], list[str]]:
    """Start Ray in this process, and measure all in it."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with ray_here(ranks):
        for way in _WAYS.values():
            way(ranks)  # the first start reads files that later ones find in memory
        for _ in _turns(options):
            for name, way in _WAYS.items():
                start = way(ranks)
                for case, seconds in zip((START, CPU, FIRST_RUN, LATER_RUN), start, strict=True):
                    found[case][name].append(seconds)
            found[RESTART][RAY].append(time_restart(ranks))
        return [_outcome(case, samples) for case, samples in found.items()], [describe_ray()]


def _turns(options: Options) -> Iterable[int]:
    """Yield at least twice, then until the time of a case is over."""
    until = time.monotonic() + options.seconds
    for turn in range(options.repeats):
        if turn < 2 or time.monotonic() < until:
            yield turn


def _outcome(case: str, samples: Mapping[str, list[float]]) -> Outcome:
    figures = [Figures.of(name, OURS if name == RAY else FLOOR, samples[name]) for name in samples]
    return Outcome(case, 0, "s", figures)


QUESTION = Question(
    name="ray",
    title="ray: ranks on Ray beside pyhvd.Hosts, from start() to the first allreduce, and later",
    sizes_are="no sizes: each case has its own",
    sizes=(4,),
    tiny=(4,),
    ranks=(4,),
    repeats=10,
    seconds=120.0,
    probe=measure,
    targets=(
        Target("processor seconds of a start", CPU, RAY, (), 4.0, 2.0, fewer=True, ranks=(4,)),
        Target("start() against pyhvd.Hosts", START, RAY, (HOSTS,), 1.5, 1.0, fewer=True, ranks=(4,)),
        Target("the second run()", LATER_RUN, RAY, (), 0.02, 0.005, fewer=True, ranks=()),
        Target("an elastic restart", RESTART, RAY, (), 1.0, 0.25, fewer=True, ranks=()),
    ),
)

if __name__ == "__main__":
    sys.exit(main(QUESTION))
