"""Test every verb, compared with numpy, on arrays of a fake device whose streams run late."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.devices import array_libraries
from pyhvd.testing import run_ranks
from tests.conformance.oracle import inputs, reduced, rows, same
from tests.devices.fake import FakeArray, FakeDevice, FakeLibrary, fake_array

SEEDS = range(4)
SIZES = (1, 2, 4)
PIECE = 1 << 8
"""Bytes of a piece: small, so that a tensor of a few hundred elements has several pieces."""


@pytest.fixture(autouse=True)
def _library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_libraries, "_libraries", {"tests": FakeLibrary()})


Body = Callable[[FakeDevice], Any]


def on_devices(
    size: int, body: Body, seed: int = 0, shared: bool = False, packs: bool = True, **knobs: Any
) -> tuple[list[Any], list[FakeDevice]]:
    """Run ``body(device)`` on ranks that each have or share a device, and each use their own stream."""
    devices = [FakeDevice(0, seed=17 * seed + r, identity="" if shared else f"{r}") for r in range(size)]
    if shared:
        devices = devices[:1] * size
    for device in devices:
        device.packs = packs

    def rank_body() -> Any:
        device = devices[hvd.rank()]
        with device.using(device.make_stream()):
            return body(device)

    return run_ranks(size, rank_body, timeout=30, knobs={"staging_size": PIECE, **knobs}), devices


def each_way(test: Any) -> Any:
    """Parametrise a test over numbers of ranks and seeds."""
    return pytest.mark.parametrize("seed", SEEDS)(pytest.mark.parametrize("size", SIZES)(test))


@each_way
@pytest.mark.parametrize("dtype", ["float32", "int64", "bfloat16", "bool"])
def test_allreduce(size: int, seed: int, dtype: str) -> None:
    op = hvd.Max if dtype == "bool" else hvd.Sum
    parts = inputs(dtype, (7, 43), size)

    def body(device: FakeDevice) -> None:
        mine = parts[hvd.rank()]
        array = fake_array(device, mine)
        result = hvd.allreduce(array, op=op, name="x")
        assert isinstance(result, FakeArray)
        same(result.get(), reduced(op, parts))
        same(array.get(), mine)
        assert hvd.allreduce_(array, op=op, name="y") is array
        same(array.get(), reduced(op, parts))

    on_devices(size, body, seed)


@each_way
def test_what_rides_together(size: int, seed: int) -> None:
    counts = (1, 300, 0, 5, 64, 1000, 3)
    parts = [inputs("float32", (n,), size) for n in counts]

    def body(device: FakeDevice) -> None:
        r = hvd.rank()
        outputs = hvd.grouped_allreduce(
            [fake_array(device, each[r]) for each in parts], name="g", op=hvd.Average
        )
        for output, each in zip(outputs, parts, strict=True):
            same(output.get(), reduced(hvd.Average, each))
        arrays = [fake_array(device, each[r]) for each in parts]
        given = hvd.grouped_allreduce_(arrays, name="h", op=hvd.Sum)
        assert all(a is b for a, b in zip(arrays, given, strict=True))
        for array, each in zip(arrays, parts, strict=True):
            same(array.get(), reduced(hvd.Sum, each))

    on_devices(size, body, seed, packs=bool(seed % 2))


@each_way
def test_many_in_flight_and_taken_in_any_order(size: int, seed: int) -> None:
    parts = [inputs("float64", (n, 3), size) for n in range(1, 30)]

    def body(device: FakeDevice) -> None:
        draw = np.random.default_rng(seed)
        r = hvd.rank()
        handles = {
            k: hvd.allreduce_async(fake_array(device, parts[k][r]), name=f"t{k}", op=hvd.Sum)
            for k in draw.permutation(len(parts)).tolist()
        }
        for k in draw.permutation(len(parts)).tolist():
            same(hvd.synchronize(handles[k]).get(), reduced(hvd.Sum, parts[k]))
            assert hvd.poll(handles[k])

    on_devices(size, body, seed, shared=seed % 2 == 1)


@each_way
def test_the_same_bits_as_from_host_memory(size: int, seed: int) -> None:
    def body(device: FakeDevice) -> None:
        draw = np.random.default_rng(hvd.rank() + 100 * seed)
        values = draw.standard_normal(777).astype(np.float32)
        for op, before, after in ((hvd.Average, 1.0, 1.0), (hvd.Sum, 0.3, 7.0), (hvd.Adasum, 0.5, 1.0)):
            how: dict[str, Any] = {"op": op, "prescale_factor": before, "postscale_factor": after}
            on_host = hvd.allreduce(values, name=f"host {op}", **how)
            on_device = hvd.allreduce(fake_array(device, values), name=f"device {op}", **how)
            same(on_device.get(), on_host)

    on_devices(size, body, seed)


@each_way
def test_allgather(size: int, seed: int) -> None:
    def body(device: FakeDevice) -> None:
        r = hvd.rank()
        every = [np.full((3 * q % 5, 33), q, np.int32) for q in range(size)]
        same(hvd.allgather(fake_array(device, every[r]), name="a").get(), np.concatenate(every))
        group = [[np.full((q + k, k), 10 * q + k, np.int16) for q in range(size)] for k in range(5)]
        outputs = hvd.grouped_allgather([fake_array(device, each[r]) for each in group], name="g")
        for output, each in zip(outputs, group, strict=True):
            same(output.get(), np.concatenate(each))

    on_devices(size, body, seed)


@each_way
def test_broadcast(size: int, seed: int) -> None:
    root = size - 1
    parts = inputs("float16", (501,), size)

    def body(device: FakeDevice) -> None:
        array = fake_array(device, parts[hvd.rank()])
        same(hvd.broadcast(array, root, name="b").get(), parts[root])
        same(array.get(), parts[hvd.rank()])
        assert hvd.broadcast_(array, root, name="c") is array
        same(array.get(), parts[root])

    on_devices(size, body, seed)


@each_way
def test_reducescatter(size: int, seed: int) -> None:
    shapes = ((13, 9), (2,), (1, 100))
    parts = [inputs("float32", shape, size) for shape in shapes]

    def body(device: FakeDevice) -> None:
        r = hvd.rank()
        arrays = [fake_array(device, each[r]) for each in parts]
        outputs = hvd.grouped_reducescatter(arrays, name="r", op=hvd.Average)
        for output, each, shape in zip(outputs, parts, shapes, strict=True):
            same(output.get(), reduced(hvd.Average, each)[rows(shape[0], size, r)])

    on_devices(size, body, seed)


@each_way
def test_alltoall(size: int, seed: int) -> None:
    def body(device: FakeDevice) -> None:
        r = hvd.rank()
        splits = [(r + 2 * q) % 4 for q in range(size)]
        mine = np.full((sum(splits) + 2, 21), r, np.int64)
        output, received = hvd.alltoall(fake_array(device, mine), splits=splits, name="a")
        assert received.tolist() == [(q + 2 * r) % 4 for q in range(size)]
        same(output.get(), np.concatenate([np.full((n, 21), q, np.int64) for q, n in enumerate(received)]))

    on_devices(size, body, seed)


@each_way
def test_arrays_that_are_not_contiguous(size: int, seed: int) -> None:
    parts = inputs("float32", (20, 5), size)
    want = reduced(hvd.Sum, [part[::2] for part in parts])

    def body(device: FakeDevice) -> None:
        whole = fake_array(device, parts[hvd.rank()])
        view = whole.every_other()
        same(hvd.allreduce(view, op=hvd.Sum, name="x").get(), want)
        assert hvd.allreduce_(view, op=hvd.Sum, name="y") is view
        same(view.get(), want)
        same(whole.get()[1::2], parts[hvd.rank()][1::2])

    on_devices(size, body, seed)


@each_way
def test_compressed(size: int, seed: int) -> None:
    values = np.arange(100, dtype=np.float32) / 4

    def body(device: FakeDevice) -> None:
        array = fake_array(device, values)
        result = hvd.allreduce(array, name="x", op=hvd.Sum, compression=hvd.Compression.fp16)
        assert isinstance(result, FakeArray)
        same(result.get(), values * np.float32(size))

    on_devices(size, body, seed)


@each_way
def test_what_is_let_go_of_too_early_is_kept(size: int, seed: int) -> None:
    parts = inputs("float32", (400,), size)

    def body(device: FakeDevice) -> None:
        handles = []
        for k in range(6):
            # From here on, only pyhvd refers to the input; nothing refers to every second result.
            handles.append(
                hvd.allreduce_async(fake_array(device, parts[hvd.rank()]), op=hvd.Sum, name=f"{k}")
            )
            if k % 2:
                handles.pop().wait()
            gc.collect()
        for handle in handles:
            same(handle.result().get(), reduced(hvd.Sum, parts))

    _, devices = on_devices(size, body, seed)
    gc.collect()
    buffers = [device.allocated for device in devices]
    assert max(buffers) < 50_000, "pyhvd has not released memory that it kept alive"


def test_nobody_waits_for_the_device_but_the_background_thread() -> None:
    import threading

    def body(device: FakeDevice) -> set[str]:
        seen: set[str] = set()
        inner = device.synchronize

        def synchronize(event: Any) -> None:
            seen.add(threading.current_thread().name)
            inner(event)

        device.synchronize = synchronize  # type: ignore[method-assign]
        handle = hvd.allreduce_async(fake_array(device, np.ones(1000)), name="x")
        result = handle.result()
        device.synchronize = inner  # type: ignore[method-assign]
        assert result.get()[0] == 1
        return seen

    results, _ = on_devices(2, body)
    assert all(name.startswith("pyhvd-") for seen in results for name in seen)


def test_the_callers_stream_waits_only_once_the_result_is_asked_for() -> None:
    def body(device: FakeDevice) -> None:
        waits: list[int] = []
        inner = device.wait

        def wait(stream: int, event: Any) -> None:
            waits.append(stream)
            inner(stream, event)

        device.wait = wait  # type: ignore[method-assign]
        handle = hvd.allreduce_async(fake_array(device, np.ones(1000)), name="x")
        assert handle.wait(20)
        assert device.current_stream() not in waits
        other = device.make_stream()
        with device.using(other):
            result = handle.result()
        assert other in waits
        assert device.current_stream() not in waits
        del result  # the stream may reuse its memory
        assert device.current_stream() in waits

    on_devices(2, body)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_have_joined(size: int, seed: int) -> None:
    parts = inputs("float32", (300,), size)
    ranks = [r for r in range(size) if r != 1]
    others = [parts[r] for r in ranks]

    def body(device: FakeDevice) -> int:
        r = hvd.rank()
        if r != 1:
            arrays = [fake_array(device, parts[r]) for _ in range(3)]
            for output in hvd.grouped_allreduce(arrays, name="g", op=hvd.Sum):
                same(output.get(), reduced(hvd.Sum, others, ranks=ranks))
            same(hvd.broadcast(arrays[0], 0, name="b").get(), parts[0])
            same(hvd.allgather(arrays[0], name="c").get(), np.concatenate(others))
            same(
                hvd.reducescatter(arrays[0], name="d", op=hvd.Sum).get(),
                reduced(hvd.Sum, others, ranks=ranks)[rows(300, size, r)],
            )
            hvd.allreduce(arrays[0], name="e", op=hvd.Adasum)
        last = hvd.join()
        same(hvd.allreduce(fake_array(device, parts[r]), op=hvd.Sum, name="z").get(), reduced(hvd.Sum, parts))
        return last

    results, _ = on_devices(size, body, seed)
    assert len(set(results)) == 1


@pytest.mark.parametrize("hosts", [[0, 1], [0, 0, 1, 1], [0, 1, 1, 1]], ids=str)
@pytest.mark.parametrize(
    "test",
    [
        partial(test_allreduce, dtype="bfloat16"),
        *(test_what_rides_together, test_the_same_bits_as_from_host_memory, test_ranks_that_have_joined),
        *(test_allgather, test_broadcast, test_reducescatter, test_alltoall),
    ],
    ids=lambda test: getattr(test, "func", test).__name__.removeprefix("test_"),
)
def test_on_several_hosts(test: Any, hosts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Staging goes through the windows and links of several hosts."""
    monkeypatch.setitem(globals(), "run_ranks", partial(run_ranks, hosts=hosts))
    test(size=len(hosts), seed=0)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_subset(seed: int) -> None:
    parts = inputs("int32", (200,), 3)

    def body(device: FakeDevice) -> None:
        few = hvd.add_process_set([0, 2])
        if hvd.rank() != 1:
            same(
                hvd.allreduce(
                    fake_array(device, parts[hvd.rank()]), op=hvd.Sum, process_set=few, name="x"
                ).get(),
                reduced(hvd.Sum, [parts[0], parts[2]]),
            )
        hvd.barrier()
        assert hvd.remove_process_set(few)
        hvd.allreduce(fake_array(device, parts[hvd.rank()]), op=hvd.Sum, name="x")

    on_devices(3, body, seed, dynamic_process_sets=True)


