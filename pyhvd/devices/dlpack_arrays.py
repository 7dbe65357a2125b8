"""Arrays on CUDA devices of any other library: by DLPack, or by ``__cuda_array_interface__``.

JAX's arrays are handed back as JAX's, and those of libraries with an array API namespace as theirs; what has
neither gets CuPy's, which speak both protocols.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import cupy

from pyhvd.devices.base import Device, DeviceView, Event, Stream
from pyhvd.devices.cupy_arrays import CupyLibrary, leased, refuse_overlap_of
from pyhvd.devices.cupy_device import cuda_device
from pyhvd.devices.streams import Lease, stream_of


class ForeignLibrary(CupyLibrary):
    """See the module's docstring; what is taken is seen through CuPy.

    DLPack has the producer make a stream of ours wait for its work: the *intake*, one for each device.
    """

    def __init__(self) -> None:
        self._intakes: dict[int, Stream] = {}
        self._lock = threading.Lock()

    def takes(self, tensor: Any) -> bool:
        """Return whether it says that it is on a GPU."""
        if hasattr(tensor, "__dlpack_device__"):
            return int(tensor.__dlpack_device__()[0]) in (2, 13)
        return hasattr(tensor, "__cuda_array_interface__")

    def adopt(self, tensor: Any, *, writing: bool) -> DeviceView:
        """Return a view."""
        if writing and _is_immutable(tensor):
            raise TypeError(
                f"an in-place operation cannot change a {type(tensor).__module__.partition('.')[0]} array:"
                " use the form without the trailing underscore"
            )
        if hasattr(tensor, "__dlpack__"):
            device = cuda_device(int(tensor.__dlpack_device__()[1]))
            device.current_stream()  # refuses here what could not wait for the result either
            stream = self._intake(device)
            with device.working_on(stream):
                array = cupy.from_dlpack(tensor)
                if writing:
                    refuse_overlap_of(array)
                seen = self._seen(array, device, stream)
        else:
            seen = self._adopt_interface(tensor, writing)
        seen.library = _Namesake(self, tensor)
        return seen

    def _adopt_interface(self, tensor: Any, writing: bool) -> DeviceView:
        interface = tensor.__cuda_array_interface__
        if interface.get("mask") is not None:
            raise TypeError("a masked array would lose its mask")
        ptr, read_only = interface["data"]
        if writing and read_only:
            raise ValueError("an in-place operation needs a writable array, and this one is read-only")
        dtype, shape = cupy.dtype(interface["typestr"]), tuple(interface["shape"])
        strides = interface.get("strides")
        index = int(cupy.cuda.runtime.pointerGetAttributes(ptr).device) if ptr else cupy.cuda.Device().id
        device = cuda_device(index)
        # Version 3; None: there is nothing to wait for. 0 is not allowed, but can only mean one.
        if interface.get("stream") is None:
            stream, origin = device.current()
        else:  # the array keeps its stream alive, or nobody does
            stream, origin = stream_of(int(interface["stream"]), "the stream of this array"), tensor
        nbytes = _extent(shape, strides, dtype.itemsize)
        memory = cupy.cuda.UnownedMemory(ptr, nbytes, tensor, index)
        array = cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0), strides)
        if writing:
            refuse_overlap_of(array)
        return self._seen(array, device, stream, origin)

    def _intake(self, device: Device) -> Stream:
        with self._lock:
            if device.index not in self._intakes:
                self._intakes[device.index] = device.make_stream()
            return self._intakes[device.index]


class _Namesake:
    """What hands results back in the library of one array."""

    def __init__(self, foreign: ForeignLibrary, tensor: Any) -> None:
        self._foreign = foreign
        namespace = getattr(tensor, "__array_namespace__", None)
        self._namespace = namespace() if namespace is not None else None

    def empty_like(self, view: DeviceView, shape: tuple[int, ...]) -> DeviceView:
        """Return new memory of CuPy's pool."""
        made = self._foreign.empty_like(view, shape)
        made.library = self
        return made

    def follow(self, view: DeviceView, arrived: Event) -> None:
        """Let CuPy's current stream wait, and the array's: its library's, or the one that it names."""
        view.on.wait(view.stream, arrived)
        if self._namespace is not None:
            with cuda_device(view.on.index).working_on(view.stream):
                self._namespace.from_dlpack(view.owner)  # has the library's own stream wait for this one
        if view.on.current_stream() != view.stream:
            self._foreign.follow(view, arrived)

    def receive(self, view: DeviceView, arrived: Event) -> Any:
        """Let the intake, or CuPy's current stream, wait; and return an array of the library."""
        if self._namespace is None:
            return self._foreign.receive(view, arrived)
        view.on.wait(view.stream, arrived)
        # CuPy has the consumer's stream wait for its own current one.
        with cuda_device(view.on.index).working_on(view.stream):
            return self._namespace.from_dlpack(_Export(view))

    def copy_home(self, view: DeviceView, stream: Stream) -> None:
        """Queue the copy."""
        self._foreign.copy_home(view, stream)


class _Export:
    """A result on its way to another library by DLPack, which says on which stream it will use it."""

    def __init__(self, view: DeviceView) -> None:
        self._lease = Lease(view)
        self._array = leased(view, self._lease) if view.nbytes else view.owner

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Any:
        """Export; None is the device's default stream, and so is, for the lease, -1: nobody is to wait."""
        self._lease.use_on(stream_of(max(stream or 0, 0), "the stream that the result is asked for"))
        return self._array.__dlpack__(stream=stream, **options)


def _extent(shape: tuple[int, ...], strides: tuple[int, ...] | None, itemsize: int) -> int:
    """Return how many bytes an array reaches over."""
    if 0 in shape:
        return 0
    if strides is None:
        return math.prod(shape) * itemsize
    return itemsize + sum((n - 1) * abs(step) for n, step in zip(shape, strides, strict=True))


def _is_immutable(tensor: Any) -> bool:
    return type(tensor).__module__.partition(".")[0] in ("jax", "jaxlib")


library = ForeignLibrary()
