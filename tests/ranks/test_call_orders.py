"""Calls of one of pyhvd's own names, from several threads of a rank and in process sets that change."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

import pyhvd as hvd
from pyhvd.engine import context
from pyhvd.engine.context import current_holder, playing_rank
from pyhvd.testing import run_ranks

LANES = pytest.mark.parametrize("fast_lane", [False, True])


def on_threads(count: int, call: Callable[[], Any]) -> None:
    """Make calls from several threads of the caller's rank."""
    holder = current_holder()
    failed: list[BaseException] = []

    def run() -> None:
        with playing_rank(holder):
            try:
                for _ in range(30):
                    call()
            except BaseException as exc:
                failed.append(exc)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert not failed


@LANES
def test_threads_make_calls_of_one_name_one_after_the_other(fast_lane: bool) -> None:
    def body() -> None:
        hvd.barrier()
        on_threads(3, hvd.barrier)
        on_threads(3, lambda: hvd.broadcast_object({"rank": hvd.rank()}, 1))
        on_threads(2, lambda: hvd.allgather_object("x" * 600 * hvd.rank()))
        assert hvd.allgather_object(hvd.rank()) == [0, 1]

    run_ranks(2, body, timeout=60, knobs={"fast_lane": fast_lane})


@LANES
def test_the_order_of_a_set_that_goes_and_comes_again(fast_lane: bool) -> None:
    def body() -> None:
        for members in ([0, 1], [1, 2], [0, 2]):
            some = hvd.add_process_set(members)
            for _ in range(4):
                if hvd.rank() in members:
                    hvd.barrier(some)
                    assert hvd.allgather_object(hvd.rank(), process_set=some) == members
            if hvd.rank() not in members:
                with pytest.raises(ValueError, match=f"rank {hvd.rank()} is not a member"):
                    hvd.barrier(some)
            hvd.remove_process_set(some)
            for call in (hvd.barrier, lambda one: hvd.broadcast_object(1, 0, process_set=one)):
                with pytest.raises(ValueError, match="was removed"):
                    call(some)
        hvd.barrier()

    run_ranks(3, body, timeout=60, knobs={"fast_lane": fast_lane, "dynamic_process_sets": True})


def test_what_is_no_set_has_no_order() -> None:
    def body() -> None:
        hvd.barrier()
        for wrong in ([0, 1], None):
            with pytest.raises(ValueError, match="takes a ProcessSet"):
                hvd.barrier(wrong)  # type: ignore[arg-type]

    run_ranks(2, body, timeout=20)


def test_a_rank_has_no_order_after_its_end() -> None:
    def body() -> None:
        for _ in range(2):
            for _ in range(3):
                hvd.barrier()
            hvd.shutdown()
            for call in (hvd.barrier, lambda: hvd.allgather_object(1), hvd.broadcast_object, context.current):
                with pytest.raises(hvd.NotInitializedError):
                    call()
            hvd.init()

    run_ranks(2, body, timeout=30)
