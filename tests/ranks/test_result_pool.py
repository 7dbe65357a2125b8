"""The memory of large results: kept for later ones, bounded, given back, and never shared by two of them."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.engine.context import current
from pyhvd.native.shared_memory import POOL_LEAST, limit_pool, pool_counts, pooled, tidy_pool
from pyhvd.testing import run_ranks
from pyhvd.transport.arena import Arena

LIMIT = 8 << 20
HEAD = 64  # bytes of a buffer's head
ROWS = 40_000  # of float64: more than the least result that comes from the pool


@pytest.fixture(autouse=True)
def _empty_pool() -> Iterator[None]:
    limit_pool(0)
    yield
    limit_pool(0)


def _on(size: int, body: Callable[[], None], fast: bool = True) -> None:
    run_ranks(size, body, timeout=60, knobs={"fast_lane": fast, "pool_size": LIMIT})


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "by-message"])
def test_a_freed_result_gives_its_memory_to_the_next_one(fast: bool) -> None:
    def body() -> None:
        for k in range(8):
            out = hvd.allgather(np.full(ROWS, k, np.float64), name="x")
            assert out.tolist() == [k] * ROWS
        assert out.flags.owndata
        assert out.ctypes.data % 64 == 0
        del out
        hvd.barrier()
        seen = hvd.metrics()
        assert seen.results_reused >= 4
        assert seen.results_new <= 3
        assert seen.results_kept_bytes >= 8 * ROWS

    _on(1, body, fast)
    assert pool_counts()[0] == 0, "the end of the last rank gives the memory back"


def test_results_that_outlive_shutdown_are_freed_at_once() -> None:
    held: list[Any] = []

    def body() -> None:
        held.extend(hvd.allreduce(np.ones(ROWS), name="x", op=hvd.Sum) for _ in range(5))

    _on(1, body)
    assert all(out.sum() == ROWS for out in held)
    held.clear()
    assert pool_counts()[0] == 0


def test_a_size_class_serves_near_sizes_and_wastes_an_eighth_at_most() -> None:
    limit_pool(LIMIT)
    for nbytes in (POOL_LEAST, 100_000, 123_457, 1 << 20, 3_000_001):
        out = pooled((nbytes,), np.dtype(np.uint8))
        del out
        kept, made, reused = pool_counts()
        assert nbytes + HEAD <= kept <= (nbytes + HEAD) * 1.125
        out = pooled((kept - HEAD,), np.dtype(np.uint8))  # the largest result of the class
        del out
        out = pooled((kept - HEAD + 1,), np.dtype(np.uint8))  # of the next one
        assert pool_counts() == (kept, made + 1, reused + 1)
        del out
        limit_pool(0)
        limit_pool(LIMIT)


def test_memory_that_nobody_uses_is_given_back() -> None:
    limit_pool(LIMIT)
    before = tidy_pool(time.monotonic_ns())  # 0, unless a failed test has left results
    first, second = (pooled((ROWS,), np.dtype(np.float64)) for _ in range(2))
    del first
    now = time.monotonic_ns()
    again = tidy_pool(now)
    assert now + 9_000_000_000 < again <= now + 10_000_000_000
    assert pool_counts()[0] >= 8 * ROWS
    assert tidy_pool(again) == again + 10_000_000_000, "the other result may yet be freed"
    assert pool_counts()[0] == 0
    del second
    now += 30_000_000_000
    assert tidy_pool(now) == (now + 10_000_000_000 if before else 0)


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


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("prescale", [1.0, 0.5])
def test_large_results_have_the_bits_of_in_place_ones(size: int, prescale: float) -> None:
    """Their lines go past the caches, whatever part of a line they begin and end with."""

    def body() -> None:
        for dtype, first in (("f4", 1), ("f8", 0), ("f2", 3), ("i1", 5)):
            rng = np.random.default_rng(hvd.rank())
            count = (9 << 20) // np.dtype(dtype).itemsize + 77
            given = (rng.random(count + first) * 9).astype(dtype)[first:]
            kept = given.copy()
            terms = {"op": hvd.Sum, "prescale_factor": prescale} if dtype[0] == "f" else {"op": hvd.Max}
            for _ in range(3):
                out = hvd.allreduce(given, name=f"out {dtype}", **terms)
                both = hvd.grouped_allreduce([given, given[:1001]], name=f"group {dtype}", **terms)
                inside = given.copy()
                hvd.allreduce_(inside, name=f"in {dtype}", **terms)
                assert out.tobytes() == inside.tobytes() == both[0].tobytes()
                assert both[1].tobytes() == inside[:1001].tobytes()
            assert given.tobytes() == kept.tobytes()

    _on(size, body)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("rows", [ROWS, 300_001])  # below and above what goes past the caches
def test_results_of_arrays_in_the_arena_lie_there_too(size: int, rows: int) -> None:
    def body() -> None:
        arena = current().arena
        assert isinstance(arena, Arena)
        given, group = hvd.empty(rows, np.float64), [hvd.empty(n, np.float32) for n in (ROWS, 3 * ROWS, 10)]
        for step in range(6):
            given[:] = np.arange(rows) + step + hvd.rank()
            want = size * (np.arange(rows) + step) + size * (size - 1) // 2
            out = hvd.allreduce(given, name="x", op=hvd.Sum)
            assert arena.holds(out.ctypes.data)
            assert out.tolist() == want.tolist()
            assert given[0] == step + hvd.rank()
            if hvd.rank():  # in place beside out of place
                assert hvd.allreduce(given, name="m", op=hvd.Sum).tolist() == want.tolist()
            else:
                assert hvd.allreduce_(given, name="m", op=hvd.Sum).tolist() == want.tolist()
            for array in group:
                array[:] = step
            for array, out in zip(group, hvd.grouped_allreduce(group, name="g"), strict=True):
                assert arena.holds(out.ctypes.data) == (array.size >= ROWS)
                assert (out == step).all()
        seen, kept = hvd.metrics(), arena.kept
        hvd.barrier()  # the end of another rank would give all memory back
        assert seen.results_reused >= arena.reused >= 12
        assert seen.results_kept_bytes > 0
        assert kept > 0

    _on(size, body)


def test_calls_without_a_name_are_remembered_wherever_the_arrays_are() -> None:
    def body() -> None:
        inside = [hvd.empty(n, np.float32) for n in (2 * ROWS, 10)]
        outside = [np.empty(2 * ROWS, np.float32), np.empty(10, np.float32)]
        for given in (inside, inside if hvd.rank() else outside):
            for step in range(30):
                for array in given:
                    array[:] = step
                assert (hvd.allreduce(given[0], op=hvd.Sum) == 2 * step).all()
                first, second = hvd.grouped_allreduce(given, op=hvd.Sum)
                assert (first == 2 * step).all()
                assert (second == 2 * step).all()
        seen = hvd.metrics()
        assert seen.responses["fast"] > 100  # of 120 calls
        hvd.barrier()

    _on(2, body)


def test_arrays_of_other_kinds_agree_with_those_in_the_arena() -> None:
    """A rank whose array, or whose result, is elsewhere makes all ranks reduce through the window."""

    def body() -> None:
        inside, outside = hvd.empty(ROWS, np.float64), np.empty(ROWS)
        arena = current().arena
        assert isinstance(arena, Arena)
        for step in range(12):
            given = outside if hvd.rank() == 0 and step % 4 == 3 else inside
            given[:] = step
            if step == 6 and hvd.rank():
                arena.keep_results(0)
            out = hvd.allreduce(given, name="x", op=hvd.Sum)
            assert (out == 2 * step).all()
            half = hvd.allreduce(given, name="half", op=hvd.Sum, prescale_factor=0.5)
            assert (half == step).all()
            assert not arena.holds(half.ctypes.data)

    _on(2, body)


def test_ten_thousand_steps_of_changing_shapes_stay_within_the_limit() -> None:
    rng = random.Random(7)
    shapes: list[tuple[tuple[int, ...], str]] = [
        ((rng.randrange(8_000, 150_000), rng.randrange(1, 3)), rng.choice(["f4", "f8", "i2", "c8"]))
        for _ in range(30)
    ]

    def body() -> None:
        held: list[Any] = []
        tensors = [np.ones(shape, dtype) for shape, dtype in shapes]
        for k in range(10_000):
            which = rng.randrange(len(tensors))
            if k % 50 == 0:  # a new shape by an old name: by message
                shape, dtype = shapes[which]
                tensors[which] = np.ones((shape[0] - k % 97, *shape[1:]), dtype)
            held.append(hvd.broadcast(tensors[which], 0, name=f"x{which}"))
            if k % 5 == 0:
                del held[: rng.randrange(5)]
            held = held[-6:]
            assert pool_counts()[0] <= LIMIT
            if k == 1000:
                before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10  # KiB

    _on(1, body)


def test_results_freed_by_other_threads() -> None:
    def body() -> None:
        held: list[Any] = []

        def free() -> None:
            for _ in range(300):
                with contextlib.suppress(IndexError):
                    out = held.pop()
                    assert (out == out[0]).all()

        threads = [threading.Thread(target=free) for _ in range(3)]
        for k in range(200):
            held.append(hvd.allreduce(np.full(ROWS, float(k)), name="x", op=hvd.Sum))
            if k == 20:
                for thread in threads:
                    thread.start()
        for thread in threads:
            thread.join()

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
