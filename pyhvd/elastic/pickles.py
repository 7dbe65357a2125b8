"""A state as arrays, whose bytes are copied once, and one pickle of all the rest.

Arrays and tensors that share all their memory share it again after :func:`load`. Those that overlap only in
part are separate then.
"""

from __future__ import annotations

import io
import pickle
import sys
import types
from typing import Any

import cloudpickle
import numpy as np


def dump(state: Any) -> tuple[list[Any], bytes]:
    """Return the arrays and tensors of a state, and the pickle of the rest.

    Arrays are of shape (n,) and dtype uint8. They share the memory of contiguous arrays of the state, which
    must not change before they are copied.

    Raises
    ------
    TypeError
        Something in the state cannot be pickled.
    """
    file, arrays = io.BytesIO(), list[Any]()
    try:
        _StatePickler(file, arrays).dump(state)
    except MemoryError:
        raise
    except Exception as exc:
        raise TypeError(f"{type(exc).__name__}: {exc}") from exc
    return arrays, file.getvalue()


def load(arrays: list[Any], rest: bytes) -> Any:
    """Return a state that owns copies of the arrays; tensors of a GPU come to the current GPU."""
    return _StateUnpickler(io.BytesIO(rest), arrays).load()


class _StatePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Collects arrays and tensors.

    The pickle has a tuple for each, whose last item is its place in the list.
    """

    def __init__(self, file: io.BytesIO, arrays: list[Any]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._arrays = arrays
        self._numbers: dict[Any, int] = {}  # by memory
        self._alive: list[Any] = []  # so that no other object gets the memory of one that was seen
        self._torch = sys.modules.get("torch")

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is np.ndarray and not obj.dtype.hasobject and obj.dtype.itemsize:
            has_no_gaps = obj.flags.c_contiguous
            axes, lying = (None, obj) if has_no_gaps else _lying(obj, obj.strides, obj.transpose)
            address = lying.__array_interface__["data"][0]  # faster than ctypes.data
            number = self._number(
                obj, lying, address, "cpu", has_no_gaps=has_no_gaps or lying.flags.c_contiguous
            )
            return "array", obj.dtype, lying.shape, axes, number
        if self._torch is not None and _is_plain_tensor(self._torch, obj):
            flat = obj.detach().resolve_conj().resolve_neg()
            axes, lying = _lying(flat, flat.stride(), flat.permute)
            number = self._number(
                obj, lying, lying.data_ptr(), str(obj.device), has_no_gaps=lying.is_contiguous()
            )
            needs_grad = obj.requires_grad and obj.is_leaf
            dtype = str(obj.dtype).removeprefix("torch.")
            kind = "parameter" if isinstance(obj, self._torch.nn.Parameter) else "tensor"
            return kind, dtype, tuple(lying.shape), axes, obj.device.type, needs_grad, number
        return None

    def reducer_override(self, obj: Any) -> Any:
        """Pickle classes and functions of the program by name: the next generation runs the same program.

        cloudpickle would send them by value. An object would then be no instance of the program's own class.
        """
        if isinstance(obj, (type, types.FunctionType)) and obj.__module__ == "__main__" and _is_found(obj):
            return NotImplemented
        return super().reducer_override(obj)

    def _number(self, obj: Any, lying: Any, address: int, device: str, *, has_no_gaps: bool) -> int:
        """Return the place of an array's bytes in the list."""
        key = (address, lying.nbytes, device) if has_no_gaps and lying.nbytes else id(obj)
        if key not in self._numbers:
            self._numbers[key] = len(self._arrays)
            self._alive += obj, lying
            self._arrays.append(_bytes_of(lying))
        return self._numbers[key]


class _StateUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, arrays: list[Any]) -> None:
        super().__init__(file)
        self._arrays = arrays
        self._copies: dict[Any, Any] = {}  # by place and device
        self._loaded: dict[Any, Any] = {}

    def persistent_load(self, pid: Any) -> Any:
        if pid not in self._loaded:
            self._loaded[pid] = self._array(*pid[1:]) if pid[0] == "array" else self._tensor(pid)
        return self._loaded[pid]

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            from pyhvd.devices.torch_pickles import load_storage

            return load_storage
        return super().find_class(module, name)

    def _copy(self, number: int) -> Any:
        if (number, "cpu") not in self._copies:
            self._copies[number, "cpu"] = np.array(self._arrays[number])
        return self._copies[number, "cpu"]

    def _array(self, dtype: Any, shape: Any, axes: Any, number: int) -> Any:
        made = self._copy(number).view(dtype).reshape(shape)
        return made.transpose(np.argsort(axes)) if axes else made

    def _tensor(self, pid: tuple[Any, ...]) -> Any:
        import torch

        kind, dtype, shape, axes, device, needs_grad, number = pid
        flat = torch.from_numpy(self._copy(number))
        if device != "cpu" and (device != "cuda" or torch.cuda.is_available()):
            if (number, device) not in self._copies:
                self._copies[number, device] = flat.to(device)
            flat = self._copies[number, device]
        made = flat.view(getattr(torch, dtype)).reshape(shape)
        if axes:
            made = made.permute(tuple(np.argsort(axes).tolist()))
        if kind == "parameter":
            return torch.nn.Parameter(made, needs_grad)
        return made.requires_grad_() if needs_grad else made


def _is_found(obj: Any) -> bool:
    """Return whether the program has this object under its name."""
    found: Any = sys.modules.get("__main__")
    for part in obj.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is obj


def _is_plain_tensor(torch: Any, obj: Any) -> bool:
    """Return whether a tensor has no more than dtype, shape, device and bytes; torch pickles all others."""
    return (
        type(obj) in (torch.Tensor, torch.nn.Parameter)
        and obj.layout is torch.strided
        and obj.numel()
        and not obj.is_quantized
        and obj.device.type != "meta"
        and not vars(obj)
    )


def _lying(array: Any, strides: Any, transpose: Any) -> tuple[Any, Any]:
    """Return the axes in the order in which they lie in memory, and the array with that order.

    None stands for the array's own order.
    """
    axes = tuple(sorted(range(len(strides)), key=lambda axis: -strides[axis]))
    return (None, array) if axes == tuple(range(len(axes))) else (axes, transpose(axes))


def _bytes_of(array: Any) -> Any:
    """Return the memory of an array or tensor as a flat array of bytes; of a copy if it has gaps."""
    if type(array) is np.ndarray:
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    import torch

    return array.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
