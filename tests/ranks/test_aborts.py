"""A rank's engine fails during a collective: the other ranks get an error with the rank and the cause."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.backends.host import HostBackend
from pyhvd.backends.shm import ShmBackend
from pyhvd.engine import context
from pyhvd.engine.executor import Executor
from pyhvd.engine.set_backends import SetBackends
from pyhvd.negotiation.messages import ErrorInfo
from pyhvd.testing import RanksFailed, run_ranks
from pyhvd.transport.inprocess import ThreadFabric
from pyhvd.transport.shm import ShmFabric
from tests.conformance.cases import outcome
from tests.ranks.test_hangs import look_only_when

SECONDS = 20.0
VICTIM = 1


def break_on(
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    verb: str,
    rank: int = VICTIM,
    ready: Callable[[], Any] = bool,
) -> None:
    """Make a method fail on one rank, once ``ready()`` has returned on that rank."""
    works = getattr(owner, verb)

    def breaks(self: Any, *args: Any) -> Any:
        if self.rank == rank:
            ready()
            raise MemoryError("no room")
        return works(self, *args)

    monkeypatch.setattr(owner, verb, breaks)


def check_error(error: BaseException | None, kind: type = hvd.InternalError, victim: int = VICTIM) -> None:
    """Assert that a rank got the expected error."""
    if hvd.rank() == victim:
        assert isinstance(error, kind), repr(error)
        assert "MemoryError" in str(error)
    else:
        assert isinstance(error, hvd.RankFailedError), repr(error)
        assert error.rank == victim
        assert str(error) == f"rank {victim} failed: MemoryError: no room"
        assert "in breaks" in str(error.__cause__)


@pytest.mark.parametrize("fast_lane", [False, True])
@pytest.mark.parametrize("count", [3, 300_000])
@pytest.mark.parametrize(("size", "victim"), [(2, 1), (4, 1), (3, 0)])
def test_an_allreduce_that_fails_on_one_rank(
    monkeypatch: pytest.MonkeyPatch, size: int, victim: int, count: int, fast_lane: bool
) -> None:
    break_on(monkeypatch, ShmBackend if fast_lane else HostBackend, "allreduce", victim)

    def body() -> None:
        hvd.barrier()
        other = hvd.allreduce_async(np.ones(2), name="beside")
        check_error(outcome(lambda: hvd.allreduce(np.ones(count), name="cut")), victim=victim)
        assert isinstance(other.exception(SECONDS), hvd.HorovodInternalError)
        check_error(outcome(hvd.barrier), hvd.HorovodInternalError, victim)

    run_ranks(size, body, timeout=SECONDS, knobs={"fast_lane": fast_lane})


VERBS: dict[str, tuple[str, Callable[[], Any]]] = {
    "allgather": ("allgatherv", lambda: hvd.allgather(np.ones(5), name="x")),
    "broadcast": ("broadcast", lambda: hvd.broadcast(np.ones(5), VICTIM, name="x")),
    "alltoall": ("exchange", lambda: hvd.alltoall(np.ones(6), name="x")),
    "reducescatter": ("alltoallv", lambda: hvd.reducescatter(np.ones(6), name="x")),
    "adasum": ("pairwise_exchange", lambda: hvd.allreduce(np.ones(40_000), op=hvd.Adasum, name="x")),
}


@pytest.mark.parametrize("fast_lane", [False, True])
@pytest.mark.parametrize("verb", VERBS)
def test_other_collectives_that_fail_on_one_rank(
    monkeypatch: pytest.MonkeyPatch, verb: str, fast_lane: bool
) -> None:
    method, call = VERBS[verb]
    if fast_lane and verb == "reducescatter":
        break_on(monkeypatch, ShmBackend, verb)
    else:
        break_on(monkeypatch, ShmFabric if fast_lane else ThreadFabric, method)

    def body() -> None:
        hvd.barrier()
        check_error(outcome(call))

    run_ranks(2, body, timeout=SECONDS, knobs={"fast_lane": fast_lane})


@pytest.mark.parametrize(
    ("count", "waits", "late"),
    [(3, False, 0.0), (300_000, False, 0.0), (300_000, True, 0.0), (3, True, 0.0), (3, True, 1.0)],
)
def test_an_engine_that_breaks_while_the_others_are_in_its_batch(
    monkeypatch: pytest.MonkeyPatch, count: int, waits: bool, late: float
) -> None:
    """Rank 1 has marked a tensor ready, and fails in an earlier response list; the others are in the window.

    A wait with a timeout ends in time, even if the background thread aborts the window late.
    """
    lanes: dict[int, Any] = {}
    entered, posted = threading.Event(), threading.Event()
    run = Executor.run

    def breaks(self: Executor, batch: Any) -> None:
        if batch[0].request.name == "alone":
            entered.set()
            assert posted.wait(SECONDS)
            until = time.monotonic() + SECONDS
            while not all(lanes[rank].look()[1] for rank in (0, 2)):
                assert time.monotonic() < until
                time.sleep(1e-3)
            raise MemoryError("no room")
        run(self, batch)

    monkeypatch.setattr(Executor, "run", breaks)
    abort = Executor.abort

    def comes_late(self: Executor, info: ErrorInfo) -> None:
        if info.rank != self.where.rank:
            time.sleep(late)
        abort(self, info)

    monkeypatch.setattr(Executor, "abort", comes_late)

    def body() -> None:
        alone = hvd.add_process_set([VICTIM])
        for _ in range(3):
            hvd.allreduce(np.ones(count), name="x")
        lanes[hvd.rank()] = context.current().runtime._fast_path
        hvd.barrier()
        if hvd.rank() == VICTIM:
            hvd.allreduce_async(np.ones(1), name="alone", process_set=alone).flush()
            assert entered.wait(SECONDS)
        handle = hvd.allreduce_async(np.ones(count), name="x")
        assert type(handle) is hvd.Handle, "not on the fast lane"
        handle.flush()
        if hvd.rank() == VICTIM:
            posted.set()
        while not waits and not handle.done():
            time.sleep(1e-3)
        check_error(handle.exception(SECONDS))
        check_error(outcome(hvd.barrier), hvd.HorovodInternalError)

    knobs = {"fast_lane": True, "dynamic_process_sets": True}
    run_ranks(3, body, timeout=SECONDS, knobs=knobs)


@pytest.mark.parametrize("fast_lane", [False, True])
def test_whoever_waits_for_a_rank_that_was_told_hears_of_the_first(
    monkeypatch: pytest.MonkeyPatch, fast_lane: bool
) -> None:
    """Rank 2 waits for rank 1 in one set, and rank 3 waits for rank 2 in another set."""
    owner: type = ShmBackend if fast_lane else HostBackend
    works = owner.allreduce  # type: ignore[attr-defined]
    inside, last_inside, told = threading.Event(), threading.Event(), threading.Barrier(4)

    def watched(self: Any, *args: Any) -> None:
        rank = hvd.rank()
        if rank == VICTIM:
            inside.set()
            assert last_inside.wait(SECONDS)
            breaks()
        if rank == 3:
            last_inside.set()
        works(self, *args)

    def breaks() -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(owner, "allreduce", watched)

    def body() -> None:
        pairs = [hvd.add_process_set(ranks) for ranks in ([2, 3], [1, 2])]
        for pair in [pair for pair in pairs if pair.included()]:
            hvd.barrier(pair)  # the first batch makes the backend
        hvd.barrier()
        if hvd.rank() == 3:
            assert inside.wait(SECONDS)
        handles = []
        for pair in [pair for pair in pairs if pair.included()]:
            handles.append(hvd.allreduce_async(np.ones(40_000), name="x", process_set=pair))
            handles[-1].flush()
        for handle in handles:
            check_error(handle.exception(SECONDS))
        check_error(outcome(hvd.barrier), hvd.HorovodInternalError)
        told.wait(SECONDS)  # the exit of the failed rank ends the others

    run_ranks(4, body, timeout=SECONDS, knobs={"fast_lane": fast_lane, "dynamic_process_sets": True})


def test_only_the_rank_that_broke_is_broken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The other ranks neither end the job nor log anything, since users read the first failure."""
    break_on(monkeypatch, ShmBackend, "allreduce")
    broken: dict[int, bool] = {}

    def body() -> None:
        runtime = context.current().runtime
        outcome(lambda: hvd.allreduce(np.ones(3), name="cut"))
        runtime.join()
        broken[hvd.rank()] = runtime.broken

    with caplog.at_level(logging.WARNING, "pyhvd"):
        run_ranks(3, body, timeout=SECONDS, knobs={"fast_lane": True})
    assert broken == {0: False, 1: True, 2: False}
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert said[0].startswith("rank 1: ")
    assert "MemoryError" in said[0]


