"""A fake of the parts of CuPy that pyhvd uses, over the device of :mod:`tests.devices.fake`.

With this fake, :mod:`pyhvd.devices.cupy_device` and its users run without a GPU. Names and signatures are
those of CuPy 14. The fake does not test CuPy itself.
"""

from __future__ import annotations

import itertools
import shutil
import threading
import types
from typing import Any

import numpy as np
import numpy.typing as npt

from pyhvd.devices.pack_plan import THREADS
from tests.devices.fake import FakeArray, FakeDevice, FakeEvent
from tests.devices.kernels_on_cpu import SOURCE, compiler_of


class Pointer:
    """An address and its memory's owner: CuPy's MemoryPointer."""

    def __init__(self, memory: Any, offset: int) -> None:
        self.memory = memory
        self.ptr = memory.ptr + offset
        self.device_id: int = memory.device_id


class Unowned:
    """Memory of another owner: CuPy's UnownedMemory."""

    def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
        self.ptr, self.nbytes, self.owner, self.device_id = ptr, size, owner, device_id


def allocated(device: FakeDevice, nbytes: int) -> Pointer:
    """Return memory of CuPy's pool, of the current stream."""
    memory = device.allocate(nbytes, device.current_stream())
    return Pointer(Unowned(memory.ptr, nbytes, memory, device.index), 0)


def make_cupy(device: FakeDevice) -> types.ModuleType:
    """Return a module ``cupy`` whose only device in use is the fake device."""
    cupy: Any = types.ModuleType("cupy")
    array = _ndarray(device)

    def ascontiguousarray(given: Any) -> Any:
        made = array(given.shape, given.dtype)
        made[...] = given
        return made

    vars(cupy).update(
        cuda=_cuda(device),
        ndarray=array,
        dtype=np.dtype,
        empty=array,
        ascontiguousarray=ascontiguousarray,
        RawModule=_raw_module(device),
        from_dlpack=lambda given: given.__dlpack__(stream=device.current_stream()),
    )
    module: types.ModuleType = cupy
    return module


