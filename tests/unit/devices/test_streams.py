"""Results received on another stream than the submitting one, and handles of ambiguous streams."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.arrays import Array
from pyhvd.devices import array_libraries, cuda_driver
from pyhvd.devices.array_libraries import adopt
from pyhvd.devices.base import Stream
from pyhvd.dtypes import Code
from pyhvd.testing import run_ranks
from tests.devices.fake import FakeDevice, elements, fake_array
from tests.devices.stand_in import make_cupy
from tests.devices.stand_in_torch import Tensor, make_torch

OURS = ("cupy_device", "cupy_arrays", "dlpack_arrays", "torch_arrays", "torch_tensors")
VALUES = np.arange(100.0)


@pytest.fixture(params=range(5))
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    fake = FakeDevice(seed=request.param)
    cupy = make_cupy(fake)
    torch: Any = make_torch(fake)
    modules = {"cupy": cupy, "cupy.cuda": cupy.cuda, "torch": torch, "torch.autograd": torch.autograd}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(array_libraries, "_libraries", {})
    monkeypatch.setattr(cuda_driver, "driver", lambda: cupy.cuda.driver)
    for name in OURS:
        monkeypatch.delitem(sys.modules, f"pyhvd.devices.{name}", raising=False)
    yield fake
    for name in OURS:
        sys.modules.pop(f"pyhvd.devices.{name}", None)


class Interface:
    """An array by the CUDA array interface."""

    def __init__(self, device: FakeDevice, stream: int | None = None) -> None:
        self.inner = fake_array(device, VALUES)
        self.__cuda_array_interface__ = {
            "shape": self.inner.shape,
            "typestr": self.inner.dtype.str,
            "data": (self.inner.ptr, False),
            "stream": stream,
            "version": 3,
        }


class Capsule:
    """An array by DLPack, of a library that works on the current stream."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __dlpack__(self, **options: Any) -> Any:
        return self.inner.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __array_namespace__(self) -> Any:
        return Capsule

    @staticmethod
    def from_dlpack(array: Any) -> Capsule:
        assert array.__dlpack_device__() == (2, 0)
        return Capsule(array.__dlpack__(stream=Capsule.works_on))

    works_on: int | None = 0


def make_array(kind: str, device: FakeDevice) -> Any:
    """Return an array of a library."""
    if kind == "interface":
        return Interface(device)
    if kind == "torch":
        tensor = Tensor(device, VALUES.shape, VALUES.dtype)
        tensor.inner.set(VALUES)
        return tensor
    array = sys.modules["cupy"].empty(VALUES.shape, VALUES.dtype).set(VALUES)
    return Capsule(array) if kind == "dlpack" else array


def address_of(array: Any) -> int:
    """Return the address of a result of any library."""
    return int(getattr(array, "inner", array).ptr)


def look_later(device: FakeDevice, ptr: int) -> list[Array]:
    """Queue a copy of an array on the current stream without keeping the array; return the copy."""
    found: list[Array] = []
    device.call(
        lambda: found.append(elements(ptr, VALUES.size, Code.FLOAT64).copy()), device.current_stream()
    )
    return found


def until(happened: Callable[[], bool]) -> None:
    """Wait for a condition that the idle background thread makes true when it sweeps pending arrays."""
    end = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < end
        hvd.barrier()


def alone(body: Callable[[], None]) -> None:
    run_ranks(1, body, timeout=30)


def received_elsewhere(device: FakeDevice, kind: str, verb: Any, uses: Stream) -> None:
    """Submit on one stream; drop the result while another stream, which uses the result, is held up."""
    submits = device.make_stream()

    def body() -> None:
        with device.using(submits):
            handle = verb(make_array(kind, device), name="x")
        assert handle.wait(20)
        go_on = device.hold_up(uses)
        with device.using(uses):
            result = handle.result()
            ptr = address_of(result)
            found = look_later(device, ptr)
        del result, handle
        until(lambda: ptr in device.reclaimed)
        device.run_on()  # new arrays on the submitting stream may now reuse the memory
        assert not found
        go_on()
        device.run_on()
        np.testing.assert_array_equal(found[0], VALUES)

    alone(body)


@pytest.mark.parametrize("kind", ["cupy", "interface", "dlpack", "torch"])
@pytest.mark.parametrize("verb", [hvd.allreduce_async, hvd.allgather_async])
def test_what_another_stream_uses_is_not_given_away(device: FakeDevice, kind: str, verb: Any) -> None:
    uses = Capsule.works_on = device.make_stream()
    received_elsewhere(device, kind, verb, uses)


