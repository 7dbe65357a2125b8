"""What the ranks of ``python -m benchmarks elastic`` run.

``FAULT`` is ``calls``; or ``grow``, to run until a signal; or ``kill``: then the last rank kills itself in
each generation but the last. Ranks write a line with the time of each fault, and of the first allreduce of a
generation.
"""

import itertools
import os
import signal
import sys
import time

import numpy as np

import pyhvd as hvd
from pyhvd import elastic

FAULT, LAST = sys.argv[1], int(sys.argv[2])
_STEP_S = 0.05
_WARM_S = 4.0
_LOOPS = 2000
_COMMIT_BYTES = 100_000_000


def log(kind: str, value: float) -> None:
    """Write a line for the benchmark."""
    with open("times", "a", encoding="utf-8") as file:
        file.write(f"{kind} {value!r}\n")


def least(run: object, times: int = 7) -> float:
    """Return the least time of a call."""
    assert callable(run)
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        run()
        found.append(time.perf_counter() - begin)
    return min(found)


@elastic.run
def measure_calls(state: elastic.ObjectState) -> None:
    """Measure a commit of 100 MB, beside a copy of it, and a check."""
    target = np.zeros(_COMMIT_BYTES, np.uint8)
    copied = least(lambda: np.copyto(target, state.array))
    committed = least(state.commit)

    def check() -> None:
        for _ in range(_LOOPS):
            state.check_host_updates()

    checked = least(check) / _LOOPS
    if hvd.rank() == 0:
        log("commit", committed / copied)
        log("check", checked)


@elastic.run
def train(state: elastic.ObjectState) -> None:
    """Run steps; in each generation but the last, a rank dies."""
    generation = elastic.generation()
    steps = round((_WARM_S if generation == 0 else 1.0) / _STEP_S)
    for step in itertools.count() if FAULT == "grow" else range(steps):
        hvd.allreduce(np.ones(1, np.float32), name="step")
        if step == 0 and hvd.rank() == 0:
            log(f"first{generation}", time.time())
        time.sleep(_STEP_S)
        state.commit()
    hvd.barrier()
    if FAULT == "kill" and generation < LAST and hvd.rank() == hvd.size() - 1:
        log(f"killed{generation}", time.time())
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.barrier()


hvd.init()
if FAULT == "calls":
    measure_calls(elastic.ObjectState(array=np.ones(_COMMIT_BYTES, np.uint8)))
else:
    train(elastic.ObjectState(steps=0))
