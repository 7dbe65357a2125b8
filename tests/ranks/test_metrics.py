"""Test hvd.metrics() of known programs, with and without the fast path: all numbers but times are exact."""

from __future__ import annotations

import socket
import threading
import urllib.request
from typing import Any

import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.engine.context import current
from pyhvd.testing import RanksFailed, run_ranks

FAST = {"fast_lane": True}
SLOW = {"fast_lane": False}
each_lane = pytest.mark.parametrize("knobs", [FAST, SLOW], ids=["fast", "messages"])


def known_program() -> hvd.Metrics:
    for singles, groups in ((1, 1), (4, 2)):
        for _ in range(singles):
            hvd.allreduce(np.ones(100, np.float32), name="a")
        for _ in range(groups):
            hvd.grouped_allreduce([np.ones(2), np.ones(6), np.ones(24)], name="g")
        hvd.barrier()  # tensors submitted once are on the fast path after it
    hvd.allgather(np.ones(3, np.int32), name="b")
    hvd.broadcast(np.ones(5, np.uint8), 0, name="c")
    return hvd.metrics()


@each_lane
@pytest.mark.parametrize("size", [1, 3])
def test_counts_of_a_known_program(size: int, knobs: dict[str, Any]) -> None:
    counted = run_ranks(size, known_program, knobs=knobs)
    fast, slow = ("fast", "window") if knobs["fast_lane"] else ("mpi", "mpi")
    for rank, seen in enumerate(counted):
        assert (seen.rank, seen.size) == (rank, size)
        allreduces = {slow: 1 + 3}
        allreduces[fast] = allreduces.get(fast, 0) + 4 + 2 * 3
        assert seen.tensors == {
            "allreduce": allreduces,
            "allgather": {slow: 1},
            "broadcast": {slow: 1},
            "barrier": {slow: 1, fast: 1} if knobs["fast_lane"] else {slow: 2},
        }
        nbytes = {verb: sum(lanes.values()) for verb, lanes in seen.bytes.items()}
        assert nbytes == {
            "allreduce": 5 * 400 + 3 * 256,
            "allgather": 12,
            "broadcast": 5,
            "barrier": 0,
        }
        # One response per call, since the group's tensors have one dtype.
        assert sum(seen.responses.values()) == seen.response_tensors.count == 5 + 3 + 4
        assert seen.response_tensors.sum == 5 + 9 + 4
        assert seen.response_bytes.sum == sum(nbytes.values())
        bounds = dict(zip(seen.response_tensors.bounds, seen.response_tensors.counts, strict=False))
        assert (bounds[1.0], bounds[4.0]) == (9, 3)
        assert (seen.cache_hits, seen.cache_misses) == (4 + 6 + 1, 1 + 3 + 2)
        assert seen.errors == {}
        assert seen.stall_warnings == seen.stalled_tensors == 0
        assert not seen.timed
        times = (seen.negotiation_seconds, seen.execution_seconds, seen.wait_seconds)
        assert [each.count for each in times] == [0, 0, 0]
    # Each tensor has one last rank; with one rank, no rank is late.
    tensors = 5 + 9 + 4 if size > 1 else 0
    assert sum(counted[0].late_tensors) == tensors
    assert len(counted[0].late_tensors) == len(counted[0].awaited_seconds) == size
    assert 0 <= sum(counted[0].awaited_seconds) <= counted[0].seconds
    assert [seen.late_tensors for seen in counted[1:]] == [()] * (size - 1)


@each_lane
def test_times_of_a_known_program(knobs: dict[str, Any]) -> None:
    for seen in run_ranks(2, known_program, knobs={**knobs, "metrics_port": 0}):
        assert seen.timed
        assert seen.negotiation_seconds.count == 5 + 9 + 4
        # The engine may record the last response's end after its caller has continued.
        assert seen.response_tensors.count - 1 <= seen.execution_seconds.count <= seen.response_tensors.count
        assert 0 < seen.wait_seconds.count <= 5 + 3 + 4
        assert 0 < seen.execution_seconds.sum < seen.seconds
        assert 0 < seen.wait_seconds.sum < seen.seconds


@each_lane
def test_whom_the_others_wait_for(knobs: dict[str, Any]) -> None:
    patience = 0.05
    posted = threading.Event()

    def late() -> hvd.Metrics:
        tensor = np.ones(10)
        for _ in range(3):
            hvd.allreduce(tensor, name="x")
        handle = hvd.allreduce_async(tensor, name="x") if hvd.rank() == 0 else None
        hvd.barrier()  # rank 0's engine has seen the earlier submission after it
        before = hvd.metrics()
        if handle is not None:
            assert not handle.wait(patience)
            posted.set()
            hvd.synchronize(handle)
            after = hvd.metrics()
            grown = [b - a for a, b in zip(before.late_tensors, after.late_tensors, strict=True)]
            assert grown == [0, 1]
            awaited = after.awaited_seconds[1] - before.awaited_seconds[1]
            assert 0.9 * patience <= awaited <= after.seconds
            assert after.awaited_seconds[0] == before.awaited_seconds[0]
        else:
            assert posted.wait(20)
            hvd.allreduce(tensor, name="x")
        return hvd.metrics()

    zero, one = run_ranks(2, late, knobs={**knobs, "metrics_port": 0})
    assert zero.wait_seconds.sum >= 0.9 * patience
    assert zero.negotiation_seconds.sum >= 0.9 * patience
    assert one.late_tensors == ()


