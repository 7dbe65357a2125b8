"""Failures of NCCL, at the start or later: every rank gets an error, and no device waits."""

from __future__ import annotations

import threading
import time
import types
from typing import Any

import numpy as np
import pytest

from pyhvd.backends.gpu import nccl as nccl_backend
from pyhvd.backends.gpu.nccl_init import Refused, open_nccl
from pyhvd.devices.base import DeviceContext
from pyhvd.dtypes import ReduceOp, ReduceSpec
from pyhvd.errors import TransportError
from pyhvd.transport.inprocess import ThreadFabric, ThreadGroup
from tests.devices.fake_nccl import FakeCommunicator, FakeNccl, NcclError, PeerDevice
from tests.devices.nccl_ranks import Rank, good, on_ranks

# -- starting --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("old", [False, True])
def test_ids_of_either_form_reach_every_rank(old: bool) -> None:
    assert good(on_ranks(3, lambda rank: rank.nccl.rank, nccl=FakeNccl(old))) == [0, 1, 2]


def test_one_rank_that_is_refused_is_named_on_all() -> None:
    nccl = FakeNccl()
    nccl.refuses = dict.fromkeys(range(3), NcclError("NCCL_ERROR_INVALID_USAGE: invalid usage"))
    results = on_ranks(3, lambda rank: None, nccl=nccl)
    assert {type(result) for result in results} == {Refused}
    assert {str(result) for result in results} == {
        "; ".join(
            f"rank {r} of the set: NcclError: NCCL_ERROR_INVALID_USAGE: invalid usage" for r in range(3)
        )
    }


def test_a_rank_that_never_comes_is_waited_for_so_long_and_no_longer() -> None:
    nccl = FakeNccl()
    nccl.refuses = {1: NcclError("NCCL_ERROR_SYSTEM_ERROR: é" + "x" * 600)}
    results = on_ranks(2, lambda rank: None, nccl=nccl, timeouts=[0.2, 30.0])
    assert {type(result) for result in results} == {Refused}
    assert len({str(result) for result in results}) == 1
    text = str(results[0])
    assert text.startswith(
        "rank 0 of the set: TimeoutError: NCCL has not connected the ranks within 0.2 s; rank 1 of the set:"
        " NcclError: NCCL_ERROR_SYSTEM_ERROR: é"
    )
    assert len(text) < 700


def test_no_id_is_no_communicator() -> None:
    nccl = FakeNccl()

    def broken() -> Any:
        raise OSError("libnccl.so.2: cannot open shared object file")

    nccl.new_id = broken  # type: ignore[method-assign]
    results = on_ranks(2, lambda rank: None, nccl=nccl)
    assert {str(result) for result in results} == {
        "rank 0 of the set: OSError: libnccl.so.2: cannot open shared object file"
    }


def test_connecting_ends_when_a_rank_is_lost_and_what_connects_later_is_aborted() -> None:
    asked, released, aborted = threading.Event(), threading.Event(), threading.Event()

    class Slow(FakeNccl):
        def NcclCommunicator(self, size: int, made: Any, rank: int) -> Any:  # noqa: N802
            asked.set()
            assert released.wait(20)
            return types.SimpleNamespace(abort=aborted.set)

    def why() -> str:
        return "rank 1 has ended" if asked.is_set() else ""

    fabric, device = ThreadFabric(ThreadGroup(1, 30.0), 0), PeerDevice()
    context = DeviceContext(device, 0, device)
    with pytest.raises(TransportError, match="connecting the ranks by NCCL was given up: rank 1 has ended"):
        open_nccl(fabric, context, _with_ids(Slow()), _never, 30.0, why)
    released.set()
    assert aborted.wait(10)


def _with_ids(library: Any) -> Any:
    library.get_unique_id = library.new_id
    return library


def _never() -> Any:
    raise AssertionError


# -- failing ---------------------------------------------------------------------------------------------


def test_a_call_that_fails_aborts_the_communicator_and_the_others_learn_of_it() -> None:
    nccl = FakeNccl()
    nccl.fails_at = {1: "allReduce"}

    def work(rank: Rank) -> tuple[str, str]:
        view = rank.array(np.ones(4, np.float32))

        def reduce() -> None:
            rank.nccl.allreduce([view], [view], [4], ReduceSpec(view.info, ReduceOp.SUM))

        if rank.rank == 1:
            with pytest.raises(TransportError) as first:
                reduce()
            with pytest.raises(TransportError) as second:
                reduce()
            return str(first.value), str(second.value)
        reduce()
        with pytest.raises(TransportError) as first:  # noqa: PT012 - it polls
            while True:  # until the peer has aborted
                rank.nccl.check()
        with pytest.raises(TransportError) as second:
            rank.nccl.check()
        rank.finish()  # the device does not wait any longer
        return str(first.value), str(second.value)

    other, failed = good(on_ranks(2, work, nccl=nccl))
    text = "NCCL failed on cuda:0: NcclError: NCCL_ERROR_UNHANDLED_CUDA_ERROR: unhandled cuda error"
    assert failed == (text, f"NCCL's communicator is gone: {text}")
    text = "NCCL failed on cuda:0: NcclError: NCCL_ERROR_REMOTE_ERROR: a peer has aborted"
    assert other == (text, f"NCCL's communicator is gone: {text}")
    assert sorted(nccl.aborted) == [0, 1]


