"""Failures on devices by a fake NCCL: callers get errors soon, and nothing is freed while it is used."""

from __future__ import annotations

import contextlib
import logging
import threading

import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.testing import RanksFailed
from tests.devices import fake_nccl
from tests.devices.fake import fake_array
from tests.devices.fake_nccl import FakeCommunicator, FakeNccl, NcclError, PeerDevice
from tests.ranks.test_devices_by_nccl import nccl, on_devices

__all__ = ["nccl"]

ONES = np.ones(4, np.float32)


def warm_up(device: PeerDevice) -> None:
    """Let NCCL connect, and end all work."""
    hvd.allreduce(fake_array(device, ONES), name="warm").get()


def test_a_device_that_never_ends_is_reported_and_ends_the_job(
    nccl: FakeNccl, caplog: pytest.LogCaptureFixture
) -> None:
    def body(device: PeerDevice) -> None:
        warm_up(device)
        release = device.hold_up(device.current_stream()) if hvd.rank() == 1 else None
        hvd.allreduce(fake_array(device, ONES), name="stuck")  # returns: the work is queued
        ended.wait(20)
        try:
            hvd.allreduce(ONES, name="next")
        finally:
            if release is not None:
                release()

    ended = threading.Event()
    caplog.handler.addFilter(lambda record: ended.set() or True)  # type: ignore[func-returns-value]
    with caplog.at_level(logging.ERROR, logger="pyhvd"), pytest.raises(RanksFailed) as caught:
        on_devices(2, body, stall_check_time_seconds=0.2, stall_shutdown_time_seconds=0.2)
    assert ended.is_set()
    assert any("has waited for 'stuck on its device'" in str(error) for error in caught.value.errors.values())


