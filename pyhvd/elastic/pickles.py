"""A state as arrays, which are copied as they lie, and one pickle of all the rest."""

from __future__ import annotations

import io
import pickle
from typing import Any

import cloudpickle
import numpy as np


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Collects arrays and tensors; in the pickle stands the place of each in the list."""

    def __init__(self, file: io.BytesIO, arrays: list[Any]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._arrays = arrays
        self._places: dict[int, tuple[Any, Any]] = {}  # with the object, so that its id stays its own

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is np.ndarray and not obj.dtype.hasobject:
            parts = ("array", obj.dtype, obj.shape), obj
        elif _is_tensor(obj):
            parts = ("tensor", str(obj.dtype).removeprefix("torch."), tuple(obj.shape), obj.device.type), obj
        else:
            return None
        known = self._places.get(id(obj))
        if known is None:
            known = self._places[id(obj)] = (*parts[0], len(self._arrays)), obj
            self._arrays.append(_bytes_of(obj))
        return known[0]


def dump(state: Any) -> tuple[list[Any], bytes]:
    """Return the arrays and tensors of a state, as arrays that share their memory, and its pickle.

    Raises
    ------
    TypeError
        Something in the state cannot be pickled.
    """
    file, arrays = io.BytesIO(), list[Any]()
    try:
        _Pickler(file, arrays).dump(state)
    except Exception as exc:
        raise TypeError(f"this state cannot be committed: {exc}") from exc
    return arrays, file.getvalue()


def load(arrays: list[Any], rest: bytes) -> Any:
    """Return a state that owns copies of the arrays."""
    return _Unpickler(io.BytesIO(rest), arrays).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, arrays: list[Any]) -> None:
        super().__init__(file)
        self._arrays = arrays
        self._loaded: dict[int, Any] = {}

    def persistent_load(self, place: Any) -> Any:
        number = place[-1]
        if number not in self._loaded:
            data = np.array(self._arrays[number])  # a copy: the memory is the vault's
            self._loaded[number] = _tensor(place, data) if place[0] == "tensor" else _array(place, data)
        return self._loaded[number]


def _is_tensor(obj: Any) -> bool:
    import sys

    torch = sys.modules.get("torch")
    return (
        torch is not None and type(obj) in (torch.Tensor, torch.nn.Parameter) and obj.layout is torch.strided
    )


def _bytes_of(obj: Any) -> Any:
    """Return the memory of an array, or of a tensor, as a flat array of bytes; of a copy if it has gaps."""
    if type(obj) is np.ndarray:
        return np.ascontiguousarray(obj).reshape(-1).view(np.uint8)
    import torch

    flat = obj.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()


def _array(place: Any, data: Any) -> Any:
    _, dtype, shape, _ = place
    return data.view(dtype).reshape(shape)


def _tensor(place: Any, data: Any) -> Any:
    import torch

    _, dtype, shape, device, _ = place
    made = torch.from_numpy(data).view(getattr(torch, dtype)).reshape(shape)
    return made.to(device) if device != "cpu" else made