@pytest.mark.parametrize("check", ["results", "finite"])
@pytest.mark.parametrize("size", [1, 3])
def test_checked(check: str, size: int, caplog: pytest.LogCaptureFixture) -> None:
    def body(device: FakeDevice) -> None:
        r = hvd.rank()
        values = np.arange(100.0) * (r + 1)
        if check == "finite" and r == size - 1:
            values[3] = np.nan
        want = reduced(hvd.Sum, [np.arange(100.0) * (q + 1) for q in range(size)])
        got = hvd.allreduce(fake_array(device, values), op=hvd.Sum, name="x").get()
        same(np.delete(got, 3), np.delete(want, 3))
        array = fake_array(device, [r])
        assert hvd.broadcast_(array, 0, name="b") is array
        assert array.get().tolist() == [0]
        assert hvd.allgather(array, name="g").get().tolist() == [0] * size
        output, received = hvd.alltoall(fake_array(device, np.arange(size)), splits=[1] * size, name="a")
        assert output.get().tolist() == [r] * size
        assert received.tolist() == [1] * size

    with caplog.at_level(logging.WARNING, "pyhvd"):
        on_devices(size, body, check=check)
    assert ("not finite" in caplog.text) == (check == "finite")


def test_host_on_one_rank_and_device_on_another() -> None:
    def body(device: FakeDevice) -> None:
        array: Any = np.ones(3) if hvd.rank() == 0 else fake_array(device, np.ones(3))
        with pytest.raises(hvd.MismatchError) as caught:
            hvd.allreduce(array, name="x")
        assert str(caught.value).startswith(
            "Mismatched devices of allreduce 'x': rank 0: cpu; rank 1: cuda:0."
            " Every rank must submit the same under one name."
        )
        assert {rank: str(value) for rank, value in caught.value.per_rank.items()} == {0: "cpu", 1: "cuda:0"}
        hvd.allreduce(np.ones(3), name="x")

    on_devices(2, body)