@each_lane
def test_errors_by_kind(knobs: dict[str, Any]) -> None:
    def wrong() -> dict[str, int]:
        hvd.allreduce(np.ones(4), name="x")
        with pytest.raises(hvd.MismatchError):
            hvd.allreduce(np.ones(4 + hvd.rank()), name="x")
        if hvd.rank() == 1:
            with pytest.raises(ValueError, match="root_rank"):
                hvd.broadcast(np.ones(1), 7, name="y")
        else:
            with pytest.raises(hvd.RankFailedError):
                hvd.broadcast(np.ones(1), 0, name="y")
        hvd.barrier()  # the first rank to end would end the others' calls
        return hvd.metrics().errors

    zero, one = run_ranks(2, wrong, knobs=knobs)
    assert zero == {"MismatchError": 1, "RankFailedError": 1}
    assert one == {"MismatchError": 1, "refused": 1}


@each_lane
def test_what_the_end_leaves_is_counted(knobs: dict[str, Any]) -> None:
    over = threading.Event()

    def leave() -> dict[str, int] | None:
        hvd.allreduce(np.ones(4), name="x")
        if hvd.rank() == 1:
            assert over.wait(20)
            return None
        meter = current().runtime.meter
        handle = hvd.allreduce_async(np.ones(4), name="x")
        hvd.shutdown()
        over.set()
        assert isinstance(handle.exception(), hvd.ShutDownError)
        return meter.snapshot().errors

    assert run_ranks(2, leave, knobs=knobs)[0] == {"ShutDownError": 1}


def test_a_call_without_a_name_misses_once() -> None:
    def unnamed() -> hvd.Metrics:
        for _ in range(4):
            hvd.allreduce(np.ones(4))
        return hvd.metrics()

    for seen in run_ranks(2, unnamed):
        assert (seen.cache_hits, seen.cache_misses) == (3, 1)


def test_what_a_joined_rank_helps_with_is_not_its_own() -> None:
    def uneven() -> hvd.Metrics:
        for _ in range(2 + 3 * hvd.rank()):
            hvd.allreduce(np.ones(4), name="x")
        hvd.join()
        return hvd.metrics()

    zero, one = run_ranks(2, uneven)
    assert sum(zero.tensors["allreduce"].values()) == zero.response_tensors.sum - 1 == 2
    assert sum(one.tensors["allreduce"].values()) == one.response_tensors.sum - 1 == 5


@each_lane
def test_threads_count_without_loss(knobs: dict[str, Any]) -> None:
    threads, calls = 4, 50

    def many() -> hvd.Metrics:
        from pyhvd.engine.context import current_holder, playing_rank

        slot = current_holder()

        def work(k: int) -> None:
            with playing_rank(slot):
                for _ in range(calls):
                    hvd.allreduce(np.ones(8), name=f"t{k}")
                    hvd.metrics()

        crew = [threading.Thread(target=work, args=(k,)) for k in range(threads)]
        for thread in crew:
            thread.start()
        for thread in crew:
            thread.join()
        return hvd.metrics()

    for seen in run_ranks(2, many, knobs={**knobs, "metrics_port": 0}):
        assert sum(seen.tensors["allreduce"].values()) == threads * calls
        assert sum(seen.bytes["allreduce"].values()) == threads * calls * 64
        assert seen.cache_hits + seen.cache_misses == threads * calls
        assert seen.negotiation_seconds.count == threads * calls
        assert seen.wait_seconds.count <= threads * calls


@each_lane
def test_stalls_are_counted_on_rank_0(knobs: dict[str, Any]) -> None:
    warned = threading.Event()

    def stall() -> hvd.Metrics:
        if hvd.rank() == 0:
            handle = hvd.allreduce_async(np.ones(4), name="x")
            for _ in range(400):
                if handle.wait(0.05) or hvd.metrics().stall_warnings:
                    break
            seen = hvd.metrics()
            assert seen.stalled_tensors == 1
            assert seen.stall_warnings >= 1  # one more per further 0.2 s
            warned.set()
            hvd.synchronize(handle)
        else:
            assert warned.wait(30)
            hvd.allreduce(np.ones(4), name="x")
        return hvd.metrics()

    _, one = run_ranks(2, stall, knobs={**knobs, "stall_check_time_seconds": 0.2})
    assert (one.stalled_tensors, one.stall_warnings) == (0, 0)


def test_every_rank_serves_its_own() -> None:
    def served() -> str:
        hvd.allreduce(np.ones(4), name="x")
        endpoint = current().endpoint
        assert endpoint is not None
        with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=10) as answer:
            text: str = answer.read().decode()
        assert hvd.metrics().timed
        return text

    for rank, text in enumerate(run_ranks(3, served, knobs={"metrics_port": 0, "fast_lane": True})):
        assert f'pyhvd_tensors_total{{lane="window",rank="{rank}",verb="allreduce"}} 1.0' in text
        assert "pyhvd_execution_seconds_count" in text


def test_a_port_that_cannot_be_had_fails_every_rank() -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, hvd.rank, knobs={"metrics_port": 65535})
    assert failed.value.errors.keys() == {0, 1}
    assert isinstance(failed.value.errors[1], hvd.ConfigError)
    assert "PYHVD_METRICS_PORT=65535: plus local rank 1" in str(failed.value.errors[1])


def test_an_init_that_fails_gives_the_port_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no lane today")

    with socket.create_server(("127.0.0.1", 0)) as free:
        knobs = {"metrics_port": free.getsockname()[1]}
    with monkeypatch.context() as broken:
        broken.setattr("pyhvd.engine.context.open_fast_path", fail)
        with pytest.raises(RanksFailed, match="no lane today"):
            run_ranks(1, hvd.rank, knobs=knobs)
    assert run_ranks(1, hvd.rank, knobs=knobs) == [0]


def test_before_init_there_is_nothing() -> None:
    with pytest.raises(hvd.NotInitializedError):
        hvd.metrics()
