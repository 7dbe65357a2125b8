"""Test the fast path by the public API: the results and handles of cached tensors."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.engine.context import current_holder
from pyhvd.testing import run_ranks


def _remember(*names: str, n: int = 4) -> None:
    """Reduce these tensors once, so that the ranks cache them."""
    for name in names:
        hvd.allreduce(np.ones(n, np.float32), name=name, op=hvd.Sum)
    hvd.barrier()


def _start(name: str, value: float = 1.0, n: int = 4) -> Any:
    handle = hvd.allreduce_async(np.full(n, value, np.float32), name=name, op=hvd.Sum)
    assert type(handle) is hvd.Handle, "not on the fast path"
    return handle


def _on(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    return run_ranks(
        size, function, *args, timeout=30, knobs={"fast_lane": True, "dynamic_process_sets": True}
    )


def test_nobody_need_wait_for_a_tensor_to_end() -> None:
    def body() -> None:
        _remember("a", "b")
        handles = [_start("a"), _start("b")]
        until = time.monotonic() + 10
        while not all(hvd.poll(handle) for handle in handles):
            assert time.monotonic() < until
            time.sleep(1e-3)
        assert [handle.result().tolist() for handle in handles] == [[hvd.size()] * 4] * 2

    _on(3, body)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [None, [0, 1]], ids=["one host", "two hosts"])
def test_a_cache_of_any_capacity_is_used(hosts: list[int] | None) -> None:
    """More tensors than a log entry, or a message between hosts, can have."""
    many, grouped = 4500, 4200

    def body() -> None:
        for n in (1, 2):  # with another length all of them leave the cache, and come back
            names = [f"t{k}" for k in range(many)]
            for turn in range(2):
                submitted = [
                    hvd.allreduce_async(np.full(n, k, np.float32), name=name, op=hvd.Sum)
                    for k, name in enumerate(names)
                ]
                group = hvd.grouped_allreduce_async([np.ones(n)] * grouped, name="g", op=hvd.Sum)
                if turn:
                    assert {type(each) for each in (*submitted, group)} == {hvd.Handle}
                assert [each.result().tolist() for each in submitted] == [[2 * k] * n for k in range(many)]
                assert [each.tolist() for each in group.result()] == [[2] * n] * grouped
                hvd.barrier()

    knobs = {"fast_lane": True, "cache_capacity": many + grouped + 1}  # and a barrier
    run_ranks(2, body, timeout=120, hosts=hosts, knobs=knobs)


def test_too_small_a_cache_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    def body() -> None:
        for _ in range(6):
            _remember(*"abcde")  # and a barrier

    run_ranks(2, body, timeout=30, knobs={"fast_lane": True, "cache_capacity": 3})
    said = [record.getMessage() for record in caplog.records if "response cache" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("6 tensors come again and again, but the response cache has 3 slots")
    assert "PYHVD_CACHE_CAPACITY=6" in said[0]


@pytest.mark.parametrize("end", ["another shape", "removal"])
def test_what_nobody_looks_at_goes_when_its_name_means_something_else(end: str) -> None:
    """A dropped handle and its arrays do not keep each other alive."""

    def body() -> None:
        arrays = []
        given = hvd.add_process_set([0, 1])
        for n in range(1, 6):
            if given.included():
                hvd.allreduce(np.ones(n, np.float32), name="x", op=hvd.Sum, process_set=given)
                hvd.barrier(given)  # x is cached after it
                for inplace in (False, True):
                    x = np.ones(n, np.float32)
                    arrays.append(weakref.ref(x))
                    submit = hvd.allreduce_async_ if inplace else hvd.allreduce_async
                    handle = submit(x, name="x", op=hvd.Sum, process_set=given)
                    assert type(handle) is hvd.Handle, "not on the fast path"
                    if not inplace:
                        handle.wait()
                    del x, handle
            if end == "removal":
                assert hvd.remove_process_set(given)
                given = hvd.add_process_set([0, 1])
            elif given.included():
                hvd.barrier(given)  # the name is free after it
        if given.included():
            hvd.allreduce(np.ones(9), name="x", process_set=given)
        hvd.barrier()
        gc.collect()
        assert [each() for each in arrays] == [None] * len(arrays)

    _on(3, body)


def test_a_wait_that_times_out_leaves_the_tensor_alone() -> None:
    gate = threading.Event()

    def body() -> None:
        _remember("late")
        if hvd.rank() == 1:
            assert gate.wait(10)
            assert _start("late").result().tolist() == [2.0] * 4
            return
        handle = _start("late")
        assert not handle.wait(0.05)
        assert not handle.done()
        with pytest.raises(TimeoutError, match="'late'"):
            handle.result(0)
        assert "pending" in repr(handle)
        gate.set()
        assert handle.result(10).tolist() == [2.0] * 4
        assert handle.exception() is None
        assert "done" in repr(handle)

    _on(2, body)


def test_callbacks_and_coroutines() -> None:
    def body() -> None:
        _remember("a", "b")
        seen: list[Any] = []
        ended = threading.Event()
        handle = _start("a")

        def note(h: Any) -> None:
            seen.append(h.result().tolist())
            ended.set()

        handle.add_done_callback(note)
        assert ended.wait(10)
        handle.add_done_callback(lambda h: seen.append(h.name))
        assert seen == [[2.0] * 4, "a"]

        async def gather() -> list[float]:
            result: list[float] = (await _start("b")).tolist()
            return result

        assert asyncio.run(gather()) == [2.0] * 4

    _on(2, body)


def test_a_callback_must_not_wait() -> None:
    def body() -> None:
        _remember("a", "b")
        errors: list[BaseException] = []
        ended = threading.Event()

        def wait_inside(_: Any) -> None:
            try:
                hvd.allreduce_async(np.ones(4, np.float32), name="b", op=hvd.Sum).wait()
            except RuntimeError as exc:
                errors.append(exc)
            ended.set()

        handle = _start("a")
        handle.add_done_callback(wait_inside)
        handle.wait()
        assert ended.wait(10)
        assert len(errors) <= 1  # no error if the callback ran at once, in this thread

    _on(2, body)


def test_a_name_is_in_flight_once_whichever_way_it_went() -> None:
    looked = threading.Event()  # the other rank submits nothing until then, so no call ends

    def body() -> None:
        _remember("a")
        group = [np.ones(2, np.float32), np.ones(3, np.float32)]
        for _ in range(2):
            hvd.grouped_allreduce(group, name="g")
        if hvd.rank() == 0:
            first = _start("a")
            with pytest.raises(hvd.DuplicateNameError, match="'a'"):
                _start("a")
            with pytest.raises(hvd.DuplicateNameError, match="'a'"):
                hvd.allgather_async(np.ones(2), name="a")
            pending = hvd.grouped_allreduce_async(group, name="g")
            with pytest.raises(hvd.DuplicateNameError, match="'g'"):
                hvd.grouped_allreduce_async(group, name="g")
            with pytest.raises(hvd.DuplicateNameError, match="'g_1of2'"):
                hvd.allreduce_async(np.ones(2, np.float32), name="g_1of2")
            looked.set()
        else:
            assert looked.wait(30)
            first, pending = _start("a"), hvd.grouped_allreduce_async(group, name="g")
        assert first.result().tolist() == [2.0] * 4
        assert [each.tolist() for each in pending.result()] == [[1.0] * 2, [1.0] * 3]
        # The rank announced two refusals of 'a': the other rank gets an error for each.
        for _ in range(2 if hvd.rank() == 1 else 0):
            with pytest.raises(hvd.RankFailedError):
                hvd.allreduce(np.ones(4, np.float32), name="a", op=hvd.Sum)
        hvd.barrier()

    _on(2, body)


def test_results_are_new_arrays_or_the_very_ones_given() -> None:
    def body() -> None:
        x, y = np.full(4, 2.0, np.float32), np.zeros((), np.float64)
        for _ in range(3):
            out = hvd.allreduce(x, name="out", op=hvd.Sum)
            assert out is not x
            assert x.tolist() == [2.0] * 4
            assert out.tolist() == [4.0] * 4
            x2 = np.full(4, 1.0, np.float32)
            assert hvd.allreduce_(x2, name="in", op=hvd.Sum) is x2
            assert x2.tolist() == [2.0] * 4
            assert hvd.allreduce(y, name="scalar").shape == ()
            given = [np.ones(2), np.ones(3)]
            got = hvd.grouped_allreduce_(given, name="group", op=hvd.Sum)
            assert all(a is b for a, b in zip(got, given, strict=True))

    _on(2, body)


def test_what_differs_from_before_goes_by_message_and_is_right() -> None:
    def body() -> None:
        for shape, dtype, op in (
            ((3,), np.float32, hvd.Sum),
            ((4,), np.float32, hvd.Sum),
            ((4,), np.float64, hvd.Sum),
            ((2, 2), np.float64, hvd.Max),
            ((2, 2), np.float64, hvd.Average),
        ):
            for _ in range(3):
                got = hvd.allreduce(np.full(shape, hvd.rank() + 1, dtype), name="x", op=op)
                assert got.dtype == dtype
                assert set(got.ravel()) == {3.0 if op is hvd.Sum else 2.0 if op is hvd.Max else 1.5}
        every_second = np.arange(8, dtype=np.float32)[::2]
        for _ in range(3):
            assert hvd.allreduce(every_second, name="strided", op=hvd.Sum).tolist() == [0, 4, 8, 12]
            read_only = np.ones(2, np.float32)
            read_only.flags.writeable = False
            assert hvd.allreduce(read_only, name="frozen", op=hvd.Sum).tolist() == [2, 2]

    _on(2, body)


@pytest.mark.parametrize("inplace", [False, True])
def test_a_group_rides_whatever_slots_its_tensors_have(inplace: bool) -> None:
    """The ranks cached the group's tensors one by one, in another order; the tensors differ in size."""

    def body() -> None:
        order = [3, 1, 6, 0, 5, 2, 4]
        sizes = [1, 700, 3, 64, 5000, 2, 17]
        for k in order:
            hvd.allreduce(np.ones(sizes[k], np.float32), name=f"g_{k + 1}of{len(sizes)}", op=hvd.Sum)
        for step in range(5):
            arrays = [np.full(n, hvd.rank() + step + 10 * k, np.float32) for k, n in enumerate(sizes)]
            start = hvd.grouped_allreduce_async_ if inplace else hvd.grouped_allreduce_async
            handle = start(arrays, name="g", op=hvd.Sum)
            assert not step or type(handle) is hvd.Handle, "not on the fast path"
            results = handle.result()
            base = sum(range(hvd.size()))
            for k, n in enumerate(sizes):
                assert results[k].tolist() == [base + hvd.size() * (step + 10 * k)] * n
                assert (results[k] is arrays[k]) == inplace
            hvd.barrier()  # the group is cached after it

    _on(3, body)