def test_a_remembered_tensor_may_move_to_the_device() -> None:
    def body(device: FakeDevice) -> None:
        for _ in range(3):
            assert hvd.allreduce(np.ones(300), name="x", op=hvd.Sum)[0] == 2
        for _ in range(3):
            assert hvd.allreduce(fake_array(device, np.ones(300)), name="x", op=hvd.Sum).get()[0] == 2
        with pytest.raises(hvd.MismatchError, match="Mismatched devices"):
            hvd.allreduce(
                fake_array(device, np.ones(300)) if hvd.rank() else np.ones(300), name="x", op=hvd.Sum
            )
        for _ in range(3):
            assert hvd.allreduce(np.ones(300), name="x", op=hvd.Sum)[0] == 2

    on_devices(2, body)


def test_devices_of_different_numbers_are_no_mismatch() -> None:
    devices = [FakeDevice(r, seed=r) for r in range(2)]

    def body() -> float:
        result: float = hvd.allreduce(
            fake_array(devices[hvd.rank()], np.ones(3)), name="x", op=hvd.Sum
        ).get()[0]
        return result

    assert run_ranks(2, body) == [2, 2]


def test_a_rank_has_one_device() -> None:
    other = FakeDevice(1)

    def body(device: FakeDevice) -> None:
        hvd.allreduce(fake_array(device, np.ones(3)), name="x")
        with pytest.raises(
            ValueError,
            match=r"allreduce 'y': this array is on cuda:1, but this rank's arrays have been on cuda:0",
        ):
            hvd.allreduce(fake_array(other, np.ones(3)), name="y")

    on_devices(1, body)


