"""Process sets that their members make by themselves: no other rank takes part, or waits."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.api.process_sets import found_process_set
from pyhvd.testing import RanksFailed, run_ranks


def _on(size: int, body: Callable[[], None], fast: bool = True) -> None:
    run_ranks(size, body, timeout=60, knobs={"fast_lane": fast})


@pytest.fixture(params=[True, False], ids=["fast", "by-message"])
def fast(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def _sum(process_set: hvd.ProcessSet, name: str | None = None) -> list[int]:
    total: list[int] = hvd.allreduce(
        np.full(2, hvd.rank()), op=hvd.Sum, name=name, process_set=process_set
    ).tolist()
    return total


def test_members_alone_make_use_and_remove_a_set(fast: bool) -> None:
    def body() -> None:
        alone = found_process_set([hvd.rank()], f"self.{hvd.rank()}")
        assert _sum(alone) == [hvd.rank()] * 2
        for turn in range(6 if hvd.rank() else 0):  # rank 0 coordinates, and need not be a member
            made = found_process_set([2, 1], f"turn.{turn}")
            assert (made.ranks, made.rank(), made.size()) == ([1, 2], hvd.rank() - 1, 2)
            for _ in range(4):
                assert _sum(made) == _sum(made, "x") == [3, 3]
            assert hvd.broadcast_object(hvd.rank(), 2, process_set=made) == 2
            hvd.barrier(made)
            if turn % 2:
                assert hvd.remove_process_set(made)
                with pytest.raises(ValueError, match="has not been registered, or was removed"):
                    _sum(made)

        hvd.barrier()

    _on(3, body, fast)


def test_several_sets_of_the_same_ranks(fast: bool) -> None:
    def body() -> None:
        made = [found_process_set([0, 1], f"set.{k}") for k in range(40)]
        assert len({each.process_set_id for each in made}) == 40
        handles = [
            hvd.allreduce_async(np.full(3, k), op=hvd.Sum, name="x", process_set=each)
            for k, each in reversed(list(enumerate(made)))
        ]
        assert [int(handle.result()[0]) for handle in handles] == [2 * k for k in reversed(range(40))]

    _on(2, body, fast)


def test_threads_make_sets_at_the_same_time() -> None:
    def body() -> None:
        from pyhvd.engine.context import current_holder, playing_rank

        holder, sums = current_holder(), {}

        def make(key: str) -> None:
            with playing_rank(holder):
                sums[key] = _sum(found_process_set([0, 1], key))

        keys = ["a", "b", "c"] if hvd.rank() else ["c", "b", "a"]
        threads = [threading.Thread(target=make, args=(key,)) for key in keys]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sums == {key: [1, 1] for key in "abc"}

    _on(2, body)


def test_members_that_disagree_all_get_the_error(fast: bool) -> None:
    def body() -> None:
        ranks = [1, 2] if hvd.rank() == 1 else [0, 1, 2]
        with pytest.raises(hvd.MismatchError, match=r"Mismatched process sets .*rank 1: \[1, 2\]"):
            found_process_set(ranks, "key")
        hvd.barrier()
        assert _sum(found_process_set([0, 1, 2], "key")) == [3, 3]

    _on(3, body, fast)


def test_a_member_that_has_joined() -> None:
    def body() -> None:
        if hvd.rank() == 1:
            with pytest.raises(hvd.MismatchError, match=r"rank 0 already called join\(\)"):
                found_process_set([0, 1], "key")
        hvd.join()

    _on(2, body)


def test_who_may_make_a_set() -> None:
    def body() -> None:
        with pytest.raises(ValueError, match="there are only ranks 0-1"):
            found_process_set([0, 2], "key")
        with pytest.raises(ValueError, match=f"rank {hvd.rank()} is not a member"):
            found_process_set([1 - hvd.rank()], "key")
        with pytest.raises(ValueError, match="needs at least one rank"):
            found_process_set([], "key")
        hvd.barrier()

    _on(2, body)


def test_the_end_of_another_rank_ends_the_wait() -> None:
    def body() -> None:
        if hvd.rank():
            found_process_set([0, 1], "key")

    with pytest.raises(RanksFailed, match="ShutDownError"):
        _on(2, body)
