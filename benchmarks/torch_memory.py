"""One rank of the question torch_memory: ``python -m benchmarks.torch_memory STEP FOLDER``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks import peers, torch_contenders as ways
from benchmarks.harness import World
from benchmarks.machine import CorePair
from benchmarks.mpi import MPI
from benchmarks.questions.torch import ALONE, COPIES, DDP, DDP_VIEWS, PYHVD, VIEWS
from benchmarks.tensors import resnet50
from benchmarks.torch_models import Handed

_STEPS = 5


def main() -> int:
    """Make some steps; write the resident set's peak, beyond what was resident before the model was made."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    comm = MPI.COMM_WORLD.Dup()
    world = World(comm, CorePair(comm))
    peers.start_pyhvd()
    if name in (DDP, DDP_VIEWS):
        peers.start_gloo(world)
    torch.set_num_threads(1)
    warm = _contender(world, name, [1000] * 161)
    warm.prepare()
    warm.run()
    warm.check(True)
    before = _resident("VmRSS")
    _reset_peak()
    one = _contender(world, name, resnet50()[::-1])
    for _ in range(_STEPS):
        one.prepare()
        one.run()
    peak = _resident("VmHWM") - before
    (folder / f"{world.rank}.json").write_text(json.dumps(peak))
    return 0


def _contender(world: World, name: str, counts: list[int]) -> Any:
    def make() -> Any:
        return Handed(counts, computed=True)

    if name == ALONE:
        return ways.alone_step(make)
    if name == PYHVD:
        return ways.pyhvd_step(PYHVD, make)
    if name == VIEWS:
        return ways.views_step(make)
    if name == COPIES:
        return ways.copies_step(make)
    return ways.ddp_step(world, name, make, as_views=name == DDP_VIEWS)[0]


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    sys.exit(main())
