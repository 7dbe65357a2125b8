"""Take and return torch's tensors on CUDA devices. The first such tensor imports this module."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from pyhvd.devices.base import DeviceView, Event, Stream
from pyhvd.devices.cupy_device import cuda_device
from pyhvd.devices.streams import follow, stream_of
from pyhvd.devices.torch_tensors import check
from pyhvd.dtypes import DtypeInfo, named


class TorchLibrary:
    """Takes and returns ``torch.Tensor``; see :class:`pyhvd.devices.array_libraries.Adopter`.

    The caller's stream is the calling thread's current torch stream. Results have no autograd history: torch
    does not differentiate a collective. torch's pool has the memory of results, and learns of the stream that
    uses one.
    """

    def takes(self, tensor: Any) -> bool:
        return isinstance(tensor, torch.Tensor) and tensor.is_cuda

    def adopt(self, tensor: Any, *, writing: bool) -> DeviceView:
        check(tensor, writing=writing)
        info = named(str(tensor.dtype).removeprefix("torch."))
        mine = tensor.detach()
        plain = mine.resolve_conj().resolve_neg().contiguous()
        home = None if plain.data_ptr() == mine.data_ptr() else mine
        index = tensor.device.index
        return self._view_of(plain, index, info, _current(index)[0], home)

    def _view_of(
        self, owner: Any, index: int, info: DtypeInfo, stream: Stream, home: Any = None
    ) -> DeviceView:
        shape = tuple(owner.shape)
        device = cuda_device(index)
        return DeviceView(owner.data_ptr(), shape, info, device, self, stream, owner, None, home)

    def empty_like(self, view: DeviceView, shape: tuple[int, ...]) -> DeviceView:
        index = view.on.index
        try:
            with _on_stream(view.stream, index):
                owner = torch.empty(shape, dtype=view.owner.dtype, device=f"cuda:{index}")
        except torch.OutOfMemoryError as exc:
            raise MemoryError(str(exc)) from exc
        return self._view_of(owner, index, view.info, view.stream)

    def follow(self, view: DeviceView, arrived: Event) -> None:
        follow(view.on, _current(view.on.index)[0], arrived)

    def receive(self, view: DeviceView, arrived: Event) -> Any:
        stream, origin = _current(view.on.index)
        follow(view.on, stream, arrived)
        if stream != view.stream:
            view.owner.record_stream(origin)
        return view.owner

    def copy_home(self, view: DeviceView, stream: Stream) -> None:
        with _on_stream(stream, view.on.index):
            view.home.copy_(view.owner)


def _current(index: int) -> tuple[Stream, Any]:
    """Return the calling thread's current torch stream, and torch's object for it."""
    origin = torch.cuda.current_stream(index)
    return stream_of(origin.cuda_stream, "torch's current stream"), origin


def _on_stream(stream: Stream, index: int) -> AbstractContextManager[Any]:
    chosen = torch.cuda.ExternalStream(stream, index) if stream else torch.cuda.default_stream(index)
    entered: AbstractContextManager[Any] = torch.cuda.stream(chosen)
    return entered


library = TorchLibrary()