def test_one_rank_with_another_shape_is_an_error_on_all() -> None:
    def body() -> None:
        _remember("x")
        for _ in range(3):
            n = 4 + (hvd.rank() == 1)
            with pytest.raises(hvd.MismatchError, match="'x'"):
                hvd.allreduce(np.ones(n, np.float32), name="x", op=hvd.Sum)
            assert hvd.allreduce(np.ones(4, np.float32), name="x", op=hvd.Sum).tolist() == [hvd.size()] * 4

    _on(3, body)


def test_overlapping_sets_do_not_wait_in_a_circle() -> None:
    def body() -> None:
        pairs = [hvd.add_process_set([a, b]) for a, b in ((0, 1), (1, 2), (0, 2))]
        mine = [pair for pair in pairs if pair.included()]
        for turn in range(30):
            order = mine if (turn + hvd.rank()) % 2 else mine[::-1]
            handles = [
                hvd.allreduce_async(np.full(5000, 1.0), name="p", op=hvd.Sum, process_set=each)
                for each in order
            ]
            whole = hvd.allreduce_async(np.ones(3), name="all", op=hvd.Sum)
            assert all(handle.result()[0] == 2.0 for handle in handles)
            assert whole.result().tolist() == [3.0] * 3
        for pair in pairs:
            hvd.remove_process_set(pair)

    _on(3, body)


