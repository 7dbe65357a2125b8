"""A program that trains, and whose ranks fail at points that its arguments name.

Each step adds ``step + 1`` to the weights, whatever the number of ranks. Rank 0 writes a line after each
commit, and when it begins; the first ranks of other hosts write one after each commit.

An argument is ``POINT:GENERATION:RANK[:ACTION]``. There the rank kills itself, or does what the action says:
it kills itself ``late``, raises an exception (``raise``), or sleeps (``hang``). The action of the point
``wire-up`` is the time in ms after which the rank is killed.

Points of a step are passed in one step of a generation, the fourth by default.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from types import ModuleType
from typing import Any

import numpy as np

import pyhvd as hvd
from pyhvd import elastic
from pyhvd.api import lifecycle
from pyhvd.elastic import exchange, loop
from pyhvd.job.commits.vault import Vault
from pyhvd.job.process.segments import segments_of
from tests.elastic.steps import steps, strikes_in

FAULTS = {tuple(words[:3]): "".join(words[3:]) for words in (each.split(":") for each in sys.argv[1:])}
GENERATION, RANK = os.environ.get("PYHVD_ELASTIC_GENERATION", "0"), os.environ["HOROVOD_RANK"]
LATE_S = 0.3
"""Time for other hosts to finish the commit."""
STEPS = steps()


def log(text: str) -> None:
    """Write a line at once; a file that is open in append mode keeps lines whole."""
    with open("log", "a", encoding="utf-8") as file:
        file.write(f"{time.time():.6f} {GENERATION} {text}\n")


def pass_point(point: str) -> None:
    """Fail here, if the arguments say so."""
    action = FAULTS.get((point, GENERATION, RANK), FAULTS.get((point, GENERATION, "all")))
    if action == "raise":
        log(f"raised rank {RANK} {point}")
        raise LookupError(f"at point {point}")
    if action == "hang":
        log(f"hangs rank {RANK} {point}")
        time.sleep(1000)
    if action is not None:
        time.sleep(LATE_S if action == "late" else 0)
        log(f"killed rank {RANK} {point} {' '.join(segments_of(os.getpid()))}")
        os.kill(os.getpid(), signal.SIGKILL)


def fail_in_wire_up() -> None:
    """Let the kernel end this rank while MPI connects it with the others, after so many ms."""
    if after := FAULTS.get(("wire-up", GENERATION, RANK)):
        log(f"killed rank {RANK} wire-up")
        signal.setitimer(signal.ITIMER_REAL, int(after) / 1000)


class Counted:
    """What the commits of this rank go through."""

    step = 0
    begin = 0


def is_time() -> bool:
    """Return whether this is the step in which ranks fail."""
    return Counted.step == Counted.begin + strikes_in()


def watch(module: ModuleType, name: str, before: str = "", after: str = "") -> None:
    """Let a rank fail before or after a function of the library."""
    function = getattr(module, name)

    def call(*args: Any) -> Any:
        pass_point(before)
        result = function(*args)
        pass_point(after)
        return result

    setattr(module, name, call)


def watch_the_vault() -> None:
    """Let a rank fail within a commit: while it copies, before the seal, and after it."""
    write_record = Vault._write_record

    def write(self: Any, slot: int, record: bytes) -> None:
        if is_time():
            pass_point("before_seal" if any(record) else "copying")
        write_record(self, slot, record)
        if is_time() and any(record):
            pass_point("after_seal")

    Vault._write_record = write  # type: ignore[method-assign]


pass_point("import")
watch(lifecycle, "Context", before="handshake")
watch(exchange, "divide_writing", after="sync")
watch(loop, "_make_room", before="leaving")
fail_in_wire_up()
hvd.init()
if os.environ.get("SAYS"):
    print(f"rank {RANK} of generation {GENERATION}", flush=True)
pass_point("init")
atexit.register(pass_point, "exit")
state = elastic.ObjectState(step=0, weights=np.zeros(1000), sampler=elastic.ElasticSampler(4000))
if "CALLBACKS" in os.environ:
    state.register_failure_callbacks([lambda: print("lost others", flush=True)])
state.register_reset_callbacks([lambda: pass_point("callback")])


@elastic.run
def train(state: Any) -> int:
    if hvd.rank() == 0:
        log(f"begin {state.step} {state.weights[0]:g} of {hvd.size()} on {hvd.cross_size()}")
    Counted.begin = state.step
    watch_the_vault()
    while state.step < STEPS:
        step = Counted.step = state.step
        if is_time():
            pass_point("func")
        middle = hvd.rank() - (hvd.size() - 1) / 2
        gradient = hvd.allreduce_async(np.full(1000, step + 1.0 + middle), name="gradient")
        if is_time():
            pass_point("exchange")
        state.weights += gradient.result()
        state.sampler.record_batch(step, 1)
        state.step += 1
        state.commit(durable="DURABLE" in os.environ)
        if hvd.rank() == 0:
            log(f"step {state.step} {state.weights[0]:g}")
        elif hvd.local_rank() == 0:
            log(f"copy {state.step}")
        time.sleep(float(os.environ.get("STEP_S", "0")))
        if is_time():
            pass_point("committed")
    return int(state.step)


train(state)
if hvd.rank() == 0:
    log(f"end {state.step} {state.weights[0]:g} of {hvd.size()} epoch {state.sampler.processed_num}")
pass_point("returned")
