"""The memory of remembered results: kept for later ones, bounded, and never shared by two of them."""

from __future__ import annotations

import os
import random
import resource
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.native.shared_memory import limit_pool, pool_counts
from pyhvd.testing import run_ranks

LIMIT = 8 << 20
ROWS = 40_000  # of float64: more than the least result that comes from the pool


@pytest.fixture(autouse=True)
def _empty_pool() -> Iterator[None]:
    limit_pool(0)
    yield
    limit_pool(0)


def _on(size: int, body: object) -> None:
    run_ranks(size, body, timeout=60, knobs={"fast_lane": True, "pool_size": LIMIT})  # type: ignore[arg-type]


def test_a_freed_result_gives_its_memory_to_the_next_one() -> None:
    def body() -> None:
        for k in range(8):
            out = hvd.allgather(np.full(ROWS, k, np.float64), name="x")
            assert out.tolist() == [k] * ROWS
        assert out.flags.owndata
        assert out.ctypes.data % 64 == 0

    _, made, reused = pool_counts()
    _on(1, body)
    kept, made_now, reused_now = pool_counts()
    assert reused_now - reused >= 4
    assert made_now - made <= 3
    assert kept >= 8 * ROWS


def test_results_in_use_have_memory_of_their_own() -> None:
    def body() -> None:
        held = [hvd.allreduce(np.full(ROWS, k + hvd.rank()), name="x", op=hvd.Sum) for k in range(12)]
        for k, out in enumerate(held):
            assert out.tolist() == [2 * k + 1] * ROWS
        held[3].resize(3 * ROWS, refcheck=False)
        held[4].resize(5, refcheck=False)
        assert held[3][:ROWS].tolist() == [7] * ROWS
        assert held[4].tolist() == [9] * 5
        assert np.zeros_like(held[5]).sum() == 0

    _on(2, body)


def test_ten_thousand_steps_of_changing_sizes_stay_within_the_limit() -> None:
    rng = random.Random(7)
    sizes = [rng.randrange(8_000, 300_000) for _ in range(30)]

    def body() -> None:
        held: list[Any] = []
        tensors = [np.ones(n) for n in sizes]
        for k in range(10_000):
            which = rng.randrange(len(sizes))
            held.append(hvd.broadcast(tensors[which], 0, name=f"x{which}"))
            if k % 5 == 0:
                del held[: rng.randrange(5)]
            held = held[-6:]
            assert pool_counts()[0] <= LIMIT
            if k == 1000:
                before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10  # KiB

    _on(1, body)


def test_a_forked_child_frees_results() -> None:
    def body() -> None:
        for _ in range(3):
            out = hvd.allreduce(np.ones(ROWS), name="x", op=hvd.Sum)
        child = os.fork()
        if not child:
            total = out.sum()
            del out
            os._exit(0 if total == ROWS else 1)
        assert os.waitpid(child, 0)[1] == 0

    _on(1, body)