def test_shutdown_fails_what_is_on_the_lane() -> None:
    started = threading.Event()

    def body() -> str:
        _remember("x")
        if hvd.rank() == 1:
            assert started.wait(10)
            return ""
        handle = _start("x")
        told = threading.Event()
        handle.add_done_callback(lambda _: told.set())
        started.set()
        assert told.wait(10), "a callback must come at the end, too"
        with pytest.raises(hvd.HorovodInternalError):
            handle.result()
        assert "failed" in repr(handle)
        return "failed"

    assert _on(2, body) == ["failed", ""]


@pytest.mark.parametrize(("whose", "direct"), [("all", True), ("one", False), ("none", False)])
def test_only_where_all_arrays_are_shared_nothing_is_moved(whose: str, direct: bool) -> None:
    """A cached response records whether arrays are in shared memory, and changes with a rank's arrays."""

    def remembered() -> bool:
        cache = current_holder().context.runtime._node.worker._caches[0]  # type: ignore[union-attr]
        (response,) = cache.expand(1 << cache._by_name["t"])
        return response.direct

    def body() -> None:
        shared = whose == "all" or (whose == "one" and hvd.rank() == 1)
        array = hvd.empty(9000) if shared else np.empty(9000, np.float32)
        other = np.empty(9000, np.float32)
        for turn in range(12):
            # For some turns in the middle, rank 0 passes another array.
            away = hvd.rank() == 0 and 4 <= turn < 8
            mine = other if away else array
            mine[:] = hvd.rank() + turn
            hvd.allreduce_(mine, name="t", op=hvd.Sum)
            assert (mine == sum(rank + turn for rank in range(hvd.size()))).all()
            hvd.barrier()
            assert remembered() == (direct and not 4 <= turn < 8)
            hvd.barrier()

    _on(3, body)


