"""results: the 161 gradients of ResNet-50, out of place beside in place: arrays, and tensors of torch."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyhvd as hvd
from benchmarks import peers
from benchmarks.harness import OURS, Case, Contender, World
from benchmarks.question import Question, main
from benchmarks.report import Target
from benchmarks.tensors import Tensors, resnet50

IN_PLACE, OUT_OF_PLACE = "pyhvd, in place", "pyhvd, out of place"
SYNCHRONOUS, GROUP = "pyhvd, out of place, one by one", "pyhvd, out of place, one group"
ARRAYS, SHARED, TENSORS = "arrays", "arrays of hvd.empty()", "tensors"


def cases(world: World, sizes: Sequence[int]) -> Iterator[Case]:
    """Yield a case of each kind per number of gradients."""
    peers.start_pyhvd()
    for count in sizes:
        tensors = Tensors(resnet50()[:count], world.rank, world.size)
        yield case(ARRAYS, hvd, tensors, tensors.arrays, list)
        shared = Tensors(resnet50()[:count], world.rank, world.size, empty=hvd.empty)
        yield case(SHARED, hvd, shared, shared.arrays, list)
        if importlib.util.find_spec("torch") is None:
            world.note("tensors: torch is not installed")
            continue
        torch: Any = importlib.import_module("torch")
        given = [torch.from_numpy(array) for array in tensors.arrays]
        verbs = importlib.import_module("pyhvd.torch")
        yield case(TENSORS, verbs, tensors, given, lambda results: [each.numpy() for each in results])


def case(
    label: str,
    verbs: Any,
    tensors: Tensors,
    given: Sequence[Any],
    to_arrays: Callable[[Sequence[Any]], list[Any]],
) -> Case:
    """Return a case whose contenders reduce what is ``given``, the memory of ``tensors``.

    A step's results are freed before the next step, as a program does that has applied its gradients.
    """
    names = [f"results.{label}.{len(given)}.{t}" for t in range(len(given))]

    def contender(name: str, run: Callable[[], Sequence[Any]]) -> Contender:
        results: list[Any] = []

        def check(thorough: bool) -> None:
            own, tensors.arrays = tensors.arrays, to_arrays(results)
            try:
                tensors.check(thorough)
            finally:
                tensors.arrays = own
                results.clear()

        return Contender(name, lambda: results.extend(run()), tensors.fill, check=check, kind=OURS)

    def by_handles(verb: Any, suffix: str) -> Callable[[], Sequence[Any]]:
        def run() -> Sequence[Any]:
            pairs = zip(given, names, strict=True)
            handles = [verb(each, name=f"{name}.{suffix}", op=hvd.Sum) for each, name in pairs]
            return [handle.result() for handle in handles]

        return run

    def one_by_one() -> Sequence[Any]:
        pairs = zip(given, names, strict=True)
        return [verbs.allreduce(each, name=f"{name}.sync", op=hvd.Sum) for each, name in pairs]

    def group() -> Sequence[Any]:
        results: Sequence[Any] = verbs.grouped_allreduce(list(given), name=f"{names[0]}.group", op=hvd.Sum)
        return results

    contenders = [
        contender(IN_PLACE, by_handles(verbs.allreduce_async_, "in")),
        contender(OUT_OF_PLACE, by_handles(verbs.allreduce_async, "out")),
        contender(SYNCHRONOUS, one_by_one),
        contender(GROUP, group),
    ]
    return Case(label, tensors.nbytes, contenders)


QUESTION = Question(
    name="results",
    title="results: the 161 gradients of ResNet-50 (102 MB), out of place beside in place",
    sizes_are="how many of the gradients",
    sizes=(161,),
    tiny=(5,),
    cases=cases,
    targets=tuple(
        Target(
            f"out of place, times in place: {label}", label, OUT_OF_PLACE, (IN_PLACE,), 1.4, 1.15, fewer=True
        )
        for label in (ARRAYS, TENSORS)
    ),
)

if __name__ == "__main__":
    sys.exit(main(QUESTION))