def _ndarray(device: FakeDevice) -> Any:
    """Return the array type of CuPy."""

    class Ndarray(FakeArray):
        """CuPy's array."""

        def __init__(
            self,
            shape: tuple[int, ...],
            dtype: npt.DTypeLike = float,
            memptr: Pointer | None = None,
            strides: tuple[int, ...] | None = None,
        ) -> None:
            nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
            if memptr is None:
                memptr = allocated(device, nbytes)
            super().__init__(device, memptr.memory, shape, dtype, strides)
            self.data = memptr

        @property
        def flags(self) -> Any:
            return types.SimpleNamespace(c_contiguous=self._numpy().flags.c_contiguous)

        def __setitem__(self, where: Any, values: Ndarray) -> None:
            device.call(lambda: self._numpy().__setitem__(where, values._numpy()), device.current_stream())

        def __dlpack__(self, stream: int | None) -> Ndarray:
            consumer = 0 if stream in (None, 1) else stream
            device.wait(consumer, device.mark(device.current_stream()))
            return self

        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, device.index

        def strided(self) -> Ndarray:
            """Return a view of every other element of dimension 0."""
            steps = np.empty(self.shape, self.dtype).strides
            shape = (-(-self.shape[0] // 2), *self.shape[1:])
            return Ndarray(shape, self.dtype, self.data, (2 * steps[0], *steps[1:]))

    Ndarray.__module__ = "cupy"
    return Ndarray


def _raw_module(device: FakeDevice) -> Any:
    """Return CuPy's type of a module of CUDA source; it supports only the kernels of ``pack_kernels.cu``."""

    class RawModule:
        """CuPy's module of kernels."""

        def __init__(self, *, code: str, options: tuple[str, ...]) -> None:
            assert code == SOURCE.read_text()
            standard, defined = options
            assert standard == "--std=c++14"
            self._type = defined.removeprefix("-DPYHVD_TYPE=")

        def compile(self) -> None:
            """Do nothing: g++ compiles a type when it is first launched, as all types take it long."""
            if shutil.which("g++") is None:
                raise RuntimeError("NVRTC, for which g++ stands here, is not found")

        def get_function(self, name: str) -> Any:
            def call(grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...]) -> None:
                assert block == (THREADS,)
                launch = compiler_of(device)(self._type)
                launch(name, grid[0], arguments, device.current_stream())

            return call

    return RawModule


def _cuda(device: FakeDevice) -> types.ModuleType:
    """Return a module ``cupy.cuda``."""
    cuda: Any = types.ModuleType("cupy.cuda")
    events: dict[int, FakeEvent] = {}
    numbers = itertools.count(1)

    class Event:
        """CuPy's event."""

        def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
            assert block
            assert disable_timing
            self.ptr = next(numbers)
            events[self.ptr] = FakeEvent()

        def __del__(self) -> None:
            del events[self.ptr]

    runtime = _runtime(device, events)

    class Device:
        """CuPy's device."""

        def __init__(self, index: int | None = None) -> None:
            self.id: int = runtime.getDevice() if index is None else index

        def use(self) -> None:
            runtime.setDevice(self.id)

        def __enter__(self) -> None:
            self._before = runtime.getDevice()
            self.use()

        def __exit__(self, *error: Any) -> None:
            runtime.setDevice(self._before)

    vars(cuda).update(
        runtime=runtime,
        Event=Event,
        Device=Device,
        get_current_stream=lambda index=-1: types.SimpleNamespace(ptr=device.current_stream()),
        alloc=lambda nbytes: allocated(device, nbytes),
        alloc_pinned_memory=device.allocate_pinned,
        UnownedMemory=Unowned,
        MemoryPointer=Pointer,
        driver=_driver(device, events),
        **_streams(device),
    )
    module: types.ModuleType = cuda
    return module


def _streams(device: FakeDevice) -> dict[str, Any]:
    entered = threading.local()

    class Stream:
        """CuPy's stream."""

        null: Any = None

        def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
            self.ptr = 0 if null else device.make_stream()

        @classmethod
        def from_external(cls, owner: Any) -> Stream:
            made: Stream = cls.__new__(cls)
            version, made.ptr = owner.__cuda_stream__()
            assert version == 0
            assert made.ptr
            return made

        def __enter__(self) -> None:
            # All threads share the default stream, and several may have it as their current stream.
            entered.stack = [*getattr(entered, "stack", ()), device.using(self.ptr)]
            entered.stack[-1].__enter__()

        def __exit__(self, *error: Any) -> None:
            entered.stack.pop().__exit__(*error)

    Stream.null = Stream(null=True)
    return {"Stream": Stream}


def _driver(device: FakeDevice, events: dict[int, FakeEvent]) -> Any:
    """Return the driver's library; it notes which threads would invalidate other threads' captures."""
    relaxed: set[int] = set()
    strict: list[str] = []

    def exchange(mode: Any) -> None:
        assert mode._obj.value == 2
        relaxed.add(threading.get_ident())

    def query(event: Any) -> int:
        if threading.get_ident() not in relaxed:
            strict.append(threading.current_thread().name)
        return 0 if device.has_passed(events[event.value]) else 600

    return types.SimpleNamespace(
        cuThreadExchangeStreamCaptureMode=exchange, cuEventQuery=query, strict=strict
    )


def _runtime(device: FakeDevice, events: dict[int, FakeEvent]) -> Any:
    class CUDARuntimeError(RuntimeError):
        """CuPy's error."""

        def __init__(self, status: int) -> None:
            super().__init__(status)
            self.status = status

    current = threading.local()  # CUDA's default is device 0
    contexts: list[tuple[str, int]] = []

    def set_device(index: int) -> None:
        contexts.append((threading.current_thread().name, index))
        current.device = index

    return types.SimpleNamespace(
        contexts=contexts,  # a thread that makes a device current gives the process a context on it
        setDevice=set_device,
        getDevice=lambda: getattr(current, "device", 0),
        memcpyDefault=4,
        CUDARuntimeError=CUDARuntimeError,
        eventRecord=lambda event, stream: device.record(events[event], stream),
        streamWaitEvent=lambda stream, event: device.wait(stream, events[event]),
        streamIsCapturing=device.is_capturing,
        eventSynchronize=lambda event: device.synchronize(events[event]),
        memcpyAsync=lambda target, source, n, kind, stream: device.copy(target, source, n, stream),
        deviceGetPCIBusId=lambda index: "0000:01:00.0",
        getDeviceCount=lambda: device.index + 1,
        pointerGetAttributes=lambda ptr: types.SimpleNamespace(device=device.index),
    )
