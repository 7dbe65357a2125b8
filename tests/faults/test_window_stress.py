"""The shared window between processes that are stopped, continued and delayed at random: nothing is lost,
torn or stuck.

PYHVD_STRESS_ROUNDS sets the number of rounds (default 20,000; a long run takes 1,000,000). Four ranks make a
quarter of them without --long, because they share two cores.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import random
import signal
import time
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import Synchronized

import numpy as np
import pytest

from pyhvd.dtypes import Code, ReduceOp
from pyhvd.native import shared_memory
from tests import thinning

ROUNDS = int(os.environ.get("PYHVD_STRESS_ROUNDS", "20000"))
CHUNK = shared_memory.FLAT
SIZES = (1, 2, 500, 4096, 4097, 9000, 40_000)  # flat, one chunk, several chunks
STUCK_AFTER_S = 20.0

_fork = multiprocessing.get_context("fork")


def _rank(rank: int, size: int, memory: mmap.mmap, rounds: int, progress: Synchronized[int]) -> None:
    """Reduce, gather and exchange numbers that every rank can predict; any other value ends the process."""
    whole = np.frombuffer(memory, np.uint8)
    start = whole.__array_interface__["data"][0]
    area = shared_memory.area_bytes(CHUNK) + 128
    areas = [-(-(start + q * area) // 128) * 128 for q in range(size)]
    window = shared_memory.Window(rank, areas, CHUNK)
    draw = random.Random(rank)
    plan = random.Random(0)  # the same on every rank
    values = np.empty(max(SIZES) + 2 * size, np.int64)
    where = np.array([values.__array_interface__["data"][0]], np.int64)
    gathered = np.empty(size, np.int64)
    counts = np.full(size, 8, np.int64)
    for number in range(rounds):
        count = plan.choices(SIZES, (40, 20, 20, 8, 8, 3, 1))[0]
        if draw.random() < 0.001:
            time.sleep(draw.random() * 2e-3)
        values[:count] = number * (rank + 1) + np.arange(count)
        window.allreduce(where, where, np.array([0, count]), Code.INT64, ReduceOp.SUM, 1.0, 1.0)
        expected = number * size * (size + 1) // 2 + size * np.arange(count)
        assert (values[:count] == expected).all(), f"rank {rank}, round {number}: {count} elements are torn"
        if number % 7 == 0:
            values[0] = number + rank
            window.gather(int(where[0]), gathered.__array_interface__["data"][0], counts)
            assert gathered.tolist() == [number + q for q in range(size)], f"rank {rank}, round {number}"
        if number % 5 == 0:
            partner, amount = rank ^ (size // 2 if number % 2 else 1), count // 2 + rank
            values[:amount] = number + rank
            here = int(where[0]) + 8 * (max(SIZES) // 2 + size)
            theirs = count // 2 + partner
            window.pairwise_exchange(partner, int(where[0]), 8 * amount, here, 8 * theirs)
            heard = values[max(SIZES) // 2 + size :][:theirs]
            assert (heard == number + partner).all(), f"rank {rank}, round {number}: swapped with {partner}"
        progress.value = number + 1


def _disturb(ranks: list[BaseProcess], draw: random.Random) -> None:
    """Stop a random rank for a few ms, and continue it."""
    victim = draw.choice(ranks)
    if victim.is_alive() and victim.pid is not None:
        os.kill(victim.pid, signal.SIGSTOP)
        time.sleep(draw.random() * 5e-3)
        os.kill(victim.pid, signal.SIGCONT)
    time.sleep(draw.random() * 10e-3)


def rounds_of(size: int, most: int) -> int:
    """Return how many rounds ranks make; more ranks than cores take several times as long for each."""
    return most if size == 2 or thinning.long else most // 4


def watch(ranks: list[BaseProcess], progress: list[Synchronized[int]], rounds: int) -> None:
    """Start the ranks, disturb them, and check that each finishes its rounds."""
    for rank in ranks:
        rank.start()
    draw = random.Random(len(ranks))
    last, moved = 0, time.monotonic()
    try:
        while any(rank.is_alive() for rank in ranks):
            _disturb(ranks, draw)
            now = sum(counter.value for counter in progress)
            if now > last:
                last, moved = now, time.monotonic()
            assert time.monotonic() - moved < STUCK_AFTER_S, f"stuck: {[c.value for c in progress]}"
            assert not any(rank.exitcode for rank in ranks), "a rank has read what nobody wrote"
    finally:
        for rank in ranks:
            if rank.is_alive():
                rank.kill()
    assert [rank.exitcode for rank in ranks] == [0] * len(ranks)
    assert [counter.value for counter in progress] == [rounds] * len(ranks)


@pytest.mark.timeout(60 + ROUNDS // 500)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_that_are_stopped_and_continued(size: int) -> None:
    rounds = rounds_of(size, ROUNDS)
    memory = mmap.mmap(-1, size * (shared_memory.area_bytes(CHUNK) + 128))
    progress = [_fork.Value("q", 0) for _ in range(size)]
    ranks: list[BaseProcess] = [
        _fork.Process(target=_rank, args=(r, size, memory, rounds, progress[r]), daemon=True)
        for r in range(size)
    ]
    watch(ranks, progress, rounds)
