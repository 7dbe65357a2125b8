"""small: 1000 tensors of 256 floats, submitted one by one and as one group."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from benchmarks import peers
from benchmarks.harness import Case, World
from benchmarks.question import Question, main
from benchmarks.report import Target
from benchmarks.tensors import Tensors

FLOATS = 256


def cases(world: World, sizes: Sequence[int]) -> Iterator[Case]:
    """Yield two cases per number of tensors; one case's names alone fit into the response cache."""
    for count in sizes:
        for group in (False, True):
            tensors = Tensors([FLOATS] * count, world.rank, world.size)
            name = f"small.{count}"
            contenders = [
                peers.pyhvd_group(tensors, name) if group else peers.pyhvd_singly(tensors, name),
                peers.mpi_packed(world, tensors),
                peers.mpi_flat(world, tensors),
                peers.mpi_separate(world, tensors),
                *([] if group else peers.gloo_singly(world, tensors)),
                *peers.gloo_buckets(world, tensors),
                peers.memory_floor(tensors),
                *peers.horovod(world, tensors, name, group),
            ]
            yield Case(label(count, group), tensors.nbytes, contenders)


def label(count: int, group: bool) -> str:
    """Return a case's label."""
    return f"{count} tensors as one group" if group else f"{count} tensors singly"


QUESTION = Question(
    name="small",
    title=f"small: 1000 tensors of {FLOATS} floats each",
    sizes_are="how many tensors",
    sizes=(1000,),
    tiny=(20,),
    repeats=60,
    cases=cases,
    targets=(
        Target(
            "singly, over pack + Allreduce + unpack in a numpy loop",
            label(1000, False),
            peers.SINGLY,
            (peers.PACKED,),
            0.5,
            1.0,
        ),
        Target(
            "as one group, over pack + Allreduce + unpack in a numpy loop",
            label(1000, True),
            peers.GROUP,
            (peers.PACKED,),
            5.0,
            10.0,
        ),
    ),
)

if __name__ == "__main__":
    sys.exit(main(QUESTION))
