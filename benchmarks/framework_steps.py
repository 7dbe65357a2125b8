"""What the steps of all frameworks share: their tensors, their check, and the steps of numpy arrays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import pyhvd as hvd
from benchmarks.harness import FLOOR, OURS, PEER, Contender, World
from benchmarks.questions.frameworks import ASYNC, MANY, NOTHING, NUMPY
from benchmarks.tensors import Array, WrongResultError, resnet50

FACTOR = 2.0
SMALL = 256  # float32: 1 KiB


def counts_of(count: int) -> list[int]:
    """Return the elements of each tensor of a case."""
    return resnet50() if count == MANY else [SMALL] * count


def arrays_of(world: World, count: int) -> list[Array]:
    """Return this rank's tensors; their sums over the ranks are small integers."""
    return [
        np.full(elements, (world.rank + 1) * (1 + index % 7), np.float32)
        for index, elements in enumerate(counts_of(count))
    ]


def step_contender(
    world: World, name: str, step: Callable[[], Sequence[Any]], *, kind: str = PEER, reduces: bool = True
) -> Contender:
    """Return a contender of a step, which returns arrays that are ready; their ends are checked."""
    ranks = range(1, world.size + 1)
    last: list[Any] = []

    def run() -> None:
        last[:] = step()

    def check(_: bool) -> None:
        for index, result in enumerate(last):
            expected = FACTOR * (1 + index % 7) * (sum(ranks) if reduces else world.rank + 1)
            flat = np.asarray(result).reshape(-1)
            if flat[0] != expected or flat[-1] != expected:
                raise WrongResultError(f"{name}: tensor {index} is {flat[0]}, {flat[-1]}, not {expected}")

    return Contender(name, run, check=check, kind=kind)


def nothing_reduced(world: World, step: Callable[[], Sequence[Any]]) -> Contender:
    """Return the contender that only multiplies."""
    return step_contender(world, NOTHING, step, kind=FLOOR, reduces=False)


def numpy_contenders(world: World, framework: str, count: int) -> list[Contender]:
    """Return pyhvd's reductions of as many numpy arrays in place: sync, and async with a callback."""
    given = [FACTOR * array for array in arrays_of(world, count)]
    arrays = [array.copy() for array in given]
    name = f"frameworks.{framework}.{count}"

    def fill() -> None:
        for array, values in zip(arrays, given, strict=True):
            array[:] = values

    def sync() -> list[Array]:
        hvd.grouped_allreduce_(arrays, name=name, op=hvd.Sum)
        return arrays

    def by_callback() -> list[Array]:
        ended = threading.Event()
        handle = hvd.grouped_allreduce_async_(arrays, name=f"{name}.async", op=hvd.Sum)
        handle.add_done_callback(lambda _: ended.set())
        ended.wait()
        handle.result()
        return arrays

    made = [
        step_contender(world, NUMPY, sync, kind=OURS),
        step_contender(world, ASYNC, by_callback, kind=OURS),
    ]
    return [replace(each, prepare=fill) for each in made]
