"""memory: a rank's resident set when ready and after work, without the user's array."""

from __future__ import annotations

import sys

from benchmarks import probe
from benchmarks.harness import OURS, PEER, Figures, Outcome
from benchmarks.question import Options, Question, main
from benchmarks.report import show_bytes

_MIB = 1 << 20


def measure(ranks: int, options: Options) -> tuple[list[Outcome], list[str]]:
    """Run each contender in its own job."""
    contenders, notes = probe.available()
    outcomes = []
    for nbytes in options.sizes:
        found: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
        for _ in range(options.repeats):
            for name in contenders:
                found[name].append(probe.start(ranks, name, nbytes))
        size = show_bytes(nbytes)
        titles = {"rss": "ready", "worked": f"after reducing {size}", "peak": f"peak while reducing {size}"}
        for key, title in titles.items():
            figures = [
                Figures.of(
                    name, OURS if name == probe.OURS else PEER, [each[key] / _MIB for each in found[name]]
                )
                for name in contenders
            ]
            outcomes.append(Outcome(title, nbytes, "MiB", figures))
    notes.append("resident set of the largest rank, with shared pages, without the user's array")
    return outcomes, notes


QUESTION = Question(
    name="memory",
    title="memory: resident set of a rank",
    sizes_are="bytes of the array that is reduced",
    sizes=(64 * _MIB,),
    tiny=(_MIB,),
    repeats=3,
    probe=measure,
)

if __name__ == "__main__":
    sys.exit(main(QUESTION))
