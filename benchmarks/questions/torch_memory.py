"""torch_memory: the peak of a rank's memory during steps with the 161 gradients of ResNet-50."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import OURS, PEER, Figures, Outcome
from benchmarks.question import Options, Question, main, start_job
from benchmarks.questions.torch import ALONE, COPIES, DDP, DDP_VIEWS, PYHVD, VIEWS
from benchmarks.report import Target

_LABEL = "peak over the gradients"
_GRADIENTS = 4 * 25_557_032


def measure(ranks: int, options: Options) -> tuple[list[Outcome], list[str]]:
    """Run each contender in jobs of its own."""
    figures = []
    for name in (PYHVD, VIEWS, COPIES, DDP, DDP_VIEWS, ALONE):
        samples = [_peak(ranks, name) / _GRADIENTS for _ in range(options.repeats)]
        figures.append(Figures.of(name, OURS if name == PYHVD else PEER, samples))
    note = (
        "the largest rank's resident set with shared pages, without weights, over the bytes of the gradients"
    )
    return [Outcome(_LABEL, _GRADIENTS, "x", figures)], [note]


def _peak(ranks: int, name: str) -> int:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        code = start_job(ranks, ["-m", "benchmarks.torch_memory", name, folder])
        found: list[int] = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    if code or len(found) != ranks:
        raise SystemExit(f"{name} failed on {ranks} ranks (exit code {code})")
    return max(found)


QUESTION = Question(
    name="torch_memory",
    title="torch_memory: peak of a rank's memory during steps of ResNet-50's gradients",
    sizes_are="numbers of the models",
    sizes=(1,),
    tiny=(1,),
    repeats=3,
    probe=measure,
    targets=(Target("peak over the gradients alone", _LABEL, PYHVD, (ALONE,), 1.05, 1.02, fewer=True),),
)

if __name__ == "__main__":
    sys.exit(main(QUESTION))
