"""Arrays of CuPy, and of libraries that go through CuPy, over a stand-in for CuPy."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.backends.gpu.nccl_init import usable_version
from pyhvd.devices import array_libraries, cuda_driver
from pyhvd.devices.array_libraries import adopt
from pyhvd.devices.base import DeviceContext, DeviceView
from pyhvd.dtypes import Code, ReduceOp
from pyhvd.testing import run_ranks
from tests.devices.fake import FakeDevice, fake_array
from tests.devices.kernels_on_cpu import needs_compiler
from tests.devices.stand_in import make_cupy

OURS = [f"pyhvd.devices.{name}" for name in ("cupy_device", "cupy_arrays", "dlpack_arrays")]
SEEDS = range(5)


@contextlib.contextmanager
def using_cupy(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Put a stand-in of CuPy, whose device this is, in the place of CuPy."""
    cupy: Any = make_cupy(device)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cupy.cuda)
    monkeypatch.setattr(cuda_driver, "driver", lambda: cupy.cuda.driver)
    monkeypatch.setattr(array_libraries, "_libraries", {})
    for name in OURS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield cupy
    for name in OURS:
        sys.modules.pop(name, None)


@pytest.fixture(params=SEEDS)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    fake = FakeDevice(seed=request.param)
    with using_cupy(fake, monkeypatch):
        yield fake


def cupy_array(values: Any) -> Any:
    """Return an array of the stand-in; its values arrive only when its stream runs."""
    fixed = np.array(values)
    return sys.modules["cupy"].empty(fixed.shape, fixed.dtype).set(fixed)


class Interface:
    """An array with the CUDA array interface, whose work is on a separate stream."""

    def __init__(self, device: FakeDevice, values: Any, stream: int | None = None, **changes: Any) -> None:
        self.inner = fake_array(device, values)
        self.__cuda_array_interface__ = {
            "shape": self.inner.shape,
            "typestr": self.inner.dtype.str,
            "data": (self.inner.ptr, False),
            "strides": None,
            "stream": stream,
            "version": 3,
            **changes,
        }


class Capsule:
    """An array with DLPack, of a library with a namespace; its work is on a separate stream."""

    def __init__(self, device: FakeDevice, values: Any) -> None:
        self.device, self.stream = device, device.make_stream()
        with device.using(self.stream):
            self.inner = cupy_array(values)

    def __dlpack__(self, stream: int) -> Any:
        event = self.device.make_event()
        self.device.record(event, self.stream)
        self.device.wait(stream, event)
        return self.inner

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.device.index

    def __array_namespace__(self) -> Any:
        return Namespace


class Namespace:
    """The library of :class:`Capsule`, which computes on the default stream."""

    @staticmethod
    def from_dlpack(array: Any) -> tuple[str, Any]:
        return "theirs", array.__dlpack__(stream=0)


def on_ranks(body: Callable[[], None]) -> None:
    run_ranks(2, body, timeout=30, knobs={"staging_size": 64})


def test_cupy_in_cupy_out(device: FakeDevice) -> None:
    cupy = sys.modules["cupy"]

    def body() -> None:
        with cupy.cuda.Stream(non_blocking=True):
            array = cupy_array(np.arange(100.0) + hvd.rank())
            result = hvd.allreduce(array, op=hvd.Sum, name="x")
            assert type(result) is cupy.ndarray
            assert result.get().tolist() == (2 * np.arange(100.0) + 1).tolist()
            assert hvd.allreduce_(array, op=hvd.Sum, name="y") is array
            assert array.get().tolist() == result.get().tolist()
            view = cupy_array(np.arange(40.0)).strided()
            assert hvd.allreduce_(view, op=hvd.Sum, name="z") is view
            assert view.get().tolist() == (2 * np.arange(0.0, 40.0, 2)).tolist()
            assert hvd.allgather(cupy_array([hvd.rank()] * 3), name="g").get().tolist() == [0] * 3 + [1] * 3
            group = hvd.grouped_allreduce([cupy_array(np.ones(n)) for n in (3, 50)], op=hvd.Sum, name="h")
            assert [part.get().sum() for part in group] == [6, 100]

    on_ranks(body)


@needs_compiler
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_what_rides_together_is_packed_by_our_kernels(device: FakeDevice, factor: float) -> None:
    counts = (3, 1000, 0, 70)

    def body() -> None:
        arrays = [cupy_array(np.arange(n, dtype=np.float32)) for n in counts]
        results = hvd.grouped_allreduce(arrays, op=hvd.Sum, name="g", prescale_factor=factor)
        for result, n in zip(results, counts, strict=True):
            np.testing.assert_array_equal(result.get(), np.arange(n, dtype=np.float32) * factor)

    run_ranks(1, body)