def test_a_rank_that_gives_up_gives_the_others_its_facts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All ranks but one are in the window: the first timeout ends their wait, and the last rank's call."""
    told = threading.Barrier(3)
    late = threading.Event()
    look_only_when(monkeypatch)  # a late rank on a busy machine must not end this job
    works = ShmBackend.allreduce

    def holds(self: ShmBackend, *args: Any) -> None:
        if self.rank == VICTIM:
            assert late.wait(SECONDS)
        works(self, *args)

    monkeypatch.setattr(ShmBackend, "allreduce", holds)

    def body() -> None:
        error = outcome(lambda: hvd.allreduce(np.ones(3), name="x"))
        assert isinstance(error, hvd.StallError), repr(error)
        assert "has given up: rank " in str(error)
        assert "all ranks have submitted it, but some do not carry it out" in str(error)
        assert list(error.missing) == ["x"]
        told.wait(SECONDS)
        late.set()

    knobs = {"fast_lane": True, "stall_check_time_seconds": 0.2, "stall_shutdown_time_seconds": 0.4}
    with caplog.at_level(logging.ERROR, "pyhvd"):
        run_ranks(3, body, timeout=SECONDS, knobs=knobs)
    assert not any("did not end well" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("raises", [False, True])
def test_an_orderly_end_aborts_nothing(monkeypatch: pytest.MonkeyPatch, raises: bool) -> None:
    """A shutdown or a program's own error does not abort the window: earlier submissions complete."""
    for thread in threading.enumerate():  # ranks that an earlier case broke may still time out
        if thread.name.startswith("pyhvd-"):
            thread.join(SECONDS)
    aborted: list[int] = []
    monkeypatch.setattr(ShmFabric, "abort", lambda self, _: aborted.append(self.rank))

    def body() -> None:
        handles = [hvd.allreduce_async(np.ones(n), op=hvd.Sum, name=f"x{n}") for n in (1, 50_000)]
        assert all((handle.result(SECONDS) == 3).all() for handle in handles)
        if raises and hvd.rank() == VICTIM:
            raise KeyError("the program's own")
        if raises:
            outcome(hvd.barrier)

    if raises:
        with pytest.raises(RanksFailed, match="the program's own"):
            run_ranks(3, body, timeout=SECONDS, knobs={"fast_lane": True})
    else:
        run_ranks(3, body, timeout=SECONDS, knobs={"fast_lane": True})
    assert aborted == []


def test_an_abort_that_fails_leaves_no_other_set_waiting() -> None:
    aborted: list[int] = []

    class Backend:
        def __init__(self, number: int) -> None:
            self.number = self.size = number
            self.fabric = self

        def subset(self, ranks: object, tag: object) -> None:
            """Return nothing: the fabric is not used."""

        def abort(self, note: bytes) -> None:
            aborted.append(self.number)
            if self.number == 0:
                raise OSError("gone")

    class Devices:
        def abort(self, why: str) -> None:
            aborted.append(9)

    executor: Any = Executor.__new__(Executor)
    made: Any = Backend(1)
    executor.backends, executor.devices = SetBackends(cast(Any, Backend(0)), lambda *_: made), Devices()
    executor.backends.add(1, (0, 1))
    executor.backends.open(1)
    with pytest.raises(OSError, match="gone"):
        executor.abort(ErrorInfo(0, "rank 1 failed", 1))
    assert aborted == [0, 1, 9]
