"""Process sets that their members make by themselves: no other rank takes part, or waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.api import process_sets
from pyhvd.api.process_sets import found_process_set, start_removal
from pyhvd.backends.host import HostBackend
from pyhvd.backends.shm import make_backend
from pyhvd.engine import context
from pyhvd.testing import RanksFailed, run_ranks
from tests.conformance.cases import outcome


def _on(size: int, body: Callable[[], None], way: str = "fast", **knobs: Any) -> None:
    hosts = [rank * 2 // size for rank in range(size)] if way == "two hosts" else None
    run_ranks(size, body, timeout=60, knobs={"fast_lane": way != "by message", **knobs}, hosts=hosts)


@pytest.fixture(params=["fast", "by message", "two hosts"])
def way(request: pytest.FixtureRequest) -> str:
    """How the ranks agree, and where they are."""
    return str(request.param)


def _sum(process_set: hvd.ProcessSet, name: str | None = None) -> list[int]:
    total: list[int] = hvd.allreduce(
        np.full(2, hvd.rank()), op=hvd.Sum, name=name, process_set=process_set
    ).tolist()
    return total


def test_members_alone_make_use_and_remove_a_set(way: str) -> None:
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

    _on(3, body, way)


def test_several_sets_of_the_same_ranks(way: str) -> None:
    def body() -> None:
        made = [found_process_set([0, 1], f"set.{k}") for k in range(40)]
        assert len({each.process_set_id for each in made}) == 40
        handles = [
            hvd.allreduce_async(np.full(3, k), op=hvd.Sum, name="x", process_set=each)
            for k, each in reversed(list(enumerate(made)))
        ]
        assert [int(handle.result()[0]) for handle in handles] == [2 * k for k in reversed(range(40))]

    _on(2, body, way)


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
    way: str, made: list[tuple[int, ...]]
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

    _on(3, body, way)
    assert not made


def test_a_set_of_all_ranks(way: str, made: list[tuple[int, ...]]) -> None:
    def body() -> None:
        sets = [found_process_set([0, 1], f"set.{k}") for k in range(3)]
        assert {_sum(each)[0] for each in [*sets, *sets, hvd.global_process_set]} == {1}
        assert hvd.remove_process_set(sets[1])
        assert {_sum(each)[0] for each in [sets[0], sets[2], hvd.global_process_set]} == {1}
        assert hvd.rank() == 0 or made == [(0, 1)]
        hvd.barrier()

    _on(2, body, way)


def test_the_first_batch_of_a_set_with_a_member_that_has_joined(way: str) -> None:
    def body() -> None:
        made = found_process_set([0, 1], "key")
        if hvd.rank() == 1:
            while not isinstance(outcome(lambda: hvd.barrier(made)), hvd.MismatchError):
                pass
            assert _sum(made) == [1, 1]
            assert _sum(made, "x") == [1, 1]
        hvd.join()
        assert [_sum(made), _sum(made, "x")] == [[1, 1]] * 2

    _on(2, body, way)


def test_calls_in_flight_before_the_first_batch(way: str) -> None:
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

    _on(2, body, way)


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


def test_members_that_disagree_all_get_the_error(way: str) -> None:
    def body() -> None:
        ranks = [1, 2] if hvd.rank() == 1 else [0, 1, 2]
        with pytest.raises(hvd.MismatchError, match=r"Mismatched process sets .*rank 1: \[1, 2\]"):
            found_process_set(ranks, "key")
        hvd.barrier()
        assert _sum(found_process_set([0, 1, 2], "key")) == [3, 3]

    _on(3, body, way)


def test_an_error_names_the_lines_of_the_members() -> None:
    def body() -> None:
        with pytest.raises(hvd.MismatchError, match=r"Submitted at: .*test_founded_sets\.py:\d+") as caught:
            found_process_set([0, 1] if hvd.rank() == 1 else [0, 1, 2], "the key")
        assert "the key" in str(caught.value)
        hvd.barrier()

    _on(3, body)


def test_a_member_that_never_comes_is_named_with_the_key(way: str) -> None:
    begun = threading.Event()

    def body() -> None:
        if hvd.rank() == 1:
            begun.set()
            with pytest.raises(hvd.StallError, match=r"noname\.the key': not submitted by rank 0"):
                found_process_set([0, 1], "the key")
        else:
            assert begun.wait(10)
            time.sleep(0.1)  # the error has what is over its time: this rank's tensor is to be younger
            with pytest.raises(hvd.StallError):
                hvd.allreduce(np.ones(1), name="other")

    _on(2, body, way, stall_check_time_seconds=0.2, stall_shutdown_time_seconds=0.6)


def test_a_removal_that_nobody_waits_for(way: str) -> None:
    def body() -> None:
        made = found_process_set([0, 1], "key")
        _sum(made)
        left = hvd.allreduce_async(np.ones(2), process_set=made, name="left") if hvd.rank() else None
        removal = start_removal(made)
        assert removal is not None
        assert start_removal(made) is None
        with pytest.raises(ValueError, match="has not been registered, or was removed"):
            _sum(made)
        assert removal.result() is not None
        if left is not None:
            with pytest.raises(hvd.ShutDownError, match="has been removed"):
                left.result()
        again = found_process_set([0, 1], "key")
        assert again.process_set_id == 1
        assert _sum(again) == [1, 1]

    _on(2, body, way)


def test_a_removal_that_one_member_never_makes(way: str, caplog: pytest.LogCaptureFixture) -> None:
    def body() -> None:
        made = found_process_set([0, 1], "key")
        _sum(made)
        if hvd.rank():
            removal = start_removal(made)
            assert removal is not None
            assert not removal.done()
        time.sleep(2.0)
        hvd.barrier()

    _on(2, body, way, stall_check_time_seconds=0.3, stall_shutdown_time_seconds=1.0)
    assert "process_set.remove" not in caplog.text


def test_the_fast_path_serves_the_sets_with_low_ids_and_those_that_come_after_them() -> None:
    def is_fast(made: hvd.ProcessSet) -> bool:
        for _ in range(2):
            _sum(made, "x")
        handle = hvd.allreduce_async(np.full(2, hvd.rank()), op=hvd.Sum, name="x", process_set=made)
        assert handle.result().tolist() == [1.0] * 2
        return type(handle) is hvd.Handle

    def body() -> None:
        made = [found_process_set([0, 1], f"set.{k}") for k in range(34)]
        assert [each for each in made if is_fast(each)] == made[:31]
        for number in (3, 30, 0):
            hvd.remove_process_set(made[number])
        for number in (0, 3, 30):
            again = found_process_set([0, 1], "again")
            assert again.process_set_id == 1 + number
            assert is_fast(again)
        hvd.barrier()

    _on(2, body)


def test_sets_that_come_and_go_leave_nothing_behind(way: str) -> None:
    def body() -> None:
        for turn in range(200):
            made = found_process_set([0, 1], "key")
            assert made.process_set_id == 1
            if turn % 50 == 0:
                assert _sum(made) == [1, 1]
            if turn % 2:
                hvd.remove_process_set(made)
            else:
                removal = start_removal(made)
                assert removal is not None
                removal.result()
        active = context.current()
        assert list(active.process_sets) == [0]
        assert not process_sets._registered.get(active)
        assert list(active.runtime._executor.backends) == [0]
        hvd.barrier()

    _on(2, body, way)


def test_all_ranks_may_add_a_set_of_the_ranks_of_a_founded_one() -> None:
    def body() -> None:
        if hvd.rank() < 2:
            found_process_set([0, 1], "key")
        added = hvd.add_process_set([0, 1])
        with pytest.raises(ValueError, match="is registered already"):
            hvd.add_process_set([0, 1])
        if hvd.rank() < 2:
            assert _sum(added) == [1, 1]
        hvd.barrier()

    run_ranks(3, body, timeout=60, knobs={"dynamic_process_sets": True})


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
        with pytest.raises(ValueError, match="not empty"):
            found_process_set([hvd.rank()], "")
        hvd.barrier()

    _on(2, body)


def test_the_end_of_another_rank_ends_the_wait() -> None:
    def body() -> None:
        if hvd.rank():
            found_process_set([0, 1], "key")

    with pytest.raises(RanksFailed, match="ShutDownError"):
        _on(2, body)
