"""The steps of ``python -m benchmarks simulation``, on a rank: ``simulation_ranks.py FILE SLOW``.

Rank 0 writes to FILE, for each kind of step, the time of each step on the slowest rank. SLOW is 1 if the
links are slow: then there are fewer steps. A step that computes sleeps meanwhile, as if a GPU computed: the
ranks share the machine's cores.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import pyhvd as hvd
from benchmarks.mpi import MPI
from benchmarks.tensors import resnet50

_WARM_UPS = 2


@dataclass(frozen=True)
class Kind:
    """A kind of step.

    Attributes
    ----------
    name : str
        In the report.
    counts : list of int
        The elements of its tensors.
    steps, slow_steps : int
        How many are measured; over slow links.
    compute : float
        Seconds of computing.
    parts : int
        In how many parts the tensors are submitted.
    """

    name: str
    counts: list[int]
    steps: int
    slow_steps: int
    compute: float = 0.0
    parts: int = 1


KINDS = (
    Kind("ResNet-50", resnet50(), 20, 7),
    Kind("ResNet-50 and 40 ms of computing", resnet50(), 20, 7, 0.04, 4),
    Kind("20 x 256 floats", [256] * 20, 400, 100),
)


def run_steps(kind: Kind, steps: int) -> list[float]:
    """Return the times of steps on this rank, after some to warm up."""
    arrays = [np.ones(count, np.float32) for count in kind.counts]
    named = [(array, f"{kind.name}.{t}") for t, array in enumerate(arrays)]
    size = -(-len(named) // kind.parts)
    parts = [named[at : at + size] for at in range(0, len(named), size)]
    ends = []
    MPI.COMM_WORLD.Barrier()
    for _ in range(_WARM_UPS + steps):
        handles = []
        for part in parts:
            if kind.compute:
                time.sleep(kind.compute / len(parts))
            handles += [hvd.allreduce_async_(array, name=name, op=hvd.Average) for array, name in part]
        for handle in handles:
            hvd.synchronize(handle)
        ends.append(time.perf_counter())
    times: list[float] = np.diff(ends[_WARM_UPS - 1 :]).tolist()
    return times


def main(arguments: Sequence[str]) -> None:
    """Run the steps of all kinds, and write their times on rank 0."""
    path, slow = arguments
    hvd.init()
    comm = MPI.COMM_WORLD
    found = {}
    for kind in KINDS:
        times = run_steps(kind, kind.slow_steps if slow == "1" else kind.steps)
        found[kind.name] = np.max(comm.allgather(times), axis=0).tolist()
    if comm.Get_rank() == 0:
        Path(path).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
