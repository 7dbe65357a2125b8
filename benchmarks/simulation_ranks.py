"""The steps of ``python -m benchmarks simulation``, on a rank: ``simulation_ranks.py FILE PACE``.

Rank 0 writes to FILE, for each kind of step, the time of each step: from the last rank's end of the step
before until the last rank's end, as the simulator counts it. All ranks read the clock of one machine. PACE is
fast or slow, as the links are, or tiny, for a test: it chooses the number of steps. A step that computes
sleeps meanwhile, as if a GPU computed: the ranks share the machine's cores.
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
    fast, slow, tiny : int
        How many are measured.
    compute, parts : float, int
        Seconds of computing, and in how many parts the tensors are submitted meanwhile.
    """

    name: str
    counts: list[int]
    fast: int
    slow: int
    compute: float = 0.0
    parts: int = 1
    tiny: int = 2


KINDS = (
    Kind("ResNet-50", resnet50(), 20, 7),
    Kind("ResNet-50 and 40 ms of computing", resnet50(), 20, 7, 0.04, 4),
    Kind("20 x 256 floats", [256] * 20, 2000, 1000),
)


def run_steps(kind: Kind, steps: int) -> list[float]:
    """Return when each step ended on this rank, after some to warm up; first, when the last of those did."""
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
    return ends[_WARM_UPS - 1 :]


def main(arguments: Sequence[str]) -> None:
    """Run the steps of all kinds, and write their times on rank 0."""
    path, pace = arguments
    hvd.init()
    comm = MPI.COMM_WORLD
    found = {}
    for kind in KINDS:
        ends = comm.allgather(run_steps(kind, getattr(kind, pace)))
        found[kind.name] = np.diff(np.max(ends, axis=0)).tolist()
    if comm.Get_rank() == 0:
        Path(path).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
