"""What the ranks of elastic jobs run that are functions."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np

import pyhvd as hvd

AGENTS = {b"pyhvd.job.agent.host_agent", b"pyhvd.job.agent.arriving_agent"}
STEPS = 30
SUM = STEPS * (STEPS + 1) / 2
HELD_S = 5


def train(fault: str = "") -> tuple[int, int, float, int]:
    """Add up the steps; the last rank or its agent fails. Return rank, size, sum and generation.

    After the fault "late agent", Spark cannot start the lost task again at once.
    """
    hvd.init()
    state = hvd.elastic.ObjectState(step=0, total=np.zeros(1))

    @hvd.elastic.run
    def go(state: Any) -> None:
        while state.step < STEPS:
            if state.step == STEPS // 3 and fault == "all":
                state.commit(durable=True)
                hvd.barrier()
            if state.step == STEPS // 3 and (fault == "all" or hvd.rank() == hvd.size() - 1):
                if fault == "always":
                    raise ValueError("not again")
                if fault and not hvd.elastic.generation():
                    if fault == "late agent":
                        hold_new_tasks()
                    os.kill(os.getpid() if fault == "rank" else agent_of(os.getpid()), signal.SIGKILL)
                    signal.pause()
            state.total += hvd.allreduce(np.full(1, state.step + 1.0), op=hvd.Average, name="total")
            state.step += 1
            state.commit()

    go(state)
    return hvd.rank(), hvd.size(), float(state.total[0]), hvd.elastic.generation()


def train_until_two() -> tuple[int, int, int]:
    """Commit until there are two ranks; return rank, size and generation."""
    hvd.init()

    @hvd.elastic.run
    def go(state: Any) -> None:
        while hvd.size() < 2:
            hvd.allreduce(np.ones(1), name="step")
            state.step += 1
            state.commit()

    go(hvd.elastic.ObjectState(step=0))
    return hvd.rank(), hvd.size(), hvd.elastic.generation()


def train_until_moved(folder: str) -> tuple[int, str]:
    """Commit until another generation has two ranks again; return rank, and the name of its Spark worker.

    Rank 0 writes down generation, number and size of each step.
    """
    hvd.init()

    @hvd.elastic.run
    def go(state: Any) -> None:
        while state.moved < 3:
            hvd.allreduce(np.ones(1), name="step")
            state.step += 1
            state.moved += hvd.elastic.generation() > 0 and hvd.size() == 2
            if hvd.rank() == 0:
                with open(f"{folder}/steps", "a") as file:
                    file.write(f"{hvd.elastic.generation()} {state.step} {hvd.size()}\n")
            time.sleep(0.05)  # a step's work
            state.commit()

    go(hvd.elastic.ObjectState(step=0, moved=0))
    return hvd.rank(), Path.cwd().parents[1].name


def agent_of(pid: int) -> int:
    """Return the agent of a rank: an ancestor."""
    return ancestor(pid, AGENTS)


def ancestor(pid: int, modules: set[bytes]) -> int:
    """Return the process, or the nearest one above it, that runs one of the modules."""
    while not modules & set(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")):
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


def hold_new_tasks() -> None:
    """Let this rank's executor of Spark start no Python task for `HELD_S` seconds: stop what forks them."""
    forks = ancestor(os.getpid(), {b"pyspark.daemon"})
    subprocess.Popen(["sh", "-c", f"sleep {HELD_S}; kill -CONT {forks}"], start_new_session=True)
    os.kill(forks, signal.SIGSTOP)
