"""Take and return torch's tensors in host memory. The first such tensor imports this module.

A tensor of dense memory is not copied. Its dimensions may lie in memory in another order, as those of
``channels_last``; then the view has a layout. Other tensors, such as slices and expanded ones, go by way of a
copy. Results have no autograd history.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pyhvd.arrays import TensorView, new_array
from pyhvd.devices.torch_tensors import check, note_changes, why_no_memory
from pyhvd.dtypes import BY_CODE, Code, DtypeInfo, named
from pyhvd.errors import UnsupportedDtypeError
from pyhvd.native.shared_memory import POOL_LEAST, know_tensor_types


class TorchHostLibrary:
    """Takes and returns ``torch.Tensor``; see :class:`pyhvd.devices.array_libraries.HostAdopter`."""

    def adopt(self, tensor: Any, *, writing: bool, any_layout: bool) -> TensorView:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"expected a tensor, not {type(tensor).__module__}.{type(tensor).__qualname__}")
        if why := _why_not_here(tensor):
            raise TypeError(why)
        check(tensor, writing=writing)
        mine = tensor.detach()
        plain = mine.resolve_conj().resolve_neg()
        layout = layout_of(plain.shape, plain.stride()) if any_layout else ""
        if not layout:
            try:
                plain = plain.contiguous()
            except RuntimeError as exc:
                raise MemoryError(str(exc)) from exc
        home = None if plain.data_ptr() == mine.data_ptr() else mine
        return self._view_of(plain, layout, home)

    def empty_like(self, view: TensorView, shape: tuple[int, ...]) -> TensorView:
        return self._view_of(_make_empty(shape, view.owner.dtype, view.layout), view.layout)

    def give(self, view: TensorView) -> Any:
        return view.owner

    # -- for the fast path: see pyhvd.native.shared_memory.TensorLibrary --------------------------------

    def describe(self, tensor: Any) -> tuple[int, int, tuple[int, ...], tuple[int, ...]] | None:
        if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_nested:
            return None
        try:
            info, address = _info_of(tensor), tensor.data_ptr()
        except (RuntimeError, UnsupportedDtypeError):
            return None
        if not info.ops:  # its code is another dtype's
            return None
        return address, int(info.code), tuple(tensor.shape), tensor.stride()

    def make_like(self, tensor: Any, layout: str) -> Any:
        made = _make_empty(tensor.shape, tensor.dtype, layout)
        return None if torch._C._are_functorch_transforms_active() else made

    note_changes = staticmethod(note_changes)
    forward_mode = vars(torch.autograd.forward_ad)

    # ---------------------------------------------------------------------------------------------------

    def _view_of(self, owner: Any, layout: str, home: Any = None) -> TensorView:
        info = _info_of(owner)
        in_memory = owner.permute(_order(layout)) if layout else owner
        if info.code == Code.BFLOAT16:
            in_memory = in_memory.view(torch.int16)
        elif not info.ops:
            in_memory = in_memory.view(getattr(torch, BY_CODE[info.code].name))
        return TensorView(_as_array(in_memory), info, home, library=self, owner=owner, layout=layout)


class _TensorMemory:
    """A tensor's memory, as NumPy takes it. ``Tensor.numpy()`` would forbid ``resize_()`` on the storage."""

    def __init__(self, tensor: Any, dtype: np.dtype[Any]) -> None:
        self.tensor = tensor
        self.__array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": dtype.str,
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def _as_array(tensor: Any) -> np.ndarray[Any, Any]:
    """Return a contiguous tensor's memory as an array, which keeps the tensor."""
    dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))
    if not tensor.numel():
        return np.empty(tuple(tensor.shape), dtype)
    return np.asarray(_TensorMemory(tensor, dtype))


def layout_of(shape: Sequence[int], strides: Sequence[int]) -> str:
    """Return the order of a tensor's dimensions in memory; empty if it is row-major, or has gaps.

    Dimensions of length 1 come first. So tensors of one shape have the same layout if, and only if, equal
    indices lead to equal offsets.
    """
    long = sorted((d for d, extent in enumerate(shape) if extent > 1), key=lambda d: -strides[d])
    step = 1
    for d in reversed(long):
        if strides[d] != step:
            return ""
        step *= shape[d]
    if long == sorted(long) or 0 in shape:
        return ""
    short = [d for d, extent in enumerate(shape) if extent == 1]
    return ",".join(map(str, short + long))


def _info_of(tensor: torch.Tensor) -> DtypeInfo:
    return named(str(tensor.dtype).removeprefix("torch."))


def _order(layout: str) -> list[int]:
    return [int(d) for d in layout.split(",")]


def _make_empty(shape: Sequence[int], dtype: torch.dtype, layout: str) -> torch.Tensor:
    """Return a new tensor; raise MemoryError if there is no memory for it.

    A large one has the pool's memory, as in ``native/tensors.pxi``: its storage has the tensor's bytes, and
    cannot grow.
    """
    order = _order(layout) if layout else list(range(len(shape)))
    extents = [shape[d] for d in order]
    nbytes = math.prod(shape) * dtype.itemsize
    try:
        if nbytes < POOL_LEAST:
            in_memory = torch.empty(extents, dtype=dtype, device="cpu")
        else:
            memory = torch.from_numpy(new_array((nbytes,), np.dtype(np.uint8))).untyped_storage()
            # Not a view, on which torch allows less.
            in_memory = torch.empty(0, dtype=dtype, device="cpu").set_(memory, 0, extents)
        return in_memory.permute([order.index(d) for d in range(len(order))]) if layout else in_memory
    except RuntimeError as exc:
        raise MemoryError(str(exc)) from exc


def why_not(tensor: Any) -> str:
    """Return why a tensor cannot be sent from host memory, and the remedy; empty if it can."""
    return why_no_memory(tensor) or _why_not_here(tensor)


def _why_not_here(tensor: Any) -> str:
    is_elsewhere = tensor.device.type not in ("cpu", "meta")
    return f"pyhvd cannot use memory of the device {tensor.device}: pass tensor.cpu()" if is_elsewhere else ""


library = TorchHostLibrary()
know_tensor_types(
    (torch.Tensor, torch.nn.Parameter), getattr(torch.Tensor, "__dlpack_c_exchange_api__", None), library
)
