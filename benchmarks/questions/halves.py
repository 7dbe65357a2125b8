"""halves: float16 and bfloat16 against float32 of the same number of bytes."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks import peers
from benchmarks.harness import Case, Contender, World
from benchmarks.mpi import MPI
from benchmarks.question import Question, main
from benchmarks.report import Target, show_bytes
from benchmarks.tensors import Tensors

MIB = 1 << 20


def cases(world: World, sizes: Sequence[int]) -> Iterator[Case]:
    """Yield a case per size."""
    dtypes: list[Any] = [np.dtype(np.float32), np.dtype(np.float16)]
    if importlib.util.find_spec("ml_dtypes") is None:
        world.note("bfloat16: ml_dtypes is not installed")
    else:
        dtypes.append(np.dtype(importlib.import_module("ml_dtypes").bfloat16))
    for nbytes in sizes:
        contenders: list[Contender] = []
        for dtype in dtypes:
            tensors = Tensors([max(1, nbytes // dtype.itemsize)], world.rank, world.size, dtype)
            contenders.append(peers.pyhvd_singly(tensors, f"halves.{nbytes}.{dtype}", ours(dtype.name)))
            if _mpi_can(world, dtype):
                contenders.append(
                    peers.mpi_separate(world, tensors, f"MPI Allreduce, {dtype}", ours(dtype.name))
                )
            contenders += peers.gloo_singly(world, tensors, f"gloo, {dtype}", ours(dtype.name))
            if dtype == np.float32:
                contenders.append(peers.memory_floor(tensors))
        yield Case(show_bytes(nbytes), nbytes, contenders)


def ours(dtype: str) -> str:
    """Return the name of pyhvd's contender."""
    return f"pyhvd, {dtype}"


def _mpi_can(world: World, dtype: Any) -> bool:
    """Return whether this MPI can sum this dtype; if not, add a note."""
    word = np.ones(1, dtype)
    try:
        world.comm.Allreduce(MPI.IN_PLACE, word)
    except (BufferError, KeyError, ValueError, MPI.Exception) as exc:
        cause = str(exc).splitlines()[0]
        world.note(f"MPI Allreduce, {dtype}: not possible ({type(exc).__name__}: {cause})")
        return False
    return float(word[0]) == world.size


QUESTION = Question(
    name="halves",
    title="halves: one large tensor of 2-byte floats, and float32 of as many bytes",
    sizes_are="bytes of the tensor",
    sizes=(64 * MIB,),
    tiny=(64 << 10,),
    cases=cases,
    targets=tuple(
        Target(
            f"{dtype}, 64 MiB, over float32 of the same bytes",
            "64 MiB",
            ours(dtype),
            (ours("float32"),),
            0.7,
            1.0,
        )
        for dtype in ("float16", "bfloat16")
    ),
)

if __name__ == "__main__":
    sys.exit(main(QUESTION))
