"""Process sets that their members make by themselves: no other rank takes part, or waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.api.process_sets import found_process_set
from pyhvd.backends.host import HostBackend
from pyhvd.backends.shm import make_backend
from pyhvd.engine import context
from pyhvd.testing import RanksFailed, run_ranks
from tests.conformance.cases import outcome


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


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The ranks of each backend of rank 1 that is open."""
    ranks_of: list[tuple[int, ...]] = []

    def make(fabric: Any, ranks: tuple[int, ...], *arguments: Any, **options: Any) -> HostBackend:
        backend = make_backend(fabric, ranks, *arguments, **options)
        if context.current_holder().rank == 1:
            ranks_of.append(ranks)
            close = backend.close

            def closed() -> None:
                ranks_of.remove(ranks)
                close()

            monkeypatch.setattr(backend, "close", closed)
        return backend

    monkeypatch.setattr(context, "make_backend", make)
    return ranks_of


def test_sets_of_the_same_ranks_share_a_backend_from_the_first_batch_on(
    fast: bool, made: list[tuple[int, ...]]
) -> None:
    def body() -> None:
        if hvd.rank() == 0:
            hvd.barrier()
            return
        sets = [found_process_set([1, 2], f"set.{k}") for k in range(3)]
        alone = found_process_set([hvd.rank()], f"alone.{hvd.rank()}")
        here = hvd.rank() == 1
        assert not here or made == [(0, 1, 2)]
        _sum(sets[1])
        hvd.barrier(sets[2])
        assert not here or made == [(0, 1, 2), (1, 2)]
        assert _sum(alone) == [hvd.rank()] * 2
        for each in sets[:2]:
            hvd.remove_process_set(each)
        assert [_sum(sets[2]), _sum(sets[2], "x")] == [[3, 3]] * 2
        assert not here or made == [(0, 1, 2), (1, 2), (1,)]
        hvd.remove_process_set(sets[2])
        assert not here or made == [(0, 1, 2), (1,)]
        for _ in range(2):
            again = found_process_set([1, 2], "again")
            assert _sum(again) == [3, 3]
            hvd.remove_process_set(again)
        hvd.remove_process_set(found_process_set([1, 2], "not used"))
        hvd.remove_process_set(alone)
        assert not here or made == [(0, 1, 2)]
        hvd.barrier()

    _on(3, body, fast)
    assert not made


def test_a_set_of_all_ranks(fast: bool, made: list[tuple[int, ...]]) -> None:
    def body() -> None:
        sets = [found_process_set([0, 1], f"set.{k}") for k in range(3)]
        assert {_sum(each)[0] for each in [*sets, *sets, hvd.global_process_set]} == {1}
        assert hvd.remove_process_set(sets[1])
        assert {_sum(each)[0] for each in [sets[0], sets[2], hvd.global_process_set]} == {1}
        assert hvd.rank() == 0 or made == [(0, 1)]
        hvd.barrier()

    _on(2, body, fast)


def test_the_first_batch_of_a_set_with_a_member_that_has_joined(fast: bool) -> None:
    def body() -> None:
        made = found_process_set([0, 1], "key")
        if hvd.rank() == 1:
            while not isinstance(outcome(lambda: hvd.barrier(made)), hvd.MismatchError):
                pass
            assert _sum(made) == [1, 1]
            assert _sum(made, "x") == [1, 1]
        hvd.join()
        assert [_sum(made), _sum(made, "x")] == [[1, 1]] * 2

    _on(2, body, fast)


def test_calls_in_flight_before_the_first_batch(fast: bool) -> None:
    """Some have numbers for names, which the fast path continues."""

    def body() -> None:
        made = found_process_set([0, 1], "key")
        for turn in range(4):
            handles = [
                hvd.allreduce_async(
                    np.full(2, k), op=hvd.Sum, process_set=made, name=f"x.{k}" if k % 3 else None
                )
                for k in range(30)
            ]
            if turn % 2 == hvd.rank():
                hvd.barrier(made)
            assert [int(handle.result()[0]) for handle in handles] == [2 * k for k in range(30)]
            if turn % 2 != hvd.rank():
                hvd.barrier(made)

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
