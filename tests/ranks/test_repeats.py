"""Test repeated calls: a call equal to the last call of its name takes a shortcut, with the same result."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.api import reductions, repeats
from pyhvd.devices import array_libraries
from pyhvd.engine import context
from pyhvd.negotiation.messages import Request, RequestType
from pyhvd.testing import run_ranks
from tests.devices.fake import FakeArray, FakeDevice, FakeLibrary, fake_array

VALUES = np.arange(60, dtype=np.float32)


@pytest.fixture(autouse=True)
def _library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_libraries, "_libraries", {"tests": FakeLibrary()})


@pytest.fixture
def long_ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the calls that took no shortcut."""
    names: list[str] = []
    inner = reductions.reduce_tensors

    def counted(*arguments: Any) -> Any:
        names.append(arguments[4])
        return inner(*arguments)

    monkeypatch.setattr(reductions, "reduce_tensors", counted)
    return names


def on_devices(size: int, body: Callable[[FakeDevice], Any], **knobs: Any) -> list[Any]:
    devices = [FakeDevice(seed=r, identity=str(r)) for r in range(size)]

    def rank_body() -> Any:
        device = devices[hvd.rank()]
        with device.using(device.make_stream()):
            return body(device)

    return run_ranks(size, rank_body, timeout=30, knobs=knobs)


def array(device: FakeDevice, values: Any = VALUES) -> FakeArray:
    return fake_array(device, values)


@pytest.mark.parametrize("size", [1, 2])
def test_what_comes_again_is_right_every_time(size: int, long_ways: list[str]) -> None:
    def body(device: FakeDevice) -> None:
        for step in range(1, 5):
            mine = VALUES * step
            assert (
                hvd.allreduce(array(device, mine), op=hvd.Sum, name="x").get().tolist()
                == (size * mine).tolist()
            )
            given = array(device, mine)
            assert hvd.allreduce_(given, name="y") is given
            assert given.get().tolist() == mine.tolist()
            group = [array(device, mine), array(device, mine[:7])]
            for result, part in zip(
                hvd.grouped_allreduce(group, op=hvd.Max, name="g"), (mine, mine[:7]), strict=True
            ):
                assert result.get().tolist() == part.tolist()
            assert hvd.grouped_allreduce_(group, op=hvd.Sum, name="h") == group
            assert group[1].get().tolist() == (size * mine[:7]).tolist()

    on_devices(size, body)
    assert sorted(long_ways) == sorted(["x", "y", "g", "h"] * size)


def test_what_differs_goes_the_long_way(long_ways: list[str]) -> None:
    number: Any = np.int64(hvd.Max)
    calls: list[tuple[dict[str, Any], Any]] = [
        ({}, VALUES),
        ({"op": hvd.Sum}, VALUES),
        ({"op": hvd.Sum, "prescale_factor": 2.0}, VALUES),
        ({"op": hvd.Sum, "prescale_factor": 2}, VALUES),
        ({"op": hvd.Sum, "postscale_factor": 2.0}, VALUES),
        ({"op": hvd.Sum}, VALUES[:5]),
        ({"op": hvd.Sum}, VALUES[:5].reshape(5, 1)),
        ({"op": hvd.Sum}, VALUES[:5].reshape(5, 1).astype(np.int32)),
        ({"op": hvd.Min}, VALUES[:5].reshape(5, 1).astype(np.int32)),
        ({"op": number}, VALUES[:5]),
    ]

    def body(device: FakeDevice) -> None:
        for terms, values in calls:
            factor = float(terms.get("prescale_factor", 1)) * float(terms.get("postscale_factor", 1))
            result = hvd.allreduce(array(device, values), name="x", **terms).get()
            assert (result.shape, result.dtype) == (values.shape, values.dtype)
            assert result.tolist() == (values * factor).astype(values.dtype).tolist()
        assert hvd.allreduce(VALUES, name="x", op=number).tolist() == VALUES.tolist()
        group = [array(device)] * 1
        assert len(hvd.grouped_allreduce([*group, array(device)], name="g")) == 2
        assert len(hvd.grouped_allreduce(group, name="g")) == 1
        with pytest.raises(TypeError, match="takes a list of arrays"):
            hvd.grouped_allreduce(array(device), name="g")  # type: ignore[arg-type]
        with pytest.warns(DeprecationWarning, match="average is deprecated"):
            hvd.allreduce(array(device), average=True, name="x")

    on_devices(1, body)
    assert long_ways == ["x"] * 11 + ["g"] * 3 + ["x"]


