"""Take and return arrays of other libraries on CUDA devices: by DLPack, or ``__cuda_array_interface__``.

A result is an array of the input's library if that library has an array API namespace, as JAX has. Otherwise
it is a CuPy array, which offers both protocols.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import cupy

from pyhvd.devices.array_libraries import is_on_cuda, library_name
from pyhvd.devices.base import Device, DeviceView, Event, Stream
from pyhvd.devices.cupy_arrays import CupyLibrary, leased, refuse_overlap_of
from pyhvd.devices.cupy_device import cuda_device
from pyhvd.devices.streams import Lease, stream_of


class ForeignLibrary:
    """Takes arrays through CuPy; see :class:`pyhvd.devices.array_libraries.Adopter`.

    When pyhvd imports an array by DLPack, the array's library makes a stream of pyhvd wait for the library's
    queued work. That stream is the *intake*; each device has one.
    """

    def __init__(self) -> None:
        self._intakes: dict[int, Stream] = {}
        self._lock = threading.Lock()

    def takes(self, tensor: Any) -> bool:
        return is_on_cuda(tensor)

    def adopt(self, tensor: Any, *, writing: bool) -> DeviceView:
        root = library_name(tensor)
        if writing and root in ("jax", "jaxlib"):
            raise TypeError(
                f"an in-place operation cannot change a {root} array: use the form without the trailing"
                " underscore"
            )
        if not hasattr(tensor, "__dlpack__"):
            return _adopt_interface(tensor, writing=writing)
        interface = getattr(tensor, "__cuda_array_interface__", None) if writing else None
        if interface is not None:
            _refuse_read_only(interface)
        device = cuda_device(int(tensor.__dlpack_device__()[1]))
        device.current_stream()  # raises ValueError for a stream that could not wait for the result
        stream = self._intake(device)
        with device.working_on(stream):
            array = cupy.from_dlpack(tensor)
            if writing:
                refuse_overlap_of(array)
            return _SameLibrary(tensor).view_of(array, device, stream)

    def _intake(self, device: Device) -> Stream:
        with self._lock:
            if device.index not in self._intakes:
                self._intakes[device.index] = device.make_stream()
            return self._intakes[device.index]


def _refuse_read_only(interface: dict[str, Any]) -> None:
    if interface["data"][1]:
        raise ValueError("an in-place operation needs a writable array, and this one is read-only")


def _adopt_interface(tensor: Any, *, writing: bool) -> DeviceView:
    interface = tensor.__cuda_array_interface__
    if interface.get("mask") is not None:
        raise TypeError("cannot take a masked array, as its mask would be lost: pass its data")
    if writing:
        _refuse_read_only(interface)
    ptr, _ = interface["data"]
    dtype, shape = cupy.dtype(interface["typestr"]), tuple(interface["shape"])
    strides = interface.get("strides")
    index = int(cupy.cuda.runtime.pointerGetAttributes(ptr).device) if ptr else cupy.cuda.Device().id
    device = cuda_device(index)
    # In version 3 of the protocol, None means that there is no work to wait for. The protocol forbids 0; here
    # it means the default stream.
    if interface.get("stream") is None:
        stream, origin = device.current()
    else:  # nothing but the array keeps its stream alive
        stream, origin = stream_of(int(interface["stream"]), "the stream of this array"), tensor
    nbytes = _extent(shape, strides, dtype.itemsize)
    memory = cupy.cuda.UnownedMemory(ptr, nbytes, tensor, index)
    array = cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0), strides)
    if writing:
        refuse_overlap_of(array)
    return _SameLibrary(tensor).view_of(array, device, stream, origin)


class _SameLibrary(CupyLibrary):
    """Returns results in the library of one array."""

    def __init__(self, tensor: Any) -> None:
        namespace = getattr(tensor, "__array_namespace__", None)
        self._namespace = namespace() if namespace is not None else None

    def follow(self, view: DeviceView, arrived: Event) -> None:
        """Make the array's streams and CuPy's current stream wait for the result.

        The array's streams are the view's, and the one that its library uses, if the library has a namespace.
        """
        view.on.wait(view.stream, arrived)
        if self._namespace is not None:
            with cuda_device(view.on.index).working_on(view.stream):
                self._namespace.from_dlpack(view.owner)  # makes the library's stream wait for the view's
        if view.on.current_stream() != view.stream:
            super().follow(view, arrived)

    def receive(self, view: DeviceView, arrived: Event) -> Any:
        """Return the result as an array of the library, or of CuPy if the library has no namespace.

        The stream that will use the array waits for the result.
        """
        if self._namespace is None:
            return super().receive(view, arrived)
        view.on.wait(view.stream, arrived)
        # CuPy makes the consumer's stream wait for CuPy's current stream.
        with cuda_device(view.on.index).working_on(view.stream):
            return self._namespace.from_dlpack(_Export(view))


class _Export:
    """A result that another library imports by DLPack; the import names the stream that will use it."""

    def __init__(self, view: DeviceView) -> None:
        self._lease = Lease(view)
        self._array = leased(view, self._lease) if view.nbytes else view.owner

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Any:
        """Export the array; the lease takes ``stream`` None and -1 (do not wait) for the default stream."""
        self._lease.use_on(stream_of(max(stream or 0, 0), "the stream that will use the result"))
        return self._array.__dlpack__(stream=stream, **options)


def _extent(shape: tuple[int, ...], strides: tuple[int, ...] | None, itemsize: int) -> int:
    """Return the number of bytes that an array's elements span."""
    if 0 in shape:
        return 0
    if strides is None:
        return math.prod(shape) * itemsize
    return itemsize + sum((n - 1) * abs(step) for n, step in zip(shape, strides, strict=True))


library = ForeignLibrary()
