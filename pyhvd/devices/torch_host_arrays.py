"""Take and return torch's tensors in host memory. The first such tensor imports this module.

A tensor of dense memory is not copied. Its dimensions may lie in memory in another order, as those of
``channels_last``; then the view has a layout. Other tensors, such as slices and expanded ones, go by way of a
copy. Results have no autograd history.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pyhvd.arrays import TensorView
from pyhvd.devices.base import refuse_overlap
from pyhvd.dtypes import BY_CODE, Code, DtypeInfo, named
from pyhvd.errors import UnsupportedDtypeError
from pyhvd.native.shared_memory import know_tensor_types


def _increment_each(tensors: list[Any]) -> None:
    for tensor in tensors:
        torch.autograd.graph.increment_version(tensor)


# Tells autograd that tensors are written: a backward pass that has saved one raises an error.
_increment_versions = _increment_each
if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 5):
    _increment_versions = torch._C._increment_version


class TorchHostLibrary:
    """Takes and returns ``torch.Tensor``; see :class:`pyhvd.devices.array_libraries.HostAdopter`."""

    def adopt(self, tensor: Any, *, writing: bool, any_layout: bool) -> TensorView:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"expected a tensor, not {type(tensor).__module__}.{type(tensor).__qualname__}")
        if why := why_not(tensor):
            raise TypeError(why)
        if writing:
            refuse_overlap(tensor.shape, tensor.stride())
            if tensor.requires_grad and not tensor.is_leaf:
                raise RuntimeError(
                    "an in-place operation would change a tensor that autograd has recorded: pass"
                    " tensor.detach(), or call the operation without the trailing underscore"
                )
            self.note_changes([tensor])
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
        if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_conj():
            return None
        try:
            info = _info_of(tensor)
        except UnsupportedDtypeError:
            return None
        if not info.ops:  # its code is another dtype's
            return None
        return tensor.data_ptr(), int(info.code), tuple(tensor.shape), tensor.stride()

    def make_like(self, tensor: Any, layout: str) -> Any:
        return _make_empty(tensor.shape, tensor.dtype, layout)

    note_changes = staticmethod(_increment_versions)

    # ---------------------------------------------------------------------------------------------------

    def _view_of(self, owner: Any, layout: str, home: Any = None) -> TensorView:
        info = _info_of(owner)
        in_memory = owner.permute(_order(layout)) if layout else owner
        if info.code == Code.BFLOAT16:
            in_memory = in_memory.view(torch.int16)
        elif not info.ops:
            in_memory = in_memory.view(getattr(torch, BY_CODE[info.code].name))
        return TensorView(in_memory.numpy(), info, home, library=self, owner=owner, layout=layout)


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
    """Return a new tensor; raise MemoryError if there is no memory for it."""
    try:
        if not layout:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        order = _order(layout)
        in_memory = torch.empty([shape[d] for d in order], dtype=dtype, device="cpu")
        return in_memory.permute([order.index(d) for d in range(len(order))])
    except RuntimeError as exc:
        raise MemoryError(str(exc)) from exc


def why_not(tensor: torch.Tensor) -> str:
    """Return why a tensor has no memory that can be sent, and the remedy; empty if it has."""
    kind = type(tensor)
    if torch.nn.parameter.is_lazy(tensor):
        return "this parameter has no shape yet: pass one batch through the model first"
    if kind.__name__ == "DTensor":
        return "a DTensor is spread over ranks: pass tensor.to_local(), or tensor.full_tensor()"
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"a {kind.__name__} has no plain memory: pass a torch.Tensor"
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "in a transform of torch.func, such as vmap, tensors have no memory: call it outside"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout} has no dense memory: pass tensor.to_dense()"
    if tensor.device.type != "cpu":
        remedy = "make it on a device with memory" if tensor.is_meta else "pass tensor.cpu()"
        return f"pyhvd cannot use memory of the device {tensor.device}: {remedy}"
    if tensor.is_quantized:
        return "a quantized tensor cannot be sent: pass tensor.dequantize()"
    return ""


library = TorchHostLibrary()
know_tensor_types(
    (torch.Tensor, torch.nn.Parameter), getattr(torch.Tensor, "__dlpack_c_exchange_api__", None), library
)