@pytest.mark.parametrize("name", [None, 1])
def test_a_result_that_goes_to_the_default_stream_by_dlpack(device: FakeDevice, name: int | None) -> None:
    Capsule.works_on = name
    received_elsewhere(device, "dlpack", hvd.allreduce_async, 0)


@pytest.mark.parametrize("kind", ["cupy", "interface", "torch"])
def test_a_result_of_the_same_stream_holds_nothing_up(device: FakeDevice, kind: str) -> None:
    waits: list[int] = []
    stream = device.make_stream()

    def body() -> None:
        with device.using(stream):
            result = hvd.allreduce(make_array(kind, device), name="x")
        inner = device.wait
        device.wait = lambda stream, event: (waits.append(stream), inner(stream, event))[0]  # type: ignore[method-assign, func-returns-value]
        ptr = address_of(result)
        del result
        until(lambda: ptr in device.reclaimed)

    alone(body)
    assert not waits


def test_the_same_result_on_a_third_stream(device: FakeDevice) -> None:
    first, second, third = (device.make_stream() for _ in range(3))

    def body() -> None:
        with device.using(first):
            handle = hvd.allreduce_async(make_array("cupy", device), name="x")
        results = []
        for stream in (first, second, third):
            with device.using(stream):
                results.append(handle.result())
        assert len({address_of(result) for result in results}) == 1
        go_on = device.hold_up(third)
        found = []
        with device.using(third):
            found = look_later(device, address_of(results[0]))
        ptr = address_of(results[0])
        del results, handle
        until(lambda: ptr in device.reclaimed)
        device.run_on()
        go_on()
        device.run_on()
        np.testing.assert_array_equal(found[0], VALUES)

    alone(body)


def test_an_empty_result_needs_no_lease(device: FakeDevice) -> None:
    def body() -> None:
        handle = hvd.allreduce_async(sys.modules["cupy"].empty((0, 3)), name="x")
        with device.using(device.make_stream()):
            assert handle.result().shape == (0, 3)

    alone(body)


def test_the_stream_that_an_interface_names_waits_for_what_is_done_in_place(device: FakeDevice) -> None:
    named, other = device.make_stream(), device.make_stream()
    with device.using(named):
        array = Interface(device, named)

    def body() -> None:
        with device.using(other):
            assert hvd.allreduce_(array, op=hvd.Sum, name="x", prescale_factor=3.0) is array
        with device.using(named):
            assert array.inner.get().tolist() == (3 * VALUES).tolist()
        with device.using(other):
            assert array.inner.get().tolist() == (3 * VALUES).tolist()

    alone(body)


def test_the_stream_of_an_arrays_library_waits_for_what_is_done_in_place(device: FakeDevice) -> None:
    """DLPack does not name the library's stream, so pyhvd exports the array to that stream once more."""
    Capsule.works_on = works = device.make_stream()
    with device.using(works):
        array = make_array("dlpack", device)

    def body() -> None:
        go_on = device.hold_up(works)
        with device.using(device.make_stream()):
            handle = hvd.allreduce_async_(array, op=hvd.Sum, name="x", prescale_factor=3.0)
            go_on()
            assert handle.wait(20)
            hold = device.hold_up(works)
            assert handle.result() is array
        with device.using(works):
            found = look_later(device, address_of(array))
        hold()
        device.run_on()
        assert found[0].tolist() == (3 * VALUES).tolist()

    try:
        alone(body)
    finally:
        Capsule.works_on = 0


@pytest.mark.parametrize("kind", ["cupy", "torch"])
def test_what_is_done_in_place_makes_no_lease(device: FakeDevice, kind: str) -> None:
    """The caller owns the array and orders its use, so the submitting stream does not wait."""
    submits, uses = device.make_stream(), device.make_stream()
    waits: list[int] = []

    def body() -> None:
        with device.using(submits):
            array = make_array(kind, device)
            handle = hvd.allreduce_async_(array, name="x")
        inner = device.wait
        device.wait = lambda stream, event: (waits.append(stream), inner(stream, event))[0]  # type: ignore[method-assign, func-returns-value]
        with device.using(uses):
            assert handle.result() is array
            assert getattr(array, "inner", array).get().tolist() == VALUES.tolist()
        del array, handle

    alone(body)
    assert uses in waits
    assert submits not in waits


@pytest.mark.parametrize("take", [adopt, partial(adopt, writing=True)])
def test_a_stream_that_each_thread_has_is_refused(device: FakeDevice, take: Any) -> None:
    with pytest.raises(ValueError, match=r"the stream of this array is CUDA's per-thread default stream"):
        take(Interface(device, 2))
    with device.using(2):
        for kind in ("cupy", "torch", "dlpack", "interface"):
            with pytest.raises(ValueError, match=r"current stream is CUDA's per-thread default stream"):
                take(make_array_quietly(kind, device))


