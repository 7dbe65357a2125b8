"""busy: time to reduce 20 tensors while the user's thread runs pure Python.

The clock starts before the first submission, and stops when the loop finds the last tensor done. About every
10 us, the loop polls the handles or the last element of each array. After 0.1 s the loop ends, counts 0.1 s,
and waits for the rest.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyhvd as hvd
from benchmarks import peers
from benchmarks.harness import OURS, PEER, Case, Contender, World
from benchmarks.mpi import MPI
from benchmarks.question import Question, main
from benchmarks.report import Target
from benchmarks.tensors import Tensors

FLOATS = 256
GIVE_UP_SECONDS = 0.1
ASKED, SEEN = "pyhvd, done() of all handles", "pyhvd, seen in the arrays"


def cases(world: World, sizes: Sequence[int]) -> Iterator[Case]:
    """Yield a case per number of tensors."""
    hvd.init()
    world.note(f"{GIVE_UP_SECONDS * 1e3:g} ms means: not done by then; the user's thread waited for the rest")
    for count in sizes:
        tensors = Tensors([FLOATS] * count, world.rank, world.size)
        yield Case(label(count), tensors.nbytes, [_watched(way, tensors) for way in _ways(world, tensors)])


def label(count: int) -> str:
    """Return a case's label."""
    return f"{count} tensors of {FLOATS} floats"


@dataclass(frozen=True)
class _Way:
    """How to submit the tensors, poll one (None: poll its array), and wait for it."""

    name: str
    submit: Callable[[], list[Any]]
    done: Callable[[Any], bool] | None
    wait: Callable[[Any], Any]
    kind: str = PEER
    init: Callable[[], None] | None = None


def _ways(world: World, tensors: Tensors) -> Iterator[_Way]:
    arrays = tensors.arrays
    named = [(array, f"busy.{t}") for t, array in enumerate(arrays)]

    def ours() -> list[Any]:
        return [hvd.allreduce_async_(array, name=name, op=hvd.Sum) for array, name in named]

    def mpi() -> list[Any]:
        return [world.comm.Iallreduce(MPI.IN_PLACE, array) for array in arrays]

    yield _Way(ASKED, ours, lambda handle: handle.done(), lambda handle: handle.wait(), OURS)
    yield _Way(SEEN, ours, None, lambda handle: handle.wait(), OURS)
    yield _Way("MPI Iallreduce, Test", mpi, lambda request: request.Test(), lambda request: request.Wait())
    yield _Way("MPI Iallreduce, seen", mpi, None, lambda request: request.Wait())
    if distributed := peers.start_gloo(world):
        members = [peers.torch_view(array) for array in arrays]

        def gloo() -> list[Any]:
            return [distributed.all_reduce(member, async_op=True) for member in members]

        yield _Way("gloo, is_completed()", gloo, lambda work: work.is_completed(), lambda work: work.wait())
    if horovod := peers.load_horovod(world):
        tensor_of = [(peers.torch_view(array), name) for array, name in named]

        def old() -> list[Any]:
            return [horovod.allreduce_async_(member, name=name, op=horovod.Sum) for member, name in tensor_of]

        yield _Way("Horovod, poll()", old, horovod.poll, horovod.synchronize, init=horovod.init)


def _watched(way: _Way, tensors: Tensors) -> Contender:
    """Return a contender that submits, then computes and polls in turn."""
    handles: list[Any] = []
    ends = [array[-1:] for array in tensors.arrays]
    before: list[float] = []

    def prepare() -> None:
        if way.init is not None:
            way.init()
        tensors.fill()
        before[:] = [end.item() for end in ends]

    def run() -> None:
        give_up = time.perf_counter() + GIVE_UP_SECONDS
        handles[:] = way.submit()
        left = len(handles)
        while left and time.perf_counter() < give_up:
            _compute()
            while left and is_done(left - 1):
                left -= 1

    def is_done(at: int) -> bool:
        return way.done(handles[at]) if way.done is not None else ends[at].item() != before[at]

    def finish() -> None:
        for handle in handles:
            way.wait(handle)
        handles.clear()

    noisy = way.init is not None
    return Contender(
        way.name, run, prepare=prepare, finish=finish, check=tensors.check, kind=way.kind, noisy=noisy
    )


def _compute() -> int:
    """Run pure Python for about 10 us."""
    value = 1
    for _ in range(150):
        value = (value * 1103515245 + 12345) % 2147483648
    return value


QUESTION = Question(
    name="busy",
    title="busy: 20 cached tensors while the user's thread runs pure Python",
    sizes_are="how many tensors",
    sizes=(20,),
    tiny=(3,),
    repeats=60,
    cases=cases,
    targets=(Target("all done, the user's thread busy", label(20), ASKED, (), 1e-3, 0.2e-3, fewer=True),),
)

if __name__ == "__main__":
    sys.exit(main(QUESTION))
