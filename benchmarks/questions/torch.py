"""torch: steps of DistributedOptimizer, beside DistributedDataParallel over gloo and beside no communication.

The cases, by number:

1. the 161 gradients of ResNet-50: a backward pass hands them out, and the optimizer does nothing
2. 400 gradients of a transformer in bfloat16, likewise
3. 1,500 gradients of 1 KiB, likewise
4. ways to place the 161 gradients, which the backward pass writes into new memory
5. the whole step of ten linear layers of 256 x 256
6. the whole step of ResNet-50 for 4 images of 64 x 64
7. BatchNorm over 64 x 256 x 28 x 28, forward and backward, with statistics of all ranks
8. the step of an embedding with a sparse gradient of 4,096 rows
9. allreduces of 4 bytes: tensors and arrays
10. the hooks of 161 parameters
11. broadcast_parameters of 161 tensors
12. broadcast_parameters of 1,500 tensors of 1 KiB
13. the first step of an optimizer with 161 parameters, with its construction
14. seven backward passes of ten linear layers that accumulate gradients, without a reduction
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from benchmarks import peers
from benchmarks.harness import Case, World
from benchmarks.question import Question, main
from benchmarks.report import Target

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.harness import Contender

PYHVD, DDP, DDP_VIEWS = "pyhvd.torch", "DDP over gloo", "DDP over gloo, gradients as views"
ALONE, AFTER = "no communication", "pyhvd, one call after backward"
VIEWS, COPIES = "pyhvd, gradients stay in hvd.empty()", "pyhvd, hooks copy to hvd.empty()"
ARRAY, TENSOR, NEW_ARRAY, NEW_TENSOR = "array", "tensor", "array, out of place", "tensor, out of place"
NO_HOOK, EMPTY_HOOK, HOOKS = "no hooks", "empty hooks", "pyhvd.torch, hooks alone"
NO_SYNC, COUNTED = "pyhvd.torch, no_sync()", "pyhvd.torch, backward_passes_per_step=8"
FLAT = "one flat broadcast"
LABELS = (
    "161 gradients",
    "400 in bfloat16",
    "1500 of 1 KiB",
    "161 gradients, places",
    "10 layers of 256",
    "ResNet-50",
    "BatchNorm 64x256x28x28",
    "sparse embedding",
    "4 bytes",
    "hooks of 161",
    "broadcast 161",
    "broadcast 1500",
    "first step of 161",
    "7 passes without reduction",
)


def cases(world: World, sizes: Sequence[int]) -> Iterator[Case]:
    """Yield the cases of these numbers."""
    if importlib.util.find_spec("torch") is None:
        raise SystemExit("this question needs torch: pip install torch")
    peers.start_pyhvd()
    from benchmarks import torch_cases

    makers: tuple[Callable[[World], tuple[int, list[Contender]]], ...] = (
        torch_cases.resnet_gradients,
        torch_cases.transformer_gradients,
        torch_cases.small_gradients,
        torch_cases.places,
        torch_cases.layers,
        torch_cases.resnet,
        torch_cases.batch_norm,
        torch_cases.embedding,
        torch_cases.four_bytes,
        torch_cases.hooks,
        torch_cases.broadcast_resnet,
        torch_cases.broadcast_small,
        torch_cases.first_step,
        torch_cases.accumulation,
    )
    for number in sizes:
        yield Case(LABELS[number - 1], *makers[number - 1](world))


QUESTION = Question(
    name="torch",
    title="torch: one step of DistributedOptimizer, beside DistributedDataParallel over gloo",
    sizes_are="numbers of the cases",
    sizes=tuple(range(1, len(LABELS) + 1)),
    tiny=(5, 9),
    seconds=10.0,
    cases=cases,
    targets=(
        Target("161 gradients, over DDP", LABELS[0], PYHVD, (DDP, DDP_VIEWS), 4.0, 6.0),
        Target("400 in bfloat16, over DDP", LABELS[1], PYHVD, (DDP, DDP_VIEWS), 3.0, 5.0),
        Target("1500 of 1 KiB, over DDP", LABELS[2], PYHVD, (DDP, DDP_VIEWS), 1.0, 2.0),
        Target(
            "10 layers, more than no communication",
            *(LABELS[4], PYHVD, (ALONE,), 0.3e-3, 0.1e-3),
            fewer=True,
            difference=True,
        ),
        Target("ResNet-50, times no communication", LABELS[5], PYHVD, (ALONE,), 1.03, 1.01, fewer=True),
        Target(
            "BatchNorm, more than on one rank",
            *(LABELS[6], PYHVD, (ALONE,), 1e-3, 0.3e-3),
            fewer=True,
            difference=True,
        ),
        Target("4 bytes, tensor over array", LABELS[8], TENSOR, (ARRAY,), 1.5, 1.2, fewer=True),
        Target(
            "4 bytes, new tensor over new array", LABELS[8], NEW_TENSOR, (NEW_ARRAY,), 1.5, 1.2, fewer=True
        ),
        Target(
            "161 hooks, more than empty ones (2 us each)",
            *(LABELS[9], HOOKS, (EMPTY_HOOK,), 161 * 2e-6, 161 * 1e-6),
            fewer=True,
            difference=True,
        ),
        Target("broadcast of 161, times a flat one", LABELS[10], PYHVD, (FLAT,), 2.0, 1.5, fewer=True),
        Target("broadcast of 1500, times a flat one", LABELS[11], PYHVD, (FLAT,), 2.0, 1.5, fewer=True),
        Target("7 passes in no_sync(), times none", LABELS[13], NO_SYNC, (ALONE,), 1.02, 1.01, fewer=True),
        Target("7 of 8 passes, times none", LABELS[13], COUNTED, (ALONE,), 1.02, 1.01, fewer=True),
        Target("construction and first step", LABELS[12], PYHVD, (), 50e-3, 20e-3, fewer=True),
    ),
)

if __name__ == "__main__":
    sys.exit(main(QUESTION))
