"""large: one tensor of 4 bytes to 1 GiB, reduced in place."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from benchmarks import peers
from benchmarks.harness import Case, World
from benchmarks.question import Question, main
from benchmarks.report import Target, show_bytes
from benchmarks.tensors import Tensors

KIB, MIB = 1 << 10, 1 << 20
LOOPED = 4 * MIB
"""Bytes per repetition: a repetition reduces smaller tensors several times, and times them together."""


def cases(world: World, sizes: Sequence[int]) -> Iterator[Case]:
    """Yield a case per size."""
    for nbytes in sizes:
        loops = max(1, min(100, LOOPED // nbytes))
        tensors = Tensors([max(1, nbytes // 4)], world.rank, world.size, loops=loops)
        name = f"large.{nbytes}"
        contenders = [
            peers.pyhvd_singly(tensors, name),
            peers.pyhvd_shared(world, tensors, name),
            peers.mpi_separate(world, tensors, peers.RAW),
            peers.mpi_packed(world, tensors),
        ]
        if nbytes > 2 * MIB:
            contenders.append(peers.mpi_chunks(world, tensors))
        contenders += [
            *peers.gloo_singly(world, tensors),
            peers.memory_floor(tensors),
            *peers.horovod(world, tensors, name),
        ]
        yield Case(show_bytes(tensors.nbytes), tensors.nbytes, contenders)


QUESTION = Question(
    name="large",
    title="large: one tensor, in place, by size",
    sizes_are="bytes of the tensor",
    sizes=(4, KIB, 16 * KIB, 64 * KIB, 256 * KIB, *(MIB << shift for shift in (0, 2, 4, 6, 8, 10))),
    tiny=(4, 64 * KIB),
    repeats=60,
    cases=cases,
    targets=tuple(
        Target(f"{size} MiB{how}, over MPI Allreduce", f"{size} MiB", ours, (peers.RAW,), 2.5, 4.0)
        for how, ours in (("", peers.SINGLY), (" of pyhvd.empty()", peers.SHARED))
        for size in (1, 16, 64)
    ),
    log_sizes=True,
)

if __name__ == "__main__":
    sys.exit(main(QUESTION))
