"""torchdist: torch.distributed over pyhvd, beside the same calls over gloo, per synchronous call.

Both backends have a group of the same ranks in the same processes, and take turns. The bytes are those of
the larger side: what a rank gets of an all_gather, what it gives to a reduce_scatter. A send goes to rank 1,
which sends the tensor back. Objects are bytes, which torch pickles. The size 1 stands for the steps of two
models: the 161 gradients of ResNet-50 under DistributedDataParallel, and ten linear layers of 256 x 256 under
fully_shard.

An empty backend's all_reduce only makes a Work: the rest of its time is torch's own. DDP with a hook that
hands each bucket back takes the time that torch needs for the buckets themselves.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence

from benchmarks import peers
from benchmarks.harness import Case, World
from benchmarks.question import Question, main
from benchmarks.questions.torch import DDP, DDP_VIEWS, PYHVD as OPTIMIZER
from benchmarks.report import Target, show_bytes

PYHVD, GLOO = "pyhvd", "gloo"
EMPTY, EMPTY_SAME = "an empty backend", "an empty backend, always the same Work"
OURS_DDP, OURS_DDP_VIEWS = "DDP over pyhvd", "DDP over pyhvd, gradients as views"
DDP_ALONE = "DDP, a hook without communication"
FSDP, OURS_FSDP = "fully_shard over gloo", "fully_shard over pyhvd"
MODELS, FOUR, SMALL, MIDDLE, LARGE = 1, 4, 64, 4 << 20, 64 << 20
ALL_REDUCE, BARRIER = "all_reduce", "barrier"
# In the order of the tables; torchdist_calls.py has each.
CALLS = (
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "all_to_all",
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "send and recv",
)
GRADIENTS, LAYERS = "DDP, 161 gradients", "fully_shard, 10 layers of 256"


def label(call: str, nbytes: int) -> str:
    """Return a case's label."""
    return call if call == BARRIER else f"{call}, {show_bytes(nbytes)}"


def cases(world: World, sizes: Sequence[int]) -> Iterator[Case]:
    """Yield all_reduce at each size, the other calls at the sizes between, and the models."""
    if importlib.util.find_spec("torch") is None:
        raise SystemExit("this question needs torch: pip install torch")
    peers.start_pyhvd()
    from benchmarks import torchdist_calls, torchdist_steps

    groups = torchdist_calls.make_groups(world)
    for nbytes in sizes:
        if nbytes == MODELS:
            yield torchdist_steps.gradients(world, groups)
            yield torchdist_steps.layers(world, groups)
            continue
        yield torchdist_calls.case(world, groups, ALL_REDUCE, nbytes)
        if nbytes in (FOUR, LARGE):
            continue
        for call in CALLS:
            yield torchdist_calls.case(world, groups, call, nbytes)
        if nbytes == SMALL:
            yield torchdist_calls.case(world, groups, BARRIER, 0)


def targets() -> Iterator[Target]:
    """Yield the targets on one host."""
    four, large = label(ALL_REDUCE, FOUR), label(ALL_REDUCE, LARGE)
    yield Target(
        f"{four}, more than an empty backend", four, PYHVD, (EMPTY,), 6e-6, 3e-6, fewer=True, difference=True
    )
    for nbytes, bounds in ((SMALL, (0.1, 0.05)), (MIDDLE, (0.5, 0.25))):
        for call in (*CALLS, *([BARRIER] if nbytes == SMALL else [])):
            case = label(call, nbytes)
            yield Target(f"{case}, times gloo", case, PYHVD, (GLOO,), *bounds, fewer=True)
    yield Target(f"{large}, over gloo", large, PYHVD, (GLOO,), 3.0, 5.0)
    for ours in (OURS_DDP, OURS_DDP_VIEWS):
        text = f"161 gradients, {ours}"
        yield Target(f"{text}, over DDP over gloo", GRADIENTS, ours, (DDP, DDP_VIEWS), 3.0, 5.0)
        yield Target(f"{text}, times {OPTIMIZER}", GRADIENTS, ours, (OPTIMIZER,), 1.15, 1.05, fewer=True)
    yield Target(f"{LAYERS}, over gloo", LAYERS, OURS_FSDP, (FSDP,), 2.0, 3.0)


QUESTION = Question(
    name="torchdist",
    title="torchdist: torch.distributed over pyhvd, beside gloo, per synchronous call",
    sizes_are="bytes of the larger side, and 1 for the models",
    sizes=(FOUR, SMALL, MIDDLE, LARGE, MODELS),
    tiny=(FOUR, SMALL, MODELS),
    seconds=5.0,
    cases=cases,
    targets=tuple(targets()),
)

if __name__ == "__main__":
    sys.exit(main(QUESTION))
