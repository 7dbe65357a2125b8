"""Take and return CuPy's arrays. The first CuPy array imports this module."""

from __future__ import annotations

from typing import Any

import cupy

from pyhvd.devices.base import DeviceView, Event, Stream, refuse_overlap
from pyhvd.devices.cupy_device import CupyDevice, cuda_device
from pyhvd.devices.streams import Lease, follow
from pyhvd.dtypes import lookup


class CupyLibrary:
    """Takes and returns ``cupy.ndarray``; see :class:`pyhvd.devices.array_libraries.Adopter`.

    The caller's stream is the calling thread's current CuPy stream on the array's device. CuPy's pool has the
    memory of results. A result that is used on another stream holds a lease of it.
    """

    def takes(self, tensor: Any) -> bool:
        return isinstance(tensor, cupy.ndarray)

    def adopt(self, tensor: Any, *, writing: bool) -> DeviceView:
        if writing:
            refuse_overlap_of(tensor)
        device = cuda_device(tensor.data.device_id)
        return self.view_of(tensor, device, *device.current())

    def view_of(self, tensor: Any, device: CupyDevice, stream: Stream, origin: Any = None) -> DeviceView:
        """Return the view of an array whose contents come from a stream's queued work."""
        info = lookup(tensor.dtype)
        owner, home = tensor, None
        if not tensor.flags.c_contiguous:
            with device.working_on(stream):
                owner, home = cupy.ascontiguousarray(tensor), tensor
        ptr = int(owner.data.ptr)
        return DeviceView(ptr, owner.shape, info, device, self, stream, owner, None, home, origin)

    def empty_like(self, view: DeviceView, shape: tuple[int, ...]) -> DeviceView:
        device = cuda_device(view.on.index)
        with device.working_on(view.stream):
            owner = cupy.empty(shape, view.owner.dtype)
        ptr, stream = int(owner.data.ptr), view.stream
        return DeviceView(ptr, shape, view.info, device, self, stream, owner, None, None, view.origin)

    def follow(self, view: DeviceView, arrived: Event) -> None:
        follow(view.on, view.on.current_stream(), arrived)

    def receive(self, view: DeviceView, arrived: Event) -> Any:
        stream, origin = cuda_device(view.on.index).current()
        follow(view.on, stream, arrived)
        if stream == view.stream or not view.nbytes:
            return view.owner
        lease = Lease(view)
        lease.use_on(stream, origin)
        return leased(view, lease)

    def copy_home(self, view: DeviceView, stream: Stream) -> None:
        with cuda_device(view.on.index).working_on(stream):
            view.home[...] = view.owner


def leased(view: DeviceView, lease: Lease) -> Any:
    """Return an array of a view's memory that holds a lease."""
    memory = cupy.cuda.UnownedMemory(view.ptr, view.nbytes, lease, view.on.index)
    return cupy.ndarray(view.shape, view.owner.dtype, cupy.cuda.MemoryPointer(memory, 0))


def refuse_overlap_of(array: Any) -> None:
    """Raise ValueError if elements of an array that is to be written share memory."""
    if not array.flags.c_contiguous:
        refuse_overlap(array.shape, array.strides)


library = CupyLibrary()
