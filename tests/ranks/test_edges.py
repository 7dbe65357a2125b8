"""Edge cases of calls and handles: name collisions, empty groups, callbacks, invalid output arrays."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
import threading
from typing import Any

import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.engine.context import current_holder, playing_rank
from pyhvd.testing import RanksFailed, run_ranks


def test_names_that_pyhvd_makes_up_are_refused() -> None:
    def body() -> int:
        for taken in ("noname.0", "barrier.noname.1", "join.noname", "object.noname.0.sz"):
            with pytest.raises(ValueError, match="pyhvd reserves names"):
                hvd.allreduce(1.0, name=taken)
        for free in ("join", "barrier.0", "object.0.sz", "nonames", "x.noname1"):
            assert hvd.allreduce(1.0, name=free, op=hvd.Sum) == hvd.size()
        if hvd.rank() == 1:
            hvd.allreduce(np.ones(2), name="join")
        return hvd.join()

    assert run_ranks(2, body, timeout=20) in ([0, 0], [1, 1])


@pytest.mark.parametrize("verb", ["grouped_allreduce", "grouped_allgather", "grouped_reducescatter"])
def test_an_empty_group_on_one_rank_is_an_error_on_the_others(verb: str) -> None:
    def body() -> float:
        assert getattr(hvd, verb)([]) == []
        if hvd.rank() == 1:
            assert getattr(hvd, verb)([]) == []
        else:
            with pytest.raises(hvd.RankFailedError, match="rank 1 refused it: its list of tensors is empty"):
                getattr(hvd, verb)([np.ones(4)] * 2)
        return float(hvd.allreduce(1.0, op=hvd.Sum))

    assert run_ranks(3, body, timeout=20) == [3.0] * 3


def test_a_bad_setting_on_one_rank_is_an_error_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = threading.Lock()
    turn = iter([False, True, False, False])
    real = hvd.Config.from_env

    def from_env(env: object = None, **overrides: object) -> object:
        with reads:
            bad = next(turn, False)
        return real({**os.environ, **({"PYHVD_CYCLE_TIME": "abc"} if bad else {})}, **overrides)

    monkeypatch.setattr(hvd.Config, "from_env", from_env)

    def body() -> str:
        with pytest.raises(ValueError, match="PYHVD_CYCLE_TIME='abc'") as caught:
            hvd.init()
        hvd.init()  # now every rank reads a valid setting
        return type(caught.value).__name__

    assert sorted(run_ranks(2, body, init=False, timeout=20)) == ["ConfigError", "ValueError"]


def test_callbacks_may_raise_anything_and_submit_but_not_wait(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "pyhvd")

    waits = threading.Event()

    def body() -> float:
        if hvd.rank() == 1:
            assert waits.wait(20)
            hvd.allreduce(1.0, name="first")
            return float(hvd.allreduce(2.0, name="submitted", op=hvd.Sum))
        submitted: list[hvd.Handle] = []
        called = threading.Event()

        def leave(_: hvd.Handle) -> None:
            raise SystemExit("not from here")

        def wait(_: hvd.Handle) -> None:
            hvd.allreduce(1.0, name="from a callback")

        def submit(_: hvd.Handle) -> None:
            submitted.append(hvd.allreduce_async(2.0, name="submitted", op=hvd.Sum))
            called.set()

        handle = hvd.allreduce_async(1.0, name="first")
        for callback in (leave, wait, submit):
            handle.add_done_callback(callback)  # before the call ends, or this thread would run the callback
        waits.set()
        assert called.wait(20)
        return float(submitted[0].result(20))

    assert run_ranks(2, body, timeout=30) == [4.0, 4.0]


def test_a_target_that_becomes_read_only_in_flight_fails_alone() -> None:
    ready = threading.Barrier(2)

    def body() -> list[float]:
        target = np.ones((4, 4)).T[:, ::2]
        if hvd.rank() == 1:
            ready.wait(20)
        others = [hvd.allreduce_async(np.ones(2), name=f"before.{i}", op=hvd.Sum) for i in range(2)]
        handle = hvd.allreduce_async_(target, name="target", op=hvd.Sum)
        others.append(hvd.allreduce_async(np.ones(2), name="behind", op=hvd.Sum))
        if hvd.rank() == 0:
            target.flags.writeable = False
            ready.wait(20)
            with pytest.raises(ValueError, match="read-only"):
                handle.result(20)
        else:
            assert (handle.result(20) == 2.0).all()
        return [float(other.result(20)[0]) for other in others]

    assert run_ranks(2, body, timeout=40) == [[2.0] * 3] * 2


def test_what_is_not_a_set_and_the_global_set_cannot_be_removed() -> None:
    def body() -> bool:
        with pytest.raises(ValueError, match="takes a ProcessSet"):
            hvd.remove_process_set([0])  # type: ignore[arg-type]
        return hvd.remove_process_set(hvd.global_process_set)

    assert run_ranks(2, body) == [False, False]


def test_an_exception_without_text_is_named_without_a_colon() -> None:
    def body() -> None:
        if hvd.rank() == 1:
            raise KeyboardInterrupt
        hvd.allreduce(1.0)

    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, body, timeout=20)
    assert str(caught.value.errors[0]) == "rank 1 failed: KeyboardInterrupt"


def test_a_warning_points_at_the_caller() -> None:
    def body() -> str:
        with pytest.warns(DeprecationWarning, match="average") as caught:
            hvd.allreduce_async(1.0, average=True).result()
        return caught[0].filename

    assert run_ranks(1, body) == [__file__]


class Odd(list[object]):
    """A list that yields more items than its length."""

    def __len__(self) -> int:
        return super().__len__() - 1


@pytest.mark.parametrize("verb", ["grouped_allreduce", "grouped_allreduce_", "grouped_allgather"])
def test_a_group_is_what_iterating_over_its_list_yields(verb: str) -> None:
    def body() -> None:
        tensors = Odd([np.ones(2), np.full(3, 2.0), np.full(1, 3.0)])
        for _ in range(3):  # uses the fast path from the second call on
            results = getattr(hvd, verb)(tensors, name="x")
            assert [result[0] for result in results] == [1.0, 2.0, 3.0]

    run_ranks(2, body, timeout=30)


class _GathersWhilePickled:
    def __reduce__(self) -> tuple[type, tuple[int]]:
        return int, (sum(hvd.allgather_object(hvd.rank() + 1)),)


def test_an_object_that_gathers_while_it_is_pickled() -> None:
    def body() -> None:
        assert hvd.allgather_object(_GathersWhilePickled()) == [3, 3]
        assert hvd.broadcast_object(7, 1) == 7

    run_ranks(2, body, timeout=20)


@pytest.mark.parametrize("fast_lane", [False, True])
def test_a_callback_that_calls_a_barrier_is_told_not_to_wait(fast_lane: bool) -> None:
    def body() -> None:
        told: list[str] = []
        holder, ended = current_holder(), threading.Event()

        def call(_: hvd.Handle) -> None:
            with playing_rank(holder):
                try:
                    hvd.barrier()
                except RuntimeError as exc:
                    told.append(str(exc))
            ended.set()

        hvd.allreduce(np.ones(2), name="x")
        handle = hvd.allreduce_async(np.ones(2), name="x")
        handle.add_done_callback(call)
        hvd.barrier()
        assert ended.wait(10)
        assert "must not wait" in told[0]

    run_ranks(2, body, timeout=20, knobs={"fast_lane": fast_lane})


def test_splits_that_are_no_ints_are_refused_although_the_call_is_remembered() -> None:
    def body() -> None:
        x = np.arange(4)
        for _ in range(3):
            hvd.alltoall(x, [2, 2], name="x")
        bad: Any = [np.array([2, 2]), 2] if hvd.rank() else [2, 2]
        with pytest.raises((ValueError, TypeError) if hvd.rank() else hvd.RankFailedError):
            hvd.alltoall(x, bad, name="x")
        assert hvd.alltoall(x, [2, 2], name="x")[1].tolist() == [2, 2]

    run_ranks(2, body, timeout=20, knobs={"fast_lane": True})


def secret_array(count: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return an array in memory that the kernel reads for no process, as a device may have."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(_MEMFD_SECRET, 0) if sys.platform == "linux" else -1
    if fd < 0:
        pytest.skip("no memfd_secret(2) here")
    os.ftruncate(fd, 4 * count)
    memory = mmap.mmap(fd, 4 * count)
    os.close(fd)
    return np.frombuffer(memory, np.float32)


_MEMFD_SECRET = 447


@pytest.mark.parametrize("secret", [[0], [1, 2], [0, 1, 2]], ids=str)
def test_arrays_that_no_peer_can_read(secret: list[int]) -> None:
    """Some ranks' lanes come in chunks, and the others' memory is read where it is."""

    def body() -> None:
        move_all(secret_array(_COUNT) if hvd.rank() in secret else np.empty(_COUNT, np.float32), name="array")

    run_ranks(3, body, timeout=30)


@pytest.mark.parametrize("shared", [[0], [1, 2], [0, 1, 2]], ids=str)
def test_arrays_that_all_ranks_have_mapped(shared: list[int]) -> None:
    """Peers copy out of them themselves: also out of a part, and after ordinary arrays of the same name."""

    def body() -> None:
        ordinary = np.empty(_COUNT, np.float32)
        held = hvd.empty(_COUNT + 5, np.float32)[5:] if hvd.rank() in shared else ordinary
        for array in (ordinary, held, ordinary, held):
            move_all(array, name="array")

    run_ranks(3, body, timeout=30)


_COUNT = 69_000


def move_all(array: np.ndarray[Any, np.dtype[np.float32]], name: str) -> None:
    """Let 3 ranks gather, exchange and broadcast an array several times, from each root."""
    count = len(array)
    for step in range(6):
        array[:] = np.arange(count) + hvd.rank() + step
        whole = hvd.allgather(array, name=f"{name}.gather").reshape(3, count)
        assert (whole == np.arange(count) + np.arange(3)[:, None] + step).all()
        mixed = hvd.alltoall(array, name=f"{name}.exchange")
        first = np.arange(count // 3) + hvd.rank() * (count // 3)
        assert (mixed.reshape(3, -1) == first + np.arange(3)[:, None] + step).all()
        root = step % 3
        sent = hvd.broadcast(array, root, name=f"{name}.{root}")
        assert (sent == np.arange(count) + root + step).all()