@needs_compiler
def test_a_device_packs_on_the_stream_that_it_is_told(device: FakeDevice) -> None:
    from pyhvd.devices.cupy_device import cuda_device

    cuda = cuda_device(0)
    packer = cuda.packer()
    stream = device.make_stream()
    with device.using(stream):
        source, target = cupy_array([1.0, 2.0, 3.0]), cupy_array(np.zeros(8))
    one = np.zeros(1, np.int64), np.array([source.ptr]), np.array([3])
    packer.pack(target.ptr, *one, Code.FLOAT64, ReduceOp.SUM, 2.0, stream)
    with device.using(stream):
        np.testing.assert_array_equal(target.get()[:4], [2.0, 4.0, 6.0, 0.0])


@pytest.mark.parametrize("missing", ["INT8", "FLOAT16"])
def test_a_kernel_that_cannot_be_compiled_is_known_before_the_ranks_agree(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """One rank without NVRTC, or with a cache that it cannot write, must not fail inside a batch."""
    from pyhvd.devices.cupy_device import cuda_device

    def compile_module(module: Any) -> None:
        if module._type == missing:
            raise OSError("[Errno 30] Read-only file system: '/root/.cupy'")

    monkeypatch.setattr(sys.modules["cupy"].RawModule, "compile", compile_module)
    context = DeviceContext.open(cuda_device(0))
    assert context.packer is None
    with pytest.raises(RuntimeError, match=r"kernels cannot be compiled: OSError: .* Read-only file system"):
        usable_version(context)


def test_the_interface(device: FakeDevice) -> None:
    cupy = sys.modules["cupy"]

    def body() -> None:
        stream = device.make_stream()
        with device.using(stream):
            array = Interface(device, np.arange(50, dtype=np.int32), stream)
        result = hvd.allreduce(array, op=hvd.Sum, name="x")
        assert type(result) is cupy.ndarray
        assert result.get().tolist() == (2 * np.arange(50)).tolist()
        assert hvd.allreduce_(array, op=hvd.Sum, name="y") is array
        assert array.inner.get().tolist() == (2 * np.arange(50)).tolist()

    on_ranks(body)


def test_the_interface_of_a_strided_array(device: FakeDevice) -> None:
    array = Interface(device, np.arange(12.0), shape=(6,), strides=(16,))
    view = adopt(array, writing=True)
    assert isinstance(view, DeviceView)
    assert view.shape == (6,)
    assert view.owner.get().tolist() == [0, 2, 4, 6, 8, 10]
    assert view.home is not None


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"mask": object()}, TypeError, "cannot take a masked array"),
        ({"data": (0, False)}, TypeError, "this array of 24 bytes has no memory: its address is 0"),
        ({"typestr": ">f8"}, hvd.UnsupportedDtypeError, "'>f8' is not in this machine's byte order"),
    ],
)
def test_interfaces_that_are_refused(
    device: FakeDevice, changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        adopt(Interface(device, np.ones(3), **changes))


def test_a_read_only_interface(device: FakeDevice) -> None:
    array = Interface(device, np.ones(3))
    array.__cuda_array_interface__["data"] = (array.inner.ptr, True)
    assert adopt(array).shape == (3,)
    with pytest.raises(ValueError, match="needs a writable array, and this one is read-only"):
        adopt(array, writing=True)


def test_stream_0_is_that_of_the_device(device: FakeDevice) -> None:
    from pyhvd.devices.cupy_device import cuda_device

    cuda = sys.modules["cupy"].cuda
    entered: list[int] = []
    seen: list[list[int]] = []

    @contextlib.contextmanager
    def acting(index: int) -> Iterator[None]:
        entered.append(index)
        yield
        entered.pop()

    def call(*arguments: object) -> None:
        seen.append(list(entered))

    event = cuda_device(0).make_event()
    cuda.Device, cuda.runtime.getDevice = acting, lambda: 1
    cuda.runtime.eventRecord = cuda.runtime.streamWaitEvent = cuda.runtime.memcpyAsync = call
    cuda_device(0).record(event, 0)
    cuda_device(0).wait(0, event)
    cuda_device(0).copy(1, 2, 3, 0)
    assert seen == [[0], [0], [0]]


def test_pyhvds_threads_make_no_context_on_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of a thread's work its device must not become device 0, as CUDA's default is."""

    def body() -> None:
        cupy = sys.modules["cupy"]
        cupy.cuda.Device(1).use()
        for _ in range(2):
            array = cupy_array(np.arange(100.0))
            pair = hvd.grouped_allreduce([array, array], op=hvd.Sum, name="pair")
            assert pair[1].get().tolist() == (2 * np.arange(100.0)).tolist()
            view = cupy_array(np.arange(40.0)).strided()
            assert hvd.allreduce_(view, op=hvd.Sum, name="z") is view

    with using_cupy(FakeDevice(index=1), monkeypatch) as cupy:
        on_ranks(body)
        made = {index for thread, index in cupy.cuda.runtime.contexts if thread.startswith("pyhvd")}
    assert made == {1}


def test_a_capturing_stream_is_refused(device: FakeDevice) -> None:
    stream = device.make_stream()

    def body() -> None:
        array = cupy_array(np.ones(4))
        handle = hvd.allreduce_async(array, op=hvd.Sum, name="x")
        handle.wait()
        with device.using(stream):
            calls: tuple[Callable[[], Any], ...] = (
                handle.result,
                lambda: hvd.allreduce(array),
                lambda: hvd.allreduce_(array),
            )
            for call in calls:
                with pytest.raises(RuntimeError, match=r"captures a CUDA graph, .* outside of the capture"):
                    call()
        assert handle.result().get().tolist() == [1.0] * 4

    device.capturing.add(stream)
    run_ranks(1, body)
    assert not device._streams[stream], "nothing became part of the graph"


def test_pyhvds_threads_invalidate_no_capture(device: FakeDevice) -> None:
    def body() -> None:
        array = cupy_array(np.ones(1000))
        hvd.grouped_allreduce([array, array], op=hvd.Sum, name="x")

    on_ranks(body)
    assert sys.modules["cupy"].cuda.driver.strict == []


def test_targets_whose_elements_share_memory_are_refused(device: FakeDevice) -> None:
    array = Interface(device, np.ones(3), shape=(2, 3), strides=(0, 8))
    assert adopt(array).shape == (2, 3)
    cupy = sys.modules["cupy"]
    other = cupy.ndarray((2, 3), np.float64, cupy_array(np.ones(6)).data, (0, 8))
    capsule = Capsule(device, np.ones(3))
    capsule.inner = other
    for target in (array, other, capsule):
        with pytest.raises(ValueError, match="cannot write to an array whose elements share memory"):
            adopt(target, writing=True)


def test_no_page_locked_memory_is_a_memory_error(device: FakeDevice) -> None:
    from pyhvd.devices.cupy_device import cuda_device

    cuda = sys.modules["cupy"].cuda
    status = 2

    def fail(nbytes: int) -> None:
        raise cuda.runtime.CUDARuntimeError(status)

    cuda.alloc_pinned_memory = fail
    with pytest.raises(MemoryError, match="64 bytes of page-locked memory"):
        cuda_device(0).allocate_pinned(64)
    status = 719
    with pytest.raises(cuda.runtime.CUDARuntimeError):
        cuda_device(0).allocate_pinned(64)


def test_dlpack_and_results_in_the_callers_library(device: FakeDevice) -> None:
    def body() -> None:
        array = Capsule(device, np.arange(70, dtype=np.float32))
        whose, result = hvd.allreduce(array, op=hvd.Sum, name="x")
        assert whose == "theirs"
        assert result.get().tolist() == (2 * np.arange(70)).tolist()
        whose, result = hvd.allgather(array, name="g")
        assert whose == "theirs"
        assert result.get().tolist() == [*range(70)] * 2

    on_ranks(body)


def test_jax_arrays_cannot_be_changed(device: FakeDevice) -> None:
    array = Capsule(device, np.ones(3))
    kind = type("ArrayImpl", (Capsule,), {"__module__": "jaxlib._jax"})
    array.__class__ = kind
    with pytest.raises(
        TypeError, match="an in-place operation cannot change a jaxlib array: use the form without"
    ):
        adopt(array, writing=True)
    assert adopt(array).shape == (3,)


def test_memory_for_a_result_is_of_the_callers_stream(device: FakeDevice) -> None:
    stream = device.make_stream()
    with device.using(stream):
        view = adopt(cupy_array(np.ones(10)))
    taken: list[int] = []
    inner = device.allocate
    device.allocate = lambda nbytes, stream: (taken.append(stream), inner(nbytes, stream))[1]  # type: ignore[method-assign, func-returns-value]
    target = view.empty_like((4,))
    assert (target.shape, target.info, taken) == ((4,), view.info, [stream])


def test_a_device_that_reports_an_error(device: FakeDevice) -> None:
    from pyhvd.devices.cupy_device import count_devices, cuda_device

    runtime = sys.modules["cupy"].cuda.runtime
    assert cuda_device(0) is cuda_device(0)
    assert cuda_device(0).identity() == "0000:01:00.0"
    assert count_devices() == 1
    sys.modules["cupy"].cuda.driver.cuEventQuery = lambda event: 719
    with pytest.raises(runtime.CUDARuntimeError):
        cuda_device(0).has_passed(cuda_device(0).make_event())

    def count() -> int:
        raise runtime.CUDARuntimeError(35)

    runtime.getDeviceCount = count
    assert count_devices() == 0