def test_a_code_that_cupy_does_not_know_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_progress(comm: FakeCommunicator) -> None:
        raise KeyError(7)  # of the names in CuPy's NcclError

    monkeypatch.setattr(FakeCommunicator, "check_async_error", in_progress)

    def work(rank: Rank) -> None:
        with pytest.raises(TransportError, match=r"^NCCL failed on cuda:0: NCCL's code 7$"):
            rank.nccl.check()

    good(on_ranks(1, work))


def test_a_group_that_fails_is_ended() -> None:
    nccl = FakeNccl()
    nccl.fails_at = {0: "recv"}

    def work(rank: Rank) -> None:
        view = rank.array(np.ones(8, np.uint8))
        into = rank.array(np.ones(8, np.uint8))
        if rank.rank == 0:
            with pytest.raises(TransportError, match="unhandled cuda error"):
                rank.nccl.alltoall(view.span, [4, 4], into.span, [4, 4])
            library: Any = rank.nccl.library
            assert library._depth == 0

    good(on_ranks(2, work, nccl=nccl))


def test_no_memory_on_the_device_is_a_transport_error() -> None:
    def work(rank: Rank) -> None:
        pair = [rank.array(np.ones(64, np.float32)) for _ in range(2)]
        rank.device.limit = rank.device.allocated
        with pytest.raises(TransportError, match="NCCL failed on cuda:0: MemoryError: 512 bytes more"):
            rank.nccl.allreduce(pair, pair, [64, 64], ReduceSpec(pair[0].info, ReduceOp.SUM))

    good(on_ranks(1, work))


def test_abort_ends_what_waits_for_a_rank_that_is_gone() -> None:
    def work(rank: Rank) -> None:
        if rank.rank == 0:
            view = rank.array(np.ones(4, np.float32))
            rank.nccl.allreduce([view], [view], [4], ReduceSpec(view.info, ReduceOp.SUM))
            rank.nccl.abort("rank 1 has been killed")
            rank.finish()
            with pytest.raises(
                TransportError, match=r"^NCCL's communicator is gone: rank 1 has been killed$"
            ):
                rank.nccl.check()
            rank.nccl.close()

    nccl = FakeNccl()
    good(on_ranks(2, work, nccl=nccl))
    assert nccl.aborted == [0]
    assert nccl.destroyed == []


def test_an_abort_waits_for_the_call_that_another_thread_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL frees the communicator, so the call would use freed memory."""
    inside, seen = threading.Event(), []

    def check(comm: FakeCommunicator) -> None:
        inside.set()
        time.sleep(0.2)
        inside.clear()

    def abort(comm: FakeCommunicator) -> None:
        seen.append(inside.is_set())

    monkeypatch.setattr(FakeCommunicator, "check_async_error", check)
    monkeypatch.setattr(FakeCommunicator, "abort", abort)

    def work(rank: Rank) -> None:
        asking = threading.Thread(target=rank.nccl.check)
        asking.start()
        assert inside.wait(10)
        rank.nccl.abort("rank 1 has been killed")
        asking.join()
        rank.nccl.close()

    good(on_ranks(1, work))
    assert seen == [False]


def test_a_call_that_blocks_is_ended_by_the_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    aborted = threading.Event()
    monkeypatch.setattr(nccl_backend, "CALL_SECONDS", 0.1)
    monkeypatch.setattr(FakeCommunicator, "check_async_error", lambda comm: aborted.wait(20))
    monkeypatch.setattr(FakeCommunicator, "abort", lambda comm: aborted.set())

    def work(rank: Rank) -> None:
        asking = threading.Thread(target=rank.nccl.check)
        asking.start()
        while not rank.nccl._calling.locked():
            time.sleep(0.01)
        rank.nccl.abort("rank 1 has been killed")
        asking.join(10)
        assert not asking.is_alive()
        rank.nccl.close()

    good(on_ranks(1, work))


def test_closing_gives_up_communicator_and_buffer() -> None:
    def work(rank: Rank) -> int:
        pair = [rank.array(np.ones(64, np.float32)) for _ in range(2)]
        before = rank.device.allocated
        rank.nccl.allreduce(pair, pair, [64, 64], ReduceSpec(pair[0].info, ReduceOp.SUM))
        rank.finish()
        rank.nccl.close()
        rank.nccl.close()
        with pytest.raises(TransportError, match="it has been closed"):
            rank.nccl.check()
        rank.context.buffer.free()
        return rank.device.allocated - before

    nccl = FakeNccl()
    assert good(on_ranks(2, work, nccl=nccl)) == [0, 0]
    assert sorted(nccl.destroyed) == [0, 1]
