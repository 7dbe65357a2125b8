"""The fast path between processes that are stopped, continued and delayed at random: nothing is lost, torn
or stuck.

Every rank submits the same tensors in a different order. It waits for some, and leaves others to the
background thread, as a program would. PYHVD_STRESS_ROUNDS sets the number of rounds (default 6,000). Four
ranks make a quarter of them without --long, because they share two cores.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import Synchronized
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pyhvd.api.collectives import LOOKUP
from pyhvd.api.process_sets import global_process_set
from pyhvd.dtypes import Code, ReduceOp
from pyhvd.engine.context import ContextHolder, playing_rank
from pyhvd.engine.plans import Plan
from pyhvd.native import shared_memory
from pyhvd.native.shared_memory import GROUPED, IN_PLACE, WAITS, set_lookup, start
from pyhvd.negotiation.messages import Request, RequestType
from tests.faults.test_window_stress import rounds_of, watch

ROUNDS = int(os.environ.get("PYHVD_STRESS_ROUNDS", "6000"))

CHUNK = shared_memory.FLAT
SLOTS = 64
COUNTS = (1, 3, 500, 4096, 9000, 2)
GROUP = (7, 1200, 1)
SHARED = (3, 4)
"""Of COUNTS: arrays that every rank can reach, and that are reduced where they lie."""
ARENA = 8 * sum(COUNTS[which] for which in SHARED)

_fork = multiprocessing.get_context("fork")


class _Rank:
    """One rank's fast path, in memory that the parent has mapped."""

    def __init__(self, rank: int, size: int, memory: mmap.mmap) -> None:
        whole = np.frombuffer(memory, np.uint8)
        at = -(-_address(whole) // 128) * 128
        area = -(-shared_memory.area_bytes(CHUNK) // 128) * 128
        window = shared_memory.Window(rank, [at + q * area for q in range(size)], CHUNK)
        window.clear()
        base = at + size * area
        self.lane = shared_memory.FastPath(
            base, whole, rank, size, SLOTS, 1 << 16, False, 1e-3, lambda _: int(Code.INT64)
        )
        self.lane.attach({}, {}, {}, lambda: None)
        if rank == 0:
            self.lane.clear()
            self.lane.open_ready_set(0, range(size))
        arenas = [base + shared_memory.ready_table_bytes(size, SLOTS) + q * ARENA for q in range(size)]
        self.lane.know_arena(SimpleNamespace(start=arenas[rank], nbytes=ARENA))
        self.lane.open_set(0, window, arenas)
        for slot, request in enumerate(_requests()):
            self.lane.install(0, slot, request, 1, ReduceOp.SUM, 1.0, request.window, Plan())
            if rank == 0:
                self.lane.delegate(0, slot, 1)
        self.values = [np.empty(n, np.int64) for n in (*COUNTS, *GROUP)]
        first = arenas[rank] - at
        for which in SHARED:
            last = first + 8 * COUNTS[which]
            self.values[which] = whole[at - _address(whole) :][first:last].view(np.int64)
            first = last
        self.joined = False
        self.thread = threading.Thread(target=self._drive, daemon=True)

    def _drive(self) -> None:
        while True:
            self.lane.sleep(0.25)


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def _requests() -> list[Request]:
    kind, options = RequestType.ALLREDUCE, dict[str, Any](dtype=Code.INT64, op=ReduceOp.SUM)
    alone = [Request(kind, f"t{i}", shape=(n,), window=i in SHARED, **options) for i, n in enumerate(COUNTS)]
    size = len(GROUP)
    group = [
        Request(kind, f"g_{i}of{size}", shape=(n,), group="g", group_size=size, **options)
        for i, n in enumerate(GROUP, 1)
    ]
    return [*alone, *group]


def _main(
    rank: int, size: int, memory: mmap.mmap, meet: Any, rounds: int, progress: Synchronized[int]
) -> None:
    here = _Rank(rank, size, memory)
    meet.wait()
    here.thread.start()
    # start() returns None for a call that the fast path does not take.
    set_lookup(*LOOKUP, *[lambda *_: None] * 2)
    slot = ContextHolder()
    slot.keep(None, here.lane, None)
    with playing_rank(slot):
        _play(here, rank, size, rounds, progress)


def _play(here: _Rank, rank: int, size: int, rounds: int, progress: Synchronized[int]) -> None:
    draw, plan = random.Random(rank), random.Random(0)  # the second is the same on every rank
    for number in range(rounds):
        chosen = plan.sample(range(len(COUNTS) + 1), plan.choice((1, 1, 2, 4)))
        draw.shuffle(chosen)
        if draw.random() < 0.001:
            time.sleep(draw.random() * 2e-3)
        ends = [(_submit(here, which, rank, number, draw), which) for which in chosen]
        for handle, which in ends:
            if draw.random() < 0.02:
                while not handle.done():  # left to the background thread
                    time.sleep(1e-4)
            handle.result()
            _check(here, which, rank, size, number)
        progress.value = number + 1


def _submit(here: _Rank, which: int, rank: int, number: int, draw: random.Random) -> Any:
    arrays = _arrays(here, which)
    for array in arrays:
        array[:] = number * (rank + 1) + np.arange(len(array))
    grouped = which == len(COUNTS)
    name, what = ("g", arrays) if grouped else (f"t{which}", arrays[0])
    form = IN_PLACE | (GROUPED if grouped else 0) | (WAITS if draw.random() < 0.3 else 0)
    submit: Callable[..., Any] = start
    handle = submit(form, what, None, name, ReduceOp.SUM, 1.0, 1.0, global_process_set)
    assert handle is not None, f"rank {rank}, round {number}: {name} was not taken"
    return handle


def _arrays(here: _Rank, which: int) -> list[Any]:
    return here.values[len(COUNTS) :] if which == len(COUNTS) else [here.values[which]]


def _check(here: _Rank, which: int, rank: int, size: int, number: int) -> None:
    for array in _arrays(here, which):
        expected = number * size * (size + 1) // 2 + size * np.arange(len(array))
        assert (array == expected).all(), f"rank {rank}, round {number}, tensor {which}: torn"


@pytest.mark.timeout(120 + ROUNDS // 200)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_lanes_of_ranks_that_are_stopped_and_continued(size: int) -> None:
    area = -(-shared_memory.area_bytes(CHUNK) // 128) * 128
    memory = mmap.mmap(-1, size * area + shared_memory.ready_table_bytes(size, SLOTS) + size * ARENA + 256)
    rounds = rounds_of(size, ROUNDS)
    progress = [_fork.Value("q", 0) for _ in range(size)]
    meet = _fork.Barrier(size)
    ranks: list[BaseProcess] = [
        _fork.Process(target=_main, args=(r, size, memory, meet, rounds, progress[r]), daemon=True)
        for r in range(size)
    ]
    watch(ranks, progress, rounds)
