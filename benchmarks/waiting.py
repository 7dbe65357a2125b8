"""What waiting for a late rank of another host costs: the time to wake, and CPU; on a rank.

Ranks on simulated hosts have one clock, so a time on one rank is compared with a time on another one.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np

import pyhvd as hvd
from benchmarks.harness import OURS, PEER, Figures, Outcome, World

WOKEN, PIPE, BEYOND = "pyhvd, all other ranks", "a pipe on one host", "pyhvd, beyond the pipe"
WAITING = "pyhvd, the other ranks' CPU"
_IDLE_S = (0.3e-3, 3e-3, 20e-3)
_LATE_S = 2.0
_READER = "import os, struct, time\nwhile os.read(0, 1): os.write(1, struct.pack('d', time.monotonic()))"


def label_of_wake(idle: float) -> str:
    """Return the label of the case with this idle time, in seconds."""
    return f"woken after {idle * 1e3:g} ms"


WAKES = tuple(label_of_wake(idle) for idle in _IDLE_S)


def label_of_late(seconds: float) -> str:
    """Return the label of the case in which rank 0 is that late."""
    return f"{seconds:g} s for a late rank, 4 B"


LATE = label_of_late(_LATE_S)


class _Pipe:
    """A process of this host that sleeps in read(2) and answers with the time at which it woke."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", _READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def wake(self, idle: float) -> float:
        """Sleep for ``idle`` s, write to the pipe; return after how many seconds the reader woke."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        time.sleep(idle)
        sent = time.monotonic()
        os.write(self._process.stdin.fileno(), b"!")
        (woken,) = struct.unpack("d", os.read(self._process.stdout.fileno(), 8))
        return float(woken) - sent

    def close(self) -> None:
        self._process.communicate()


def waking(world: World, repeats: int) -> Iterator[Outcome]:
    """All ranks wait for rank 0, which sleeps first; beside it, a process that sleeps on a pipe."""
    hvd.init()
    word = np.ones(1, np.float32)
    pipe = _Pipe() if world.rank == 0 else None
    for idle in _IDLE_S:
        ours, beside = [], []
        for _ in range(repeats + 3):  # the first ones put the tensor into the response cache
            hvd.barrier()
            if pipe is not None:
                beside.append(pipe.wake(idle))
                time.sleep(idle)
            posted = time.monotonic()
            hvd.allreduce_(word, name="waiting.word", op=hvd.Max)
            times = world.comm.allgather((posted, time.monotonic()))
            ours.append(max(ended for _, ended in times[1:]) - times[0][0])
        ours, beside = ours[3:], world.comm.bcast(beside)[3:]
        figures = [
            Figures.of(WOKEN, OURS, ours),
            Figures.of(PIPE, PEER, beside),
            Figures.of(BEYOND, OURS, [max(a - b, 0.0) for a, b in zip(ours, beside, strict=True)]),
        ]
        yield Outcome(label_of_wake(idle), word.nbytes, "s", figures)
    if pipe is not None:
        pipe.close()


def late(world: World, repeats: int, seconds: float = _LATE_S) -> Iterator[Outcome]:
    """All ranks wait for rank 0, which is late; their CPU time, on the busiest of them."""
    hvd.init()
    word = np.ones(1, np.float32)
    samples = []
    for repeat in range(repeats + 1):  # the first one puts the tensor into the response cache
        hvd.barrier()
        if world.rank == 0 and repeat:
            time.sleep(seconds)
        before = time.process_time()
        hvd.allreduce_(word, name="waiting.late", op=hvd.Max)
        used = time.process_time() - before
        samples.append(max(world.comm.allgather(used if world.rank else 0.0)))
    yield Outcome(label_of_late(seconds), word.nbytes, "s", [Figures.of(WAITING, OURS, samples[1:])])
