"""Windows that are aborted at any moment, by one rank or two, while ranks are stopped and continued.

No rank hangs, every released rank can read a note, and completed reductions are right. PYHVD_STRESS_ABORTS
sets the number of windows (default 150), used one after the other.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import random
import threading
import time
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import Synchronized

import numpy as np
import pytest

from pyhvd.dtypes import Code, ReduceOp
from pyhvd.native import shared_memory
from tests.faults.test_window_stress import watch

WINDOWS = int(os.environ.get("PYHVD_STRESS_ABORTS", "150"))
CHUNK = shared_memory.FLAT
COUNTS = (1, 500, 4096, 9000)  # flat, one chunk, several chunks
LAST = 100_000

_fork = multiprocessing.get_context("fork")


def _note(rank: int) -> bytes:
    return f"rank {rank} has failed".encode() * (rank + 1)


def _rank(rank: int, size: int, memory: mmap.mmap, progress: Synchronized[int]) -> None:
    whole = np.frombuffer(memory, np.uint8)
    start = -(-whole.__array_interface__["data"][0] // 128) * 128
    area = -(-shared_memory.area_bytes(CHUNK) // 128) * 128
    draw = random.Random(rank)
    for which in range(WINDOWS):
        window = shared_memory.Window(rank, [start + (which * size + q) * area for q in range(size)], CHUNK)
        plan = random.Random(which)  # the same on every rank
        at = {q: plan.randrange(20) for q in plan.sample(range(size), plan.choice((1, 1, 2)))}
        first = min(at.values())
        beside = plan.random() < 0.5  # from another thread, in the middle of something
        last = _use(rank, size, window, at.get(rank, LAST), beside, draw)
        note = window.note()
        assert note in [_note(q) for q in at], f"rank {rank}, window {which}: {note!r}"
        assert first <= last < LAST, f"rank {rank}, window {which}: let out at {last}, aborted at {first}"
        assert beside or last <= max(at.values()), f"rank {rank}, window {which}: went on without a rank"
        progress.value = which + 1


def _use(
    rank: int, size: int, window: shared_memory.Window, end: int, beside: bool, draw: random.Random
) -> int:
    """Reduce until the abort; return the number of the reduction that did not complete."""
    values = np.empty(max(COUNTS), np.int64)
    where = np.array([values.__array_interface__["data"][0]], np.int64)
    helper = threading.Thread(target=_abort_soon, args=(window, rank, draw.random() * 1e-3))
    for number in range(LAST):
        if number == end and beside:
            helper.start()
        elif number == end:
            window.abort(_note(rank))
            return number
        count = COUNTS[number % len(COUNTS)]
        values[:count] = number * (rank + 1) + np.arange(count)
        done = window.allreduce(where, where, np.array([0, count]), Code.INT64, ReduceOp.SUM, 1.0, 1.0)
        if not done:
            break
        expected = number * size * (size + 1) // 2 + size * np.arange(count)
        assert (values[:count] == expected).all(), f"rank {rank}, reduction {number}: torn"
    if helper.ident is not None:
        helper.join()
    return number


def _abort_soon(window: shared_memory.Window, rank: int, seconds: float) -> None:
    time.sleep(seconds)
    window.abort(_note(rank))


@pytest.mark.timeout(60 + WINDOWS // 2)
@pytest.mark.parametrize("size", [2, 4])
def test_windows_that_are_aborted_at_any_moment(size: int) -> None:
    area = -(-shared_memory.area_bytes(CHUNK) // 128) * 128
    memory = mmap.mmap(-1, WINDOWS * size * area + 128)
    progress = [_fork.Value("q", 0) for _ in range(size)]
    ranks: list[BaseProcess] = [
        _fork.Process(target=_rank, args=(r, size, memory, progress[r]), daemon=True) for r in range(size)
    ]
    watch(ranks, progress, WINDOWS)
