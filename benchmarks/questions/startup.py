"""startup: the time from a fresh interpreter to the first sum, without mpiexec's own time."""

from __future__ import annotations

import sys

from benchmarks import probe
from benchmarks.harness import OURS, PEER, Figures, Outcome
from benchmarks.question import Options, Question, main

_PHASES = ("import", "init", "first allreduce", "ready")


def measure(ranks: int, options: Options) -> tuple[list[Outcome], list[str]]:
    """Run each contender in its own job."""
    contenders, notes = probe.available()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for _ in range(options.repeats):
        for name in contenders:
            found[name].append(probe.start(ranks, name))
    notes.append("import: numpy and the library; init: of mpi4py, its import of MPI, which runs MPI_Init")
    return [
        Outcome(
            "ready: all of these" if phase == "ready" else phase,
            0,
            "s",
            [
                Figures.of(name, OURS if name == probe.OURS else PEER, [each[phase] for each in found[name]])
                for name in contenders
            ],
        )
        for phase in _PHASES
    ], notes


QUESTION = Question(
    name="startup",
    title="startup: import, init and a first allreduce of 4 bytes, in fresh processes",
    sizes_are="nothing",
    sizes=(4,),
    tiny=(4,),
    repeats=7,
    probe=measure,
)

if __name__ == "__main__":
    sys.exit(main(QUESTION))