def test_errors_of_what_comes_again() -> None:
    def body(device: FakeDevice) -> None:
        first = hvd.rank() == 0
        mine, other = array(device), array(device, VALUES[:3])
        hvd.allreduce(mine, name="x")
        with pytest.raises(hvd.MismatchError, match="Mismatched shapes of allreduce 'x'"):
            hvd.allreduce(mine if first else other, name="x")
        with pytest.raises(hvd.MismatchError, match="Mismatched devices of allreduce 'x'"):
            hvd.allreduce(mine if first else VALUES, name="x")
        hvd.allreduce(mine, name="x")
        if first:
            device.limit = 0
            with pytest.raises(MemoryError, match="allreduce 'x': 240 bytes more than the device has"):
                hvd.allreduce(mine, name="x")
            device.limit = 1 << 62
        else:
            with pytest.raises(hvd.RankFailedError, match="240 bytes more than the device has"):
                hvd.allreduce(mine, name="x")
        assert hvd.allreduce(mine, name="x").get().tolist() == VALUES.tolist()

    on_devices(2, body)


def test_a_name_that_is_in_flight() -> None:
    def body(device: FakeDevice) -> None:
        hvd.allreduce(array(device), name="x")
        if hvd.rank() == 0:
            handle = hvd.allreduce_async(array(device), name="x")
            for _ in range(2):
                with pytest.raises(hvd.DuplicateNameError, match="'x': a tensor of this name is still"):
                    hvd.allreduce_async(array(device), name="x")
            hvd.barrier()
            assert handle.result().get().tolist() == VALUES.tolist()
        else:
            hvd.barrier()
            assert hvd.allreduce(array(device), name="x").get().tolist() == VALUES.tolist()
            for _ in range(2):  # the rank announced each refusal
                with pytest.raises(hvd.RankFailedError, match="still in flight"):
                    hvd.allreduce(array(device), name="x")
        assert hvd.allreduce(array(device), name="x").get().tolist() == VALUES.tolist()

    on_devices(2, body)


def test_another_device_is_refused_again() -> None:
    def body(device: FakeDevice) -> None:
        hvd.allreduce(array(device), name="x")
        with pytest.raises(ValueError, match=r"this array is on cuda:1, but this rank's arrays have been on"):
            hvd.allreduce(array(FakeDevice(1)), name="x")

    on_devices(1, body)


def test_a_process_set_that_is_another_one_by_now(long_ways: list[str]) -> None:
    def body(device: FakeDevice) -> None:
        for members in ([0, 1], [0]):
            chosen = hvd.add_process_set(members)
            if hvd.rank() in members:
                for _ in range(2):
                    result = hvd.allreduce(array(device), op=hvd.Sum, name="x", process_set=chosen)
                    assert result.get().tolist() == (len(members) * VALUES).tolist()
            hvd.remove_process_set(chosen)
            with pytest.raises(ValueError, match="does not exist"):
                hvd.allreduce(array(device), name="x", op=hvd.Sum, process_set=chosen)

    on_devices(3, body, dynamic_process_sets=True)
    assert len(long_ways) == 2 + 1 + 6


def has_joined() -> bool:
    try:
        context.current().runtime.check_joined(0, Request(RequestType.BARRIER, "it"))
    except hvd.HorovodInternalError:
        return True
    return False


def test_who_has_joined_submits_nothing() -> None:
    refused: list[BaseException] = []

    def body(device: FakeDevice) -> None:
        hvd.allreduce(array(device), name="x")
        if hvd.rank() == 1:
            slot = context.current_slot()

            def submit() -> None:
                with context.playing_rank(slot):
                    while not has_joined():
                        time.sleep(1e-3)
                    try:
                        hvd.allreduce(array(device), name="x")
                    except hvd.HorovodInternalError as exc:
                        refused.append(exc)
                    tried.set()

            thread = threading.Thread(target=submit)
            thread.start()
            hvd.join()
            thread.join(20)
        else:
            assert tried.wait(20)
            hvd.join()
        assert hvd.allreduce(array(device), name="x").get().tolist() == VALUES.tolist()

    tried = threading.Event()
    on_devices(2, body)
    assert "this rank has joined, and submits nothing" in str(refused[0])


def test_no_more_than_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "MOST", 3)

    def body(device: FakeDevice) -> None:
        for k in range(10):
            hvd.allreduce(array(device), name=f"x{k}")
            assert 1 <= len(context.current().repeats) <= 3
        hvd.allreduce(array(device))
        hvd.allreduce(VALUES, name="host")
        assert [key[1] for key in context.current().repeats] == ["x9"]

    on_devices(1, body)
