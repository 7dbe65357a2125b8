"""frameworks: steps of JAX and TensorFlow that multiply tensors and reduce them, in compiled functions.

Each step is one compiled function over the 161 gradients of ResNet-50 (102 MB), or 20 tensors of 1 KiB. One
contender reduces nothing: the rest of a step is the collective. It is compared with pyhvd's own sync verb on
as many numpy arrays, which multiplies nothing, and with the framework's own collectives between processes:
JAX's gloo in a shard_map, TensorFlow's MultiWorkerMirroredStrategy. The callback door is what pyhvd uses
without its extension.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from functools import partial

from benchmarks.harness import Case, World
from benchmarks.question import Question, main
from benchmarks.report import Target

NOTHING, NATIVE, CALLBACK = "nothing reduced", "pyhvd, in the graph", "pyhvd, by callbacks"
NUMPY, ASYNC = "pyhvd, numpy in place", "pyhvd, numpy in place, async with a callback"
GLOO, MIRRORED = "JAX's gloo", "MultiWorkerMirroredStrategy"
JAX, TENSORFLOW = "JAX", "TensorFlow"
MANY, FEW = 161, 20


def label(framework: str, count: int) -> str:
    """Return a case's label."""
    return f"{framework}, {count} tensors"


def cases(world: World, sizes: Sequence[int]) -> Iterator[Case]:
    """Yield a case for each framework that is installed, and each number of tensors."""
    from benchmarks import jax_contenders, tensorflow_contenders

    found = {JAX: ("jax", jax_contenders), TENSORFLOW: ("tensorflow", tensorflow_contenders)}
    for framework, (module, contenders) in found.items():
        if importlib.util.find_spec(module) is None:
            world.note(f"{framework}: not installed")
            continue
        contenders.start(world)
        for count in sizes:
            yield contenders.case(world, count)


def targets() -> Iterator[Target]:
    """Yield the targets."""
    for framework, own in ((JAX, GLOO), (TENSORFLOW, MIRRORED)):
        many, few = label(framework, MANY), label(framework, FEW)
        more = partial(Target, fewer=True, difference=True)
        text = f"{many}: more than nothing reduced, times numpy"
        yield more(text, many, NATIVE, (NOTHING,), 1.3, 1.1, over=NUMPY)
        yield more(f"{few}: more than nothing reduced", few, NATIVE, (NOTHING,), 2e-4, 1e-4)
        yield Target(f"{many}, over {own}", many, NATIVE, (own,), 5.0, 10.0)
    many = label(JAX, MANY)
    yield Target(f"{many}, over callbacks", many, NATIVE, (CALLBACK,), 4.0, 8.0)
    text = f"{MANY} tensors: async with a callback, times sync"
    yield Target(text, many, ASYNC, (NUMPY,), 1.2, 1.05, fewer=True)


QUESTION = Question(
    name="frameworks",
    title="frameworks: a compiled step that multiplies tensors and reduces them",
    sizes_are="how many tensors: 161 are ResNet-50's gradients, others have 1 KiB",
    sizes=(MANY, FEW),
    tiny=(FEW,),
    seconds=20.0,
    cases=cases,
    targets=tuple(targets()),
)

if __name__ == "__main__":
    sys.exit(main(QUESTION))
