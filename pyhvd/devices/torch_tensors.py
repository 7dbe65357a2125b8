"""Which of torch's tensors have memory that can be sent, on any device; and how autograd learns of writes."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from pyhvd.devices.base import refuse_overlap


def _increment_each(tensors: list[Any]) -> None:
    for tensor in tensors:
        torch.autograd.graph.increment_version(tensor)


# Tells autograd that tensors are written: a backward pass that has saved one raises an error.
note_changes = _increment_each
if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 5):
    note_changes = torch._C._increment_version


def check(tensor: Any, *, writing: bool) -> None:
    """Raise an error if a tensor cannot be sent, or with ``writing`` not be changed; then it is changed."""
    if why := why_no_memory(tensor):
        raise TypeError(why)
    if writing:
        refuse_overlap(tensor.shape, tensor.stride())
        if tensor.requires_grad and not tensor.is_leaf:
            raise RuntimeError(
                "an in-place operation would change a tensor that autograd has recorded: pass"
                " tensor.detach(), or call the operation without the trailing underscore"
            )
        note_changes([tensor])


def why_no_memory(tensor: Any) -> str:
    """Return why a tensor has no memory that can be sent, and the remedy; empty if it has."""
    return _why_of_kind(tensor) or _why_of_transform(tensor) or _why_of_memory(tensor)


def _why_of_kind(tensor: Any) -> str:
    kind = type(tensor)
    if torch.nn.parameter.is_lazy(tensor):
        return "this parameter has no shape yet: pass one batch through the model first"
    if kind.__name__ == "DTensor":
        return "a DTensor is spread over ranks: pass tensor.to_local(), or tensor.full_tensor()"
    if tensor.is_nested:
        return "a nested tensor has no shape: pass the tensors of tensor.unbind() to a grouped operation"
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"a {kind.__name__} has no plain memory: pass a torch.Tensor"
    return ""


def _why_of_transform(tensor: Any) -> str:
    """Return why a tensor cannot be sent where torch differentiates or batches functions."""
    if torch._C._are_functorch_transforms_active():
        return (
            "in a transform of torch.func, such as grad or vmap, tensors have no memory: call it outside, or"
            " differentiate by torch.autograd.grad"
        )
    if torch._C._functorch.is_legacy_batchedtensor(tensor):
        return "a tensor of several gradients has no memory: pass vectorize=False, or is_grads_batched=False"
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        return (
            "a dual tensor would lose its tangent: pass both parts of forward_ad.unpack_dual(tensor) to a"
            " grouped operation"
        )
    return ""


def _why_of_memory(tensor: Any) -> str:
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout} has no dense memory: pass tensor.to_dense()"
    if tensor.is_meta:
        return f"pyhvd cannot use memory of the device {tensor.device}: make it on a device with memory"
    if tensor.is_quantized:
        return "a quantized tensor cannot be sent: pass tensor.dequantize()"
    try:
        has_memory = tensor.numel() == 0 or tensor.data_ptr() != 0
    except RuntimeError:  # it has no storage
        has_memory = False
    return "" if has_memory else "this tensor has no memory of its own: pass tensor.clone(), or its contents"