def test_no_memory_for_an_output() -> None:
    def body(device: FakeDevice) -> None:
        array = fake_array(device, np.ones(100))
        if hvd.rank() == 1:
            device.limit = device.allocated
        with pytest.raises(
            hvd.RankFailedError, match=r"allgather 'x': no memory for its output .* on rank 1"
        ):
            hvd.allgather(array, name="x")
        device.limit = 1 << 62
        assert hvd.allgather(array, name="x").get().size == 200

    on_devices(2, body)


def test_why_arrays_go_through_the_host_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def body(device: FakeDevice) -> None:
        for name in ("x", "y"):
            hvd.allreduce(fake_array(device, np.ones(3)), name=name)

    with caplog.at_level(logging.INFO, "pyhvd"):
        on_devices(2, body, shared=True)
    lines = [r.getMessage() for r in caplog.records if "arrays on the devices" in r.getMessage()]
    assert lines == ["arrays on the devices of 2 ranks go through the host: ranks 0-1 share a device, cuda:0"]


def test_dtypes_that_cannot_travel() -> None:
    def body(device: FakeDevice) -> None:
        with pytest.raises(hvd.UnsupportedDtypeError, match="'float8_e5m2' cannot be reduced or sent"):
            hvd.allreduce(fake_array(device, np.ones(3), ml_dtypes.float8_e5m2))

    on_devices(1, body)


def test_a_device_that_fails_ends_the_job() -> None:
    def body(device: FakeDevice) -> None:
        def copy(*args: object) -> None:
            raise type("CUDARuntimeError", (RuntimeError,), {"__module__": "cupy.cuda"})(
                "it fell off the bus"
            )

        array = fake_array(device, np.ones(1000))
        device.copy = copy  # type: ignore[assignment]
        with pytest.raises(hvd.TransportError, match="allreduce 'x': CUDA reported: it fell off the bus"):
            hvd.allreduce(array, name="x")
        with pytest.raises(hvd.TransportError, match="CUDA reported: it fell off the bus"):
            hvd.allreduce(array, name="y")

    on_devices(1, body)
