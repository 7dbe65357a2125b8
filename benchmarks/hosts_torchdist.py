"""torch.distributed across hosts: ``python -m benchmarks hosts torchdist``; cases on a rank, and targets.

A message between hosts takes as long for pyhvd as for gloo. So a small call is to be no slower than gloo's,
rather than ten times as fast as on one host.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.harness import Case, World
from benchmarks.questions import torchdist
from benchmarks.questions.torch import DDP, DDP_VIEWS
from benchmarks.report import Target

TORCHDIST = "torchdist"
QUESTIONS = {TORCHDIST: [""]}
SHAPES = ("2x1",)


def cases(world: World, *, tiny: bool) -> Iterator[Case]:
    """Yield the cases of the question on one host."""
    return torchdist.cases(world, torchdist.QUESTION.tiny if tiny else torchdist.QUESTION.sizes)


def targets(shapes: tuple[str, ...]) -> Iterator[Target]:
    """Yield the bounds to meet, and the goals: all are multiples of gloo's time."""
    calls = (torchdist.ALL_REDUCE, *torchdist.CALLS)
    found = [(torchdist.label(torchdist.ALL_REDUCE, torchdist.FOUR), torchdist.PYHVD, torchdist.GLOO)]
    for nbytes in (torchdist.SMALL, torchdist.MIDDLE):
        found += [(torchdist.label(call, nbytes), torchdist.PYHVD, torchdist.GLOO) for call in calls]
    found += [
        (torchdist.BARRIER, torchdist.PYHVD, torchdist.GLOO),
        (torchdist.label(torchdist.ALL_REDUCE, torchdist.LARGE), torchdist.PYHVD, torchdist.GLOO),
        (torchdist.GRADIENTS, torchdist.OURS_DDP, DDP),
        (torchdist.GRADIENTS, torchdist.OURS_DDP_VIEWS, DDP_VIEWS),
        (torchdist.LAYERS, torchdist.OURS_FSDP, torchdist.FSDP),
    ]
    for shape in shapes:
        for each, ours, peer in found:
            case = f"{shape}, {each}"
            yield Target(f"{case}: {ours}, times {peer}", case, ours, (peer,), 1.0, 0.5, fewer=True, ranks=())
