"""resnet: the 161 gradients of ResNet-50 (25.6 M float32, 102 MB), submitted one by one."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from benchmarks import peers
from benchmarks.harness import Case, World
from benchmarks.question import Question, main
from benchmarks.report import Target
from benchmarks.tensors import Tensors, resnet50


def cases(world: World, sizes: Sequence[int]) -> Iterator[Case]:
    """Yield a case per number of gradients."""
    for count in sizes:
        yield gradients(world, count)


def gradients(world: World, count: int) -> Case:
    """Return the case of the first gradients, in the order of the backward pass."""
    tensors = Tensors(resnet50()[:count], world.rank, world.size)
    contenders = [
        peers.pyhvd_singly(tensors, f"resnet.{count}"),
        peers.pyhvd_shared(world, tensors, f"resnet.{count}"),
        peers.pyhvd_group(tensors, f"resnet.{count}"),
        peers.mpi_packed(world, tensors),
        peers.mpi_flat(world, tensors),
        peers.mpi_chunks(world, tensors),
        peers.mpi_separate(world, tensors),
        *peers.gloo_singly(world, tensors),
        *peers.gloo_buckets(world, tensors),
        peers.memory_floor(tensors),
        *peers.horovod(world, tensors, f"resnet.{count}"),
    ]
    return Case(label(count), tensors.nbytes, contenders)


def label(count: int) -> str:
    """Return a case's label."""
    return f"{count} gradients"


QUESTION = Question(
    name="resnet",
    title="resnet: the 161 gradients of ResNet-50 (102 MB), submitted one by one",
    sizes_are="how many of the gradients",
    sizes=(161,),
    tiny=(5,),
    cases=cases,
    targets=(
        Target(
            "over pack + Allreduce + unpack",
            label(161),
            peers.SINGLY,
            (peers.PACKED,),
            4.0,
            6.0,
            mpi=("mpich",),
        ),
        Target("over one flat Allreduce", label(161), peers.SINGLY, (peers.FLAT,), 3.0, 4.5, mpi=("mpich",)),
        Target("over the best MPI way", label(161), peers.SINGLY, (peers.CHUNKS, peers.SEPARATE), 1.7, 2.5),
    ),
)

if __name__ == "__main__":
    sys.exit(main(QUESTION))
