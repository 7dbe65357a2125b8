"""What the ranks of elastic jobs in Spark run."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np

import pyhvd as hvd

STEPS = 30
SUM = STEPS * (STEPS + 1) / 2
AGENT = b"pyhvd.spark.elastic_task"


def train(fault: str = "", at: int = 10) -> tuple[int, int, float, int]:
    """Add up the steps; in generation 0 rank 1 dies as `fault` says. Return rank, size, sum, generation."""
    hvd.init()
    state = hvd.elastic.ObjectState(step=0, total=np.zeros(1))

    @hvd.elastic.run
    def go(state: Any) -> None:
        while state.step < STEPS:
            if state.step == at and hvd.rank() == hvd.size() - 1:
                die(fault)
            state.total += hvd.allreduce(np.full(1, state.step + 1.0), op=hvd.Average, name="total")
            state.step += 1
            state.commit()

    go(state)
    return hvd.rank(), hvd.size(), float(state.total[0]), hvd.elastic.generation()


def die(fault: str) -> None:
    if fault == "always":
        raise ValueError("not again")
    if hvd.elastic.generation() or not fault:
        return
    os.kill(os.getpid() if fault == "rank" else agent_of(os.getpid()), signal.SIGKILL)
    signal.pause()


def agent_of(pid: int) -> int:
    """Return the agent of a rank: an ancestor."""
    while AGENT not in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid
