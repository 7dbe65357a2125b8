"""CUDA devices through CuPy. The first array on a GPU imports this module."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import resources
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from pyhvd.arrays import Bytes
from pyhvd.devices import cuda_driver
from pyhvd.devices.base import Event, Memory, Packer, Stream
from pyhvd.devices.pack_plan import THREADS
from pyhvd.devices.packing import KERNELS, Argument, KernelPacker, Launch
from pyhvd.devices.streams import stream_of

_NO_MEMORY = 2  # cudaErrorMemoryAllocation; for device memory CuPy itself raises MemoryError
_NOT_READY = 600  # cudaErrorNotReady


class CupyDevice:
    """The CUDA device of an ordinal in this process; implements :class:`pyhvd.devices.base.Device`."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.name = f"cuda:{index}"
        self._streams: list[Any] = []

    def identity(self) -> str:
        """Return the PCI bus id; instances of a partitioned GPU have the same."""
        return str(runtime.deviceGetPCIBusId(self.index))

    def take_thread(self) -> None:
        # A context manager would make the old device current at its end. That is GPU 0 on a new thread, where
        # each rank would then have a CUDA context, of some 500 MB.
        runtime.setDevice(self.index)
        cuda_driver.relax_captures()

    def _acting(self) -> AbstractContextManager[None]:
        """Make this the calling thread's current device inside the context."""
        if runtime.getDevice() == self.index:
            return _NO_CHANGE
        here: AbstractContextManager[None] = cupy.cuda.Device(self.index)
        return here

    def working_on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Make this device and a stream the thread's current ones inside the context."""
        if runtime.getDevice() == self.index:
            here = int(cupy.cuda.get_current_stream(self.index).ptr)
            return _NO_CHANGE if here == stream else cupy_stream(stream)
        return self._elsewhere(stream)

    @contextmanager
    def _elsewhere(self, stream: Stream) -> Iterator[None]:
        with cupy.cuda.Device(self.index), cupy_stream(stream):
            yield

    def make_stream(self) -> Stream:
        with self._acting():
            stream = cupy.cuda.Stream(non_blocking=True)
        self._streams.append(stream)
        return int(stream.ptr)

    def current_stream(self) -> Stream:
        return self.current()[0]

    def current(self) -> tuple[Stream, Any]:
        """Return the current stream, and CuPy's object, which keeps it alive."""
        origin = cupy.cuda.get_current_stream(self.index)
        return stream_of(int(origin.ptr), "CuPy's current stream"), origin

    def is_capturing(self, stream: Stream) -> bool:
        with self._acting():
            return bool(runtime.streamIsCapturing(stream))

    def make_event(self) -> Event:
        """Return a new event; a waiting thread sleeps."""
        with self._acting():
            return cupy.cuda.Event(block=True, disable_timing=True)

    def record(self, event: Event, stream: Stream) -> None:
        with self._acting():  # stream 0 belongs to the current device
            runtime.eventRecord(event.ptr, stream)

    def mark(self, stream: Stream) -> Event:
        event = self.make_event()
        self.record(event, stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        with self._acting():
            runtime.streamWaitEvent(stream, event.ptr)

    def has_passed(self, event: Event) -> bool:
        status = cuda_driver.query_event(event.ptr)
        if status not in (0, _NOT_READY):
            raise runtime.CUDARuntimeError(status)
        return bool(status == 0)

    def synchronize(self, event: Event) -> None:
        runtime.eventSynchronize(event.ptr)

    def allocate(self, nbytes: int, stream: Stream) -> Memory:
        with self.working_on(stream):
            pointer = cupy.cuda.alloc(nbytes)
        return Memory(int(pointer.ptr), nbytes, pointer)

    def allocate_pinned(self, nbytes: int) -> Bytes:
        try:
            with self._acting():
                return np.frombuffer(cupy.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)
        except runtime.CUDARuntimeError as exc:
            if exc.status != _NO_MEMORY:
                raise
            raise MemoryError(f"{nbytes} bytes of page-locked memory: {exc}") from exc

    def packer(self) -> Packer:
        """Return a packer by pyhvd's kernels, which NVRTC compiles."""
        packer = KernelPacker(self, compile_kernels)
        try:
            packer.load()
        except Exception as exc:  # of NVRTC, of the driver, or of CuPy's cache on disk
            raise RuntimeError(f"pyhvd's kernels cannot be compiled: {type(exc).__name__}: {exc}") from exc
        return packer

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """Queue a copy; CUDA finds the kind of memory by the addresses."""
        if nbytes:
            with self._acting():
                runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDefault, stream)


_NO_CHANGE: AbstractContextManager[None] = nullcontext()


class _Handle:
    """A stream that CuPy does not own, by CUDA's stream protocol."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, Stream]:
        return 0, self._stream  # the protocol's version, and the handle


@functools.lru_cache(maxsize=64)
def cupy_stream(stream: Stream) -> Any:
    """Return CuPy's object for a stream; a context manager that makes it the current one."""
    return cupy.cuda.Stream.from_external(_Handle(stream)) if stream else cupy.cuda.Stream.null


def compile_kernels(name: str) -> Launch:
    """Return the kernels for a type; a :data:`pyhvd.devices.packing.Compile`.

    NVRTC needs about 0.5 s for a type. CuPy caches the result on disk.
    """
    source = resources.files("pyhvd.devices").joinpath("pack_kernels.cu").read_text(encoding="utf-8")
    module = cupy.RawModule(code=source, options=("--std=c++14", f"-DPYHVD_TYPE={name}"))
    module.compile()
    kernels = {kernel: module.get_function(kernel) for kernel in KERNELS}

    def launch(kernel: str, blocks: int, arguments: tuple[Argument, ...], stream: Stream) -> None:
        with cupy_stream(stream):
            kernels[kernel]((blocks,), (THREADS,), arguments)

    return launch


_devices: dict[int, CupyDevice] = {}
_lock = threading.Lock()


def cuda_device(index: int) -> CupyDevice:
    """Return the one object for a CUDA device."""
    known = _devices.get(index)
    if known is not None:
        return known
    with _lock:
        if index not in _devices:
            _devices[index] = CupyDevice(index)
        return _devices[index]


def count_devices() -> int:
    """Return the number of CUDA devices that this process sees; 0 without a driver."""
    try:
        return int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError:
        return 0
