"""Calls without a name on the fast path: the ranks match them by their order, and remember them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.api.collectives import start_move
from pyhvd.engine.context import current
from pyhvd.native.shared_memory import BARRIER
from pyhvd.negotiation.delegation import Delegation
from pyhvd.testing import RanksFailed, run_ranks

On = Callable[..., list[Any]]
HOSTS: dict[str, Callable[[int], list[int]]] = {
    "one host": lambda size: [0] * size,
    "hosts of one rank": lambda size: list(range(size)),
    "two hosts": lambda size: [2 * rank // size for rank in range(size)],
}


@pytest.fixture(params=HOSTS)
def on(request: pytest.FixtureRequest) -> On:
    """Return the function that runs ranks on one host, or on several."""

    def run(size: int, function: Callable[..., Any], *args: Any, **knobs: Any) -> list[Any]:
        hosts = HOSTS[request.param](size)
        if request.param == "two hosts" and size == 2:
            pytest.skip("hosts of one rank")
        knobs = {"fast_lane": True, "dynamic_process_sets": True, **knobs}
        return run_ranks(size, function, *args, timeout=60, knobs=knobs, hosts=hosts if any(hosts) else None)

    return run


def _start(n: int, value: float = 1.0, **how: Any) -> hvd.Handle:
    return hvd.allreduce_async(np.full(n, value, np.float32), op=hvd.Sum, **how)


def _start_barrier() -> hvd.Handle:
    handle: hvd.Handle = start_move(BARRIER, 0, None, None, None, hvd.global_process_set)
    return handle


def _is_fast(handle: hvd.Handle) -> bool:
    return type(handle) is hvd.Handle


def _learn(*sizes: int) -> None:
    """Reduce tensors of these sizes once, so that the ranks remember them."""
    for n in sizes:
        _start(n).result()
    hvd.barrier()


@pytest.mark.parametrize("pattern", ["a", "abc", "abcdefg", "aababbc"])
def test_loops_with_a_pattern_of_shapes_use_the_fast_path(on: On, pattern: str) -> None:
    def body() -> None:
        _learn(*(ord(each) for each in set(pattern) and sorted(set(pattern))))
        for turn in range(150):
            n = ord(pattern[turn % len(pattern)])
            handle = _start(n, turn)
            assert _is_fast(handle)
            assert handle.name == f"noname.{len(set(pattern)) + turn}"
            assert handle.result().tolist() == [2.0 * turn] * n

    on(2, body)


def test_all_verbs_are_remembered(on: On) -> None:
    def body() -> None:
        rank, size = hvd.rank(), hvd.size()
        for turn in range(4):
            x = np.arange(6, dtype=np.int64).reshape(6, 1) + 10 * rank + turn
            every = [np.arange(6).reshape(6, 1) + 10 * q + turn for q in range(size)]
            total = np.sum(every, axis=0)
            target = x.copy()
            handles = [
                hvd.allreduce_async(x, op=hvd.Sum),
                hvd.allreduce_async_(target, op=hvd.Sum),
                hvd.allgather_async(x),
                hvd.broadcast_async(x, 1),
                hvd.alltoall_async(x),
                hvd.alltoall_async(x, [1, 2, 3]),
                hvd.reducescatter_async(x, op=hvd.Sum),
            ]
            assert [_is_fast(each) for each in handles] == [turn > 0 or k == 1 for k in range(7)], (
                "the second is like the first"
            )
            got = [each.result() for each in handles]
            assert got[1] is target
            assert np.array_equal(got[0], total)
            assert np.array_equal(target, total)
            assert np.array_equal(got[2], np.concatenate(every))
            assert np.array_equal(got[3], every[1])
            assert np.array_equal(got[4][0], np.concatenate([e[2 * rank : 2 * rank + 2] for e in every]))
            first = rank * (rank + 1) // 2
            assert np.array_equal(got[5][0], np.concatenate([e[first : first + rank + 1] for e in every]))
            assert np.array_equal(got[6], total[2 * rank : 2 * rank + 2])

    on(3, body)


def test_barriers_are_remembered(on: On) -> None:
    def body() -> None:
        late = 0.0
        for turn in range(150):
            handle = _start_barrier()
            assert _is_fast(handle) == (turn > 0)
            if turn % 3:
                late += _start(4, turn).result()[0]
            handle.result()
        assert late == hvd.size() * sum(turn for turn in range(150) if turn % 3)

    on(2, body)
    on(3, body)


def test_a_barrier_waits_for_every_rank(on: On) -> None:
    came: list[int] = []

    def body() -> None:
        for _ in range(2):
            _start_barrier().result()
        if hvd.rank() == 1:
            time.sleep(0.2)
            came.append(1)
        _start_barrier().result()
        assert came

    on(2, body)


def test_a_barrier_does_not_meet_an_allreduce(on: On) -> None:
    def body() -> None:
        for _ in range(2):
            _start_barrier().result()
            _start(4).result()
        with pytest.raises(hvd.MismatchError):
            (_start_barrier() if hvd.rank() else _start(4)).result()
        for _ in range(3):
            _start_barrier().result()
            assert _start(4).result().tolist() == [hvd.size()] * 4

    on(2, body)
    on(3, body)


def test_more_calls_in_flight_than_turn_slots(on: On) -> None:
    def body() -> None:
        _learn(4)
        for _ in range(5):
            handles = [_start(4, k) for k in range(200)]
            assert [each.result().tolist() for each in handles] == [[2.0 * k] * 4 for k in range(200)]
        handle = _start(4)
        assert _is_fast(handle), "the turn slots are delegated again"
        handle.result()

    on(2, body)


def test_a_mismatch_names_both_lines_and_the_number(on: On) -> None:
    def body() -> None:
        _learn(4, 5)
        with pytest.raises(hvd.MismatchError, match=r"'noname\.2'") as caught:
            _start(4 + hvd.rank()).result()
        for value in caught.value.per_rank.values():
            assert "test_unnamed.py:" in value.site
            assert value.site.endswith(" in _start")
        assert caught.value.per_rank.keys() == {0, 1}
        _start(4).result()
        handle = _start(4)
        assert _is_fast(handle), "the turn slots are delegated again"
        handle.result()

    on(2, body)


SHAPES = ([0, 0, 1, 1], [0, 1, 1, 0], list(range(10)), [k // 2 for k in range(18)])


@pytest.mark.parametrize("hosts", SHAPES, ids=len)
@pytest.mark.parametrize("odd", [0, 1, -1])
def test_a_mismatch_across_hosts_reaches_every_rank(hosts: list[int], odd: int) -> None:
    """With more than 8 hosts the rank that differs is on a top, or below one."""

    def body() -> None:
        size = hvd.size()
        _learn(4, 5)
        for turn in range(3):
            differs = hvd.rank() == (odd + turn * size // 3) % size
            with pytest.raises(hvd.MismatchError, match=rf"'noname\.{2 + 5 * turn}'") as caught:
                _start(4 + differs).result()
            assert caught.value.per_rank.keys() == set(range(size))
            for value in caught.value.per_rank.values():
                assert value.site.endswith(" in _start")
            fast = 0
            for k in range(4):
                handle = _start(4, k)
                fast += _is_fast(handle)
                assert handle.result().tolist() == [float(size) * k] * 4
            assert fast >= 3, "the turn slots are delegated again"

    knobs = {"fast_lane": True, "dynamic_process_sets": True}
    run_ranks(len(hosts), body, timeout=100, knobs=knobs, hosts=hosts)


def test_hosts_below_a_top_use_turn_slots() -> None:
    def body() -> None:
        _learn(4, 5, 6)
        for turn in range(100):
            if hvd.rank() == turn % 10 and not turn % 7:  # an array that the fast path does not take
                handle = hvd.allreduce_async(np.full(8, turn, np.float32)[::2], op=hvd.Sum)
            else:
                handle = _start(4, turn)
            assert handle.result().tolist() == [10.0 * turn] * 4
            handles = [_start(4 + k % 3, k) for k in range(5)]
            for k, each in enumerate(handles):
                assert each.result().tolist() == [10.0 * k] * (4 + k % 3)
        assert hvd.metrics().tensors["allreduce"]["fast"] > 300

    knobs = {"fast_lane": True, "dynamic_process_sets": True}
    run_ranks(10, body, timeout=100, knobs=knobs, hosts=list(range(10)))


def test_one_rank_goes_by_message_and_the_others_mark(on: On) -> None:
    def body() -> None:
        _learn(4)
        for turn in range(100):
            if hvd.rank() == turn % 3:  # an array that the fast path does not take
                handle = hvd.allreduce_async(np.ones(8, np.float32)[::2], op=hvd.Sum)
                assert not _is_fast(handle)
            else:
                handle = _start(4)
            assert handle.result().tolist() == [3.0] * 4
            assert _start(4).result().tolist() == [3.0] * 4

    on(3, body)


def test_another_verb_is_a_mismatch(on: On) -> None:
    def body() -> None:
        _learn(4)
        hvd.allgather(np.ones(4, np.float32))
        handle = _start(4) if hvd.rank() else hvd.allgather_async(np.ones(4, np.float32))
        with pytest.raises(hvd.MismatchError):
            handle.result()
        assert _start(4).result().tolist() == [2.0] * 4

    on(2, body)


def test_rows_that_differ_are_gathered_by_message(on: On) -> None:
    def body() -> None:
        _learn(4)
        for turn in range(70):
            rows = 1 + (turn + hvd.rank()) % 2
            got = hvd.allgather(np.full((rows, 1), hvd.rank(), np.int32))
            assert got.ravel().tolist() == [0] * (1 + turn % 2) + [1] * (1 + (turn + 1) % 2)
            assert _start(4).result().tolist() == [2.0] * 4

    on(2, body)


def test_a_join_waits_for_calls_that_are_marked(on: On) -> None:
    def body() -> None:
        for _ in range(3):
            _learn(4)
            if hvd.rank() == 0:
                handle = _start(4)  # the others submit it after this rank has told of its join
                assert _is_fast(handle)
                hvd.join()
                assert handle.result().tolist() == [3.0] * 4
            else:
                assert _start(4).result().tolist() == [3.0] * 4
                assert _start(4).result().tolist() == [2.0] * 4, "rank 0 has joined"
                hvd.join()
            handle = _start(4)
            assert handle.name == "noname.0"
            assert handle.result().tolist() == [3.0] * 4

    on(3, body)


@pytest.mark.parametrize("other", [1, 2])
def test_process_sets_count_apart_and_come_again(on: On, other: int) -> None:
    def body() -> None:
        _learn(4)
        agrees = hvd.cross_size() < 3  # its ranks are on every host, or on one
        for _ in range(3):
            added = hvd.add_process_set([0, other])
            if hvd.rank() in (0, other):
                for turn in range(5):
                    handle = _start(4, process_set=added)
                    assert handle.name == f"noname.{turn}"
                    # The first call makes the set's backend; the second is remembered.
                    assert _is_fast(handle) == (turn > 1 and agrees)
                    assert handle.result().tolist() == [2.0] * 4
            assert _start(4).result().tolist() == [3.0] * 4
            hvd.remove_process_set(added)

    on(3, body)


def test_a_removed_set_ends_its_calls(on: On) -> None:
    def body() -> None:
        added = hvd.add_process_set([0, 1])
        if hvd.rank() < 2:
            for _ in range(2):
                _start(4, process_set=added).result()
        handle = _start(4, process_set=added) if hvd.rank() == 0 else None
        hvd.remove_process_set(added)
        if handle is not None:
            with pytest.raises(hvd.HorovodInternalError):
                handle.result()

    on(3, body)


def test_a_rank_that_refuses_its_call_tells_the_others(on: On) -> None:
    def body() -> None:
        _learn(4)
        if hvd.rank() == 0:
            with pytest.raises(hvd.UnsupportedDtypeError):
                hvd.allreduce(np.array(["a"]))
        else:
            with pytest.raises(hvd.RankFailedError):
                _start(4).result()
        assert _start(4).result().tolist() == [2.0] * 4

    on(2, body)


def test_a_stalled_call_is_named_with_its_number(on: On) -> None:
    def body() -> None:
        _learn(4)
        if hvd.rank() == 0:
            with pytest.raises(hvd.HorovodInternalError, match=r"noname\.1"):
                _start(4).result()
            raise ValueError("as expected")
        with pytest.raises(hvd.HorovodInternalError):
            hvd.allreduce(np.ones(1), name="another")

    with pytest.raises(RanksFailed, match="as expected"):
        on(2, body, stall_check_time_seconds=0.2, stall_shutdown_time_seconds=1.0)


def test_shutdown_ends_calls_in_flight(on: On) -> None:
    def body() -> None:
        _learn(4)
        handle = _start(4) if hvd.rank() == 0 else None
        hvd.barrier()
        hvd.shutdown()
        if handle is not None:
            with pytest.raises(hvd.HorovodInternalError):
                handle.result()

    on(2, body)


@pytest.mark.parametrize("knobs", [{"cache_capacity": 0}, {"fast_lane": False}, {"check": "results"}])
def test_without_a_fast_path_they_go_by_message(on: On, knobs: dict[str, Any]) -> None:
    def body() -> None:
        for turn in range(3):
            handle = _start(4)
            assert not _is_fast(handle)
            assert handle.name == f"noname.{turn}"
            assert handle.result().tolist() == [2.0] * 4

    on(2, body, **knobs)


def test_a_rank_may_be_ahead_of_rank_0s_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """It marks a turn slot before rank 0 opens the ready table: the call must go by message."""
    marked = threading.Event()
    open_set = Delegation.__init__

    def open_late(self: Delegation, *args: Any) -> None:
        assert marked.wait(10)
        open_set(self, *args)

    def body() -> None:
        handles = [_start(4) for _ in range(2)]
        if hvd.rank():
            path = current().fast_path
            assert path is not None
            path.mark_ready()
            marked.set()
        assert [each.result().tolist() for each in handles] == [[2.0] * 4] * 2

    monkeypatch.setattr(Delegation, "__init__", open_late)
    run_ranks(2, body, timeout=30, knobs={"fast_lane": True})


def _group(*sizes: int, value: float = 1.0, **how: Any) -> hvd.Handle:
    arrays = [np.full((n, 2), value, np.float32) for n in sizes]
    return hvd.grouped_allreduce_async(arrays, op=hvd.Sum, **how)


def _values(handle: hvd.Handle) -> list[Any]:
    return [each.tolist() for each in handle.result()]


def test_groups_of_an_allreduce_are_remembered(on: On) -> None:
    def body() -> None:
        groups = ((3,), (3, 1), (0, 4, 0), tuple(range(1, 30)), (70_000, 5))
        for turn in range(4):
            handles = [_group(*sizes, value=turn) for sizes in groups]
            assert [_is_fast(each) for each in handles] == [turn > 0] * len(groups)
            for sizes, handle in zip(groups, handles, strict=True):
                assert _values(handle) == [[[2.0 * turn] * 2] * n for n in sizes]
            target = [np.full((n, 2), 1.0, np.float32) for n in (2, 3)]
            handle = hvd.grouped_allreduce_async_(target, op=hvd.Sum)
            assert _is_fast(handle) == (turn > 0)
            assert all(a is b for a, b in zip(handle.result(), target, strict=True))
            assert all((each == 2).all() for each in target)
            _start(3).result()  # a single one of the first group's first shape
            hvd.barrier()

    on(2, body)


def test_groups_of_other_verbs_and_of_several_dtypes_go_by_message(on: On) -> None:
    def body() -> None:
        for _ in range(3):
            arrays = [np.ones(2, np.float32), np.ones(2, np.float64)]
            for handle in (
                hvd.grouped_allreduce_async(arrays, op=hvd.Sum),
                hvd.grouped_allgather_async(arrays[:1]),
            ):
                assert not _is_fast(handle)
                handle.result()

    on(2, body)


@pytest.mark.parametrize("other", ["more", "shape", "single"])
def test_a_mismatch_of_groups_names_both_lines(on: On, other: str) -> None:
    def differ() -> hvd.Handle:
        if other == "single":
            return hvd.allreduce_async(np.ones((4, 2), np.float32), op=hvd.Sum)
        return _group(4, 6) if other == "shape" else _group(4, 5, 5)

    def body() -> None:
        for _ in range(2):
            _group(4, 5).result()
            _group(4, 5, 5).result()
            _group(4, 6).result()
            hvd.allreduce(np.ones((4, 2), np.float32), op=hvd.Sum)
        hvd.barrier()
        handle = differ() if hvd.rank() else _group(4, 5)
        assert _is_fast(handle)
        if other == "single":  # they have no tensor in common
            with pytest.raises(hvd.HorovodInternalError):
                handle.result()
            return
        with pytest.raises(hvd.MismatchError, match=r"noname\.8") as caught:
            handle.result()
        assert {value.site.rpartition(" in ")[2] for value in caught.value.per_rank.values()} == {"_group"}
        hvd.barrier()
        _group(4, 5).result()

    on(2, body, stall_check_time_seconds=0.2, stall_shutdown_time_seconds=1.0)


def test_groups_in_flight_that_go_by_message(on: On) -> None:
    """More than there are turn slots, and some that wait for a rank whose slots are recalled."""

    def body() -> None:
        for _ in range(2):
            _group(2, 3).result()
        hvd.barrier()
        for _ in range(3):
            handles = [_group(2, 3, value=k) for k in range(150)]
            assert [_values(each) for each in handles] == [
                [[[2.0 * k] * 2] * 2, [[2.0 * k] * 2] * 3] for k in range(150)
            ]
        hvd.barrier()
        if hvd.rank():
            _group(2, 3, name="noise").result()
        else:
            handle = _group(2, 3)  # waits, marked, until its slot is taken back
            _group(2, 3, name="noise").result()
            hvd.barrier()
            assert _values(handle) == [[[2.0] * 2] * 2, [[2.0] * 2] * 3]
            return
        hvd.barrier()
        array = np.ones((2, 2), np.float32), np.ones((3, 2), np.float32)[::-1]  # not as remembered
        handle = hvd.grouped_allreduce_async(list(array), op=hvd.Sum)
        assert _values(handle) == [[[2.0] * 2] * 2, [[2.0] * 2] * 3]

    on(2, body)