def test_the_shutdown_time_ends_connecting(nccl: FakeNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def connect(*_: object) -> None:
        released.wait(20)
        raise NcclError("NCCL_ERROR_SYSTEM_ERROR: too late")

    monkeypatch.setattr(fake_nccl._Rank, "NcclCommunicator", connect)

    def body(device: PeerDevice) -> None:
        with pytest.raises(hvd.HorovodInternalError, match="has waited for 'x' for"):
            hvd.allreduce(fake_array(device, ONES), name="x")

    on_devices(2, body, stall_check_time_seconds=0.2, stall_shutdown_time_seconds=0.2)
    assert {"pyhvd-0", "pyhvd-1"}.isdisjoint(thread.name for thread in threading.enumerate())
    released.set()


def test_callers_get_their_errors_before_an_abort_ends(
    nccl: FakeNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = threading.Event()
    abort = FakeCommunicator.abort

    def abort_late(comm: FakeCommunicator) -> None:
        waited.append(told.wait(20))
        abort(comm)

    waited: list[bool] = []
    monkeypatch.setattr(FakeCommunicator, "abort", abort_late)

    def body(device: PeerDevice) -> None:
        warm_up(device)
        nccl.fails_at = {0: "allReduce"}
        with pytest.raises(hvd.HorovodInternalError, match="NCCL_ERROR_UNHANDLED_CUDA_ERROR"):
            hvd.allreduce(fake_array(device, ONES), name="x")
        told.set()

    on_devices(1, body)
    assert waited == [True]


def test_no_state_keeps_results_of_aborted_work(nccl: FakeNccl) -> None:
    def body(device: PeerDevice) -> None:
        warm_up(device)
        state = hvd.elastic.ObjectState(step=1)
        held_up = device.hold_up(device.current_stream()) if hvd.rank() == 1 else None
        hvd.allreduce(fake_array(device, ONES), name="x")  # returns: the work is queued
        with pytest.raises(TimeoutError, match=r"cuda:0 has not ended its work on 'x' within 0\.01 s"):
            hvd.device_synchronize(0.01)
        state.step = 2
        nccl.fails_at = {1: "broadcast from 0"}
        with contextlib.suppress(hvd.HorovodInternalError):
            hvd.broadcast(fake_array(device, ONES), 0, name="y")
        if held_up is not None:
            held_up()
        with pytest.raises(hvd.HorovodInternalError, match="results may be wrong"):
            state.save()
        state.restore()
        assert state.step == 1

    on_devices(2, body)


def test_a_handle_tells_when_the_device_has_ended(nccl: FakeNccl) -> None:
    def body(device: PeerDevice) -> None:
        warm_up(device)
        release = device.hold_up(device.current_stream()) if hvd.rank() == 1 else None
        handle = hvd.grouped_allgather_async([fake_array(device, ONES)], name="x")
        assert not handle.finished() or hvd.size() == 1
        first = handle.result()[0]
        assert handle.done()
        assert not handle.finished()
        hvd.barrier()  # both ranks have looked
        if release is not None:
            release()
        hvd.device_synchronize()
        assert handle.finished()
        assert first.get().tolist() == [1.0] * 8
        assert hvd.allreduce_async(ONES, name="on the host").wait()

    on_devices(2, body)


def test_a_handle_of_aborted_work_has_an_error(nccl: FakeNccl) -> None:
    def body(device: PeerDevice) -> None:
        warm_up(device)
        handle = hvd.allreduce_async(fake_array(device, ONES), name="x")
        handle.result()
        hvd.device_synchronize()
        assert handle.finished()
        nccl.fails_at = {1: "broadcast from 0"}
        with contextlib.suppress(hvd.HorovodInternalError):  # rank 0 may get no error yet
            hvd.broadcast(fake_array(device, ONES), 0, name="y")
        if hvd.rank() == 1:
            with pytest.raises(hvd.HorovodInternalError, match="results may be wrong"):
                handle.finished()

    on_devices(2, body)


def test_threads_can_wait_for_the_device(nccl: FakeNccl) -> None:
    def body(device: PeerDevice) -> None:
        warm_up(device)
        release = device.hold_up(device.current_stream())
        array = fake_array(device, ONES)
        handle = hvd.allreduce_async_(array, op=hvd.Sum, name="x")
        assert handle.wait()
        assert not handle.finished()
        with pytest.raises(TimeoutError, match="has not ended its work on 'x' within"):
            handle.result(0.01)
        later = threading.Timer(0.1, release)
        later.start()
        assert handle.result() is array
        assert handle.finished()
        later.join()

    on_devices(2, body, device_wait="host")


def test_the_communicators_of_all_sets_are_aborted_at_the_same_time(
    nccl: FakeNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An abort may wait until the device is idle, and so for the abort of another set's kernel."""
    both = threading.Barrier(2)
    abort = FakeCommunicator.abort

    def abort_together(comm: FakeCommunicator) -> None:
        if comm._rank == 0:  # of either set
            both.wait(20)
        abort(comm)

    monkeypatch.setattr(FakeCommunicator, "abort", abort_together)

    def body(device: PeerDevice) -> None:
        warm_up(device)
        alone = hvd.add_process_set([0])
        if alone.included():
            hvd.allreduce(fake_array(device, ONES), name="x", process_set=alone).get()
        hvd.barrier()
        nccl.fails_at = {0: "allReduce"}
        with pytest.raises(hvd.HorovodInternalError):  # noqa: PT012 - rank 1 may get its error later
            hvd.allreduce(fake_array(device, ONES), name="y")
            hvd.barrier()

    on_devices(2, body)
    assert not both.broken


def test_a_removed_set_is_closed_after_its_work(nccl: FakeNccl) -> None:
    def body(device: PeerDevice) -> None:
        pair = hvd.add_process_set([0, 1])
        if pair.included():
            release = device.hold_up(device.current_stream())
            hvd.allreduce(fake_array(device, ONES), name="x", op=hvd.Sum, process_set=pair)
            threading.Timer(0.3, release).start()
        hvd.remove_process_set(pair)

    on_devices(3, body)  # the fake refuses to free a communicator for which the device works
    assert sorted(nccl.destroyed) == [0, 1]


def test_shutdown_does_not_wait_for_a_device_without_limit(
    nccl: FakeNccl, caplog: pytest.LogCaptureFixture
) -> None:
    def body(device: PeerDevice) -> None:
        warm_up(device)
        release = device.hold_up(device.current_stream())
        hvd.allreduce(fake_array(device, ONES), name="x")
        hvd.shutdown()
        release()

    on_devices(2, body, stall_check_time_seconds=0.3)
    text = "shutting down did not end well: cuda:0 has not ended its work on 'x' in time"
    assert [record.getMessage() for record in caplog.records].count(text) == 2
    assert sorted(nccl.destroyed) == []


@pytest.mark.parametrize("way", ["NCCL", "the host", "NCCL, scattered"])
def test_no_memory_for_a_fusion_buffer_on_one_rank(nccl: FakeNccl, way: str) -> None:
    """Every rank gets an error for these tensors, and the ranks go on."""
    verb = hvd.grouped_reducescatter if "scattered" in way else hvd.grouped_allreduce

    def body(device: PeerDevice) -> None:
        warm_up(device)
        pair = [fake_array(device, np.ones(6400, np.float32)) for _ in range(2)]
        hvd.barrier()
        outputs = 2 * 6400 * 4 // (2 if "scattered" in way else 1)
        device.limit = device.allocated + (outputs if hvd.rank() == 1 else 1 << 20)
        text = r"no memory for a fusion buffer of \d+ bytes on rank 1"
        with pytest.raises(hvd.RankFailedError, match=text):
            verb(pair, op=hvd.Sum, name="x")
        device.limit = 1 << 30
        results = hvd.grouped_allreduce(pair, op=hvd.Sum, name="x")
        assert [each.get().sum() for each in results] == [2 * 6400] * 2

    on_devices(2, body, shared=way == "the host")
