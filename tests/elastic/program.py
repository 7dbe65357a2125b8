"""A program that trains, and whose ranks are killed at a point that its arguments name.

Each step adds ``step + 1`` to the weights, whatever the number of ranks. Rank 0 writes a line after each
commit, and when it begins. An argument is ``POINT:GENERATION:RANK``: there the rank kills itself.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import numpy as np

import pyhvd as hvd
from pyhvd import elastic
from pyhvd.job.vault import Vault
from tests.elastic.steps import STEPS

KILLED_AT = STEPS // 4
FAULTS = {tuple(each.split(":")) for each in sys.argv[1:]}
GENERATION, RANK = os.environ.get("PYHVD_ELASTIC_GENERATION", "0"), os.environ["HOROVOD_RANK"]


def log(text: str) -> None:
    """Write a line at once; a file that is open in append mode keeps lines whole."""
    with open("log", "a", encoding="utf-8") as file:
        file.write(f"{time.time():.6f} {GENERATION} {text}\n")


def pass_point(point: str) -> None:
    """Die here, if the arguments say so."""
    if (point, GENERATION, RANK) in FAULTS or (point, GENERATION, "all") in FAULTS:
        log(f"killed rank {RANK}")
        os.kill(os.getpid(), signal.SIGKILL)


def in_commit(step: int) -> bool:
    """Return whether the commit of this step is the one in which ranks die."""
    return step == KILLED_AT + int(GENERATION) * KILLED_AT


class Counted:
    """What the commits of this rank go through."""

    step = 0


def watch_the_vault() -> None:
    """Let a rank die within a commit: while it copies, before the seal, and after it."""
    write_record = Vault._write_record

    def write(self: Any, slot: int, record: bytes) -> None:
        if in_commit(Counted.step):
            pass_point("before_seal" if any(record) else "copying")
        write_record(self, slot, record)
        if in_commit(Counted.step) and any(record):
            pass_point("after_seal")

    Vault._write_record = write  # type: ignore[method-assign]


pass_point("import")
hvd.init()
if os.environ.get("SAYS"):
    print(f"rank {RANK} of generation {GENERATION}", flush=True)
pass_point("init")
state = elastic.ObjectState(step=0, weights=np.zeros(1000), sampler=elastic.ElasticSampler(4000))
if "CALLBACKS" in os.environ:
    state.register_failure_callbacks([lambda: print("lost others", flush=True)])
state.register_reset_callbacks([lambda: pass_point("callback")])


@elastic.run
def train(state: Any) -> int:
    if hvd.rank() == 0:
        log(f"begin {state.step} {state.weights[0]:g} of {hvd.size()}")
    watch_the_vault()
    while state.step < STEPS:
        step = Counted.step = state.step
        if in_commit(step):
            pass_point("func")
        middle = hvd.rank() - (hvd.size() - 1) / 2
        state.weights += hvd.allreduce(np.full(1000, step + 1.0 + middle), name="gradient")
        state.sampler.record_batch(step, 1)
        state.step += 1
        Counted.step = step
        state.commit(durable="DURABLE" in os.environ)
        if hvd.rank() == 0:
            log(f"step {state.step} {state.weights[0]:g}")
        time.sleep(float(os.environ.get("STEP_S", "0")))
        if in_commit(step):
            pass_point("committed")
    return int(state.step)


train(state)
if hvd.rank() == 0:
    log(f"end {state.step} {state.weights[0]:g} of {hvd.size()} epoch {state.sampler.processed_num}")
pass_point("returned")
