"""A fake of the parts of torch that pyhvd uses, over the device of :mod:`tests.devices.fake`.

Names and signatures are those of torch 2.13. Tensors are contiguous.
"""

from __future__ import annotations

import contextlib
import types
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pyhvd.devices.base import Memory, Stream
from tests.devices.fake import FakeArray, FakeDevice


class Block:
    """Memory of torch's pool; the pool reuses it after the streams of its record_stream() calls."""

    def __init__(self, device: FakeDevice, nbytes: int) -> None:
        self.device, self._stream = device, device.current_stream()
        self._memory = device.allocate(nbytes, self._stream)
        self.ptr = self._memory.ptr
        self.recorded: list[Stream] = []

    def __del__(self) -> None:
        for stream in self.recorded:
            self.device.wait(self._stream, self.device.mark(stream))


@dataclass(frozen=True)
class Dtype:
    """torch's dtype."""

    name: str

    def __str__(self) -> str:
        return f"torch.{self.name}"


class Tensor:
    """torch's tensor on a CUDA device."""

    __module__ = "torch"
    is_cuda = is_leaf = True
    requires_grad = is_nested = is_meta = is_quantized = False
    layout = "strided"
    __torch_dispatch__ = None

    def __init__(self, device: FakeDevice, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        self._block = Block(device, nbytes)
        self.inner = FakeArray(device, Memory(self._block.ptr, nbytes, self._block), shape, dtype)
        self.shape, self.dtype = shape, Dtype(np.dtype(dtype).name)
        self.device = types.SimpleNamespace(index=device.index)

    def numel(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    def data_ptr(self) -> int:
        return self.inner.ptr

    def stride(self) -> tuple[int, ...]:
        steps = np.empty(self.shape, self.inner.dtype).strides
        return tuple(step // self.inner.dtype.itemsize for step in steps)

    def record_stream(self, stream: Any) -> None:
        self._block.recorded.append(stream.cuda_stream)

    def detach(self) -> Tensor:
        return self

    def to(self, dtype: Dtype) -> Tensor:
        made = Tensor(self._block.device, self.shape, dtype.name)
        made.inner = self.inner.astype(dtype.name)
        return made

    def half(self) -> Tensor:
        return self.to(Dtype("float16"))

    resolve_conj = resolve_neg = contiguous = detach


def make_torch(fake: FakeDevice) -> types.ModuleType:
    """Return a module ``torch`` whose only CUDA device, number 0, is the fake device."""

    def stream_object(stream: Stream) -> Any:
        return types.SimpleNamespace(cuda_stream=stream)

    def empty(shape: tuple[int, ...], *, dtype: Dtype, device: str) -> Tensor:
        assert device == fake.name
        return Tensor(fake, shape, dtype.name)

    @contextlib.contextmanager
    def entered(stream: Any) -> Any:
        with fake.using(stream.cuda_stream):
            yield

    autograd: Any = types.ModuleType("torch.autograd")
    autograd.forward_ad = types.SimpleNamespace(_current_level=-1)
    torch: Any = types.ModuleType("torch")
    vars(torch).update(
        Tensor=Tensor,
        empty=empty,
        strided="strided",
        __version__="2.13.0",
        written=[],
        nn=types.SimpleNamespace(parameter=types.SimpleNamespace(is_lazy=lambda _: False)),
        autograd=autograd,
        OutOfMemoryError=type("OutOfMemoryError", (RuntimeError,), {}),
        cuda=types.SimpleNamespace(
            current_stream=lambda index: stream_object(fake.current_stream()),
            default_stream=lambda index: stream_object(0),
            ExternalStream=lambda stream, index: stream_object(stream),
            stream=entered,
        ),
    )
    torch._C = types.SimpleNamespace(
        _are_functorch_transforms_active=lambda: False,
        _functorch=types.SimpleNamespace(is_legacy_batchedtensor=lambda _: False),
        _increment_version=torch.written.extend,
        DisableTorchFunctionSubclass=contextlib.nullcontext,
    )
    module: types.ModuleType = torch
    return module