@pytest.mark.parametrize("grouped", [False, True], ids=["one", "grouped"])
@pytest.mark.parametrize("before", ["ordinary", "shared"])
@pytest.mark.parametrize("who", [0, 1])
def test_one_ranks_change_of_memory_goes_by_message_once(who: int, before: str, grouped: bool) -> None:
    """One rank's arrays change; afterwards all ranks still use the same cache slot for the tensor."""

    def by_lane() -> tuple[int, int]:
        tensors = hvd.metrics().tensors.get("allreduce", {})
        return tensors.get("fast", 0), sum(tensors.values())

    def reduce(arrays: list[Any], turn: int) -> None:
        for array in arrays:
            array[:] = hvd.rank() + turn
        if grouped:
            hvd.grouped_allreduce_(arrays, name="g", op=hvd.Sum)
        else:
            hvd.allreduce_(arrays[0], name="t", op=hvd.Sum)
        assert all((array == 3 + 3 * turn).all() for array in arrays)

    def body() -> None:
        n = 3 if grouped else 1
        arrays = {
            "ordinary": [np.empty(5 + k, np.float32) for k in range(n)],
            "shared": [hvd.empty(5 + k) for k in range(n)],
        }
        after = "shared" if before == "ordinary" else "ordinary"
        for change, memory in enumerate((before, after, before, after)):
            # One array of a grouped call changes; the slots of the others stay the same.
            mine = [arrays[memory][0], *arrays[before][1:]] if hvd.rank() == who else arrays[before]
            # A rank may submit again before the first response has ended, which makes a second response.
            for turn in range(2):
                reduce(mine, turn)
            hvd.barrier()
            fast, every = by_lane()
            for turn in range(8):
                reduce(mine, turn)
            assert by_lane() == (fast + 8 * n, every + 8 * n), f"after change {change}"
            hvd.barrier()

    _on(3, body)