@pytest.mark.parametrize("take", [adopt, partial(adopt, writing=True)])
def test_an_array_that_names_its_stream_needs_no_other(device: FakeDevice, take: Any) -> None:
    named = device.make_stream()
    with device.using(named):
        array = Interface(device, named)
    with device.using(2):
        assert take(array).stream == named


def make_array_quietly(kind: str, device: FakeDevice) -> Any:
    """Return an array that was made on the default stream."""
    with device.using(0):
        return make_array(kind, device)


def test_a_result_is_not_given_to_a_stream_that_each_thread_has(device: FakeDevice) -> None:
    Capsule.works_on = 2

    def body() -> None:
        handle = hvd.allreduce_async(make_array("dlpack", device), name="x")
        with pytest.raises(ValueError, match=r"the stream that will use the result is CUDA's per-thread"):
            handle.result()

    alone(body)


@pytest.mark.parametrize("handle", [0, 1, None])
def test_names_of_the_devices_own_stream(device: FakeDevice, handle: int | None) -> None:
    view: Any = adopt(Interface(device, handle))
    assert view.stream == 0


def test_the_arrays_of_a_call_share_an_event(device: FakeDevice) -> None:
    records: list[tuple[int, int]] = []
    record = sys.modules["cupy"].cuda.runtime.eventRecord

    def count(event: int, stream: int) -> None:
        records.append((threading.get_ident(), stream))
        record(event, stream)

    def body() -> None:
        arrays = [make_array("cupy", device) for _ in range(20)]
        sys.modules["cupy"].cuda.runtime.eventRecord = count
        handle = hvd.grouped_allreduce_async(arrays, name="x")
        mine = threading.get_ident()
        assert handle.wait(20)
        assert [stream for thread, stream in records if thread == mine] == [0]

    alone(body)


def test_compression_of_a_torch_tensor_stays_on_the_device(device: FakeDevice) -> None:
    array = make_array("torch", device)
    sent, _ = hvd.Compression.fp16.compress(array)
    assert (type(sent), str(sent.dtype)) == (Tensor, "torch.float16")

    def body() -> None:
        result = hvd.allreduce(array, op=hvd.Sum, name="x", compression=hvd.Compression.fp16)
        assert (type(result), str(result.dtype)) == (Tensor, "torch.float64")
        assert result.inner.get().tolist() == VALUES.tolist()

    alone(body)
    assert hvd.Compression.fp16.compress(sent) == (sent, None), "what is float16 already stays as it is"


@pytest.mark.parametrize("kind", ["interface", "dlpack"])
def test_compression_refuses_what_nobody_can_cast(device: FakeDevice, kind: str) -> None:
    text = (
        r"Compression.fp16 cannot cast a tests.*\.(Interface|Capsule) on cuda:0: pass cupy.asarray\(array\)"
    )

    def body() -> None:
        with pytest.raises(TypeError, match=text):
            hvd.allreduce(make_array(kind, device), name="x", compression=hvd.Compression.fp16)

    alone(body)


def test_tensors_of_a_derived_class_and_what_autograd_must_know(device: FakeDevice) -> None:
    """An array's own class decides nothing, and a write is noted, as it is for tensors in host memory."""
    torch: Any = sys.modules["torch"]
    kind = type("Image", (Tensor,), {"__module__": "mine"})

    def make() -> Any:
        tensor: Any = kind(device, VALUES.shape, VALUES.dtype)
        tensor.inner.set(VALUES)
        return tensor

    def body() -> None:
        tensor = make()
        result = hvd.allreduce(tensor, op=hvd.Sum, name="x")
        assert (type(result), address_of(result) != address_of(tensor)) == (Tensor, True)
        assert not torch.written
        assert hvd.allreduce_(tensor, op=hvd.Sum, name="x", prescale_factor=3.0) is tensor
        assert tensor.inner.get().tolist() == (3 * VALUES).tolist()
        assert torch.written == [tensor]
        tensor.requires_grad, tensor.is_leaf = True, False
        with pytest.raises(RuntimeError, match=r"tensor\.detach"):
            hvd.allreduce_(tensor, name="recorded")
        for name, value, remedy in (
            ("is_nested", True, r"tensor\.unbind"),
            ("layout", "sparse", r"to_dense"),
            ("__torch_dispatch__", kind, "a Image has no plain memory"),
            ("data_ptr", lambda _: 0, "no memory of its own"),
        ):
            other: Any = type("Image", (Tensor,), {"__module__": "mine", name: value})
            with pytest.raises(TypeError, match=remedy):
                hvd.allreduce(other(device, VALUES.shape, VALUES.dtype), name=name)

    alone(body)
