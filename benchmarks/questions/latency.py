"""latency: one tensor of 4 bytes, reduced in place many times by a synchronous call."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import pyhvd as hvd
from benchmarks import peers
from benchmarks.harness import OURS, Case, Contender, World
from benchmarks.question import Question, main
from benchmarks.report import Target, show_bytes
from benchmarks.tensors import Tensors

LOOPS = 100
"""Number of calls timed together, after as many untimed calls."""


def cases(world: World, sizes: Sequence[int]) -> Iterator[Case]:
    """Yield a case per size."""
    for nbytes in sizes:
        tensors = Tensors([max(1, nbytes // 4)], world.rank, world.size, loops=LOOPS)
        name = f"latency.{nbytes}"
        contenders = [
            pyhvd_synchronous(tensors, name),
            peers.mpi_separate(world, tensors, peers.RAW),
            *peers.gloo_singly(world, tensors),
            *peers.horovod(world, tensors, name),
        ]
        yield Case(show_bytes(tensors.nbytes), tensors.nbytes, contenders)


def pyhvd_synchronous(tensors: Tensors, name: str) -> Contender:
    """Return pyhvd's contender, the synchronous call."""
    peers.start_pyhvd()
    array = tensors.arrays[0]

    def once() -> None:
        hvd.allreduce_(array, name=name, op=hvd.Sum)

    return peers.contender(peers.SINGLY, tensors, once, kind=OURS)


QUESTION = Question(
    name="latency",
    title=f"latency: one small tensor, synchronous, {LOOPS} calls back to back, per call",
    sizes_are="bytes of the tensor",
    sizes=(4,),
    tiny=(4,),
    repeats=300,
    cases=cases,
    targets=(
        Target("4 bytes, times MPI Allreduce", "4 B", peers.SINGLY, (peers.RAW,), 5.0, 2.0, fewer=True),
    ),
)

if __name__ == "__main__":
    sys.exit(main(QUESTION))
