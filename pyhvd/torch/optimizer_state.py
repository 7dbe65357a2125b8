"""The whole state of an optimizer: taken from one, put into another, and pickled apart from its tensors.

torch's ``load_state_dict`` casts all state but "step" to the dtype of its parameter, and replaces tensors.
:func:`put` gives an optimizer exactly the tensors that :func:`take` has found, in those that it has already.
"""

from __future__ import annotations

import io
import pickle
from collections import deque
from typing import Any

import cloudpickle
import msgspec
import torch

from pyhvd.devices import torch_pickles
from pyhvd.devices.torch_host_arrays import layout_of

# Of a group of parameters, no options: the parameters themselves, and their names.
_FIXED = ("params", "param_names")


def take(optimizer: Any) -> dict[str, Any]:
    """Return the whole state of an optimizer; it shares the memory of the optimizer's tensors.

    It has the optimizer's ``state_dict()``, which hooks may have changed. Beside it are the state of each
    parameter, by the parameter's place, and the options of each group, as the optimizer has them.
    """
    saved = optimizer.state_dict()
    places = {id(each): place for place, each in reversed([*enumerate(parameters_of(optimizer))])}
    state = {places[id(key)]: value for key, value in _state_of(optimizer).items() if id(key) in places}
    return {"state_dict": saved, "state": state, "options": options_of(optimizer)}


def put(optimizer: Any, taken: dict[str, Any]) -> None:
    """Load what :func:`take` has returned, which must not be used afterwards.

    ``load_state_dict`` is called, with its hooks. Afterwards the state and the options are those of the other
    optimizer, bit by bit. Tensors of the same dtype, shape and device stay, and are overwritten.

    A plain ``state_dict`` is loaded as torch does it.
    """
    if "state_dict" not in taken:
        optimizer.load_state_dict(taken)
        return
    parameters = parameters_of(optimizer)
    before, options = dict(_state_of(optimizer)), options_of(optimizer)
    optimizer.load_state_dict(taken["state_dict"])
    state, filled = _state_of(optimizer), dict[int, Any]()
    for place, parameter in enumerate(parameters):
        if place in taken["state"]:
            state[parameter] = _fill(before.get(parameter), taken["state"][place], filled)
        else:
            state.pop(parameter, None)
    put_options(optimizer, taken["options"], options)


def options_of(optimizer: Any) -> list[dict[str, Any]]:
    """Return the options of each group of parameters, such as the learning rate."""
    return [{name: group[name] for name in group if name not in _FIXED} for group in optimizer.param_groups]


def put_options(optimizer: Any, options: list[dict[str, Any]], own: list[dict[str, Any]]) -> None:
    """Give each group of parameters its options; own tensors stay, as a CUDA graph may refer to them."""
    filled: dict[int, Any] = {}
    for group, given, known in zip(optimizer.param_groups, options, own, strict=True):
        group.update({name: _fill(known.get(name), each, filled) for name, each in given.items()})


def parameters_of(optimizer: Any) -> list[Any]:
    """Return the parameters of all groups, in order."""
    return [each for group in optimizer.param_groups for each in group["params"]]


def _state_of(optimizer: Any) -> Any:
    """Return an optimizer's mapping of parameters to their state; other kinds of optimizers may have none."""
    return getattr(optimizer, "state", {})


def _fill(own: Any, given: Any, filled: dict[int, Any]) -> Any:
    """Return the given state, with own tensors in place of those whose dtype, shape and device they have.

    ``filled`` has the given tensor of each own tensor, by address: none is filled twice.
    """
    if isinstance(given, torch.Tensor):
        if not _can_hold(own, given) or filled.setdefault(own.data_ptr(), given) is not given:
            return given
        with torch.no_grad():
            return own.copy_(given)
    if isinstance(given, dict):
        known = own if isinstance(own, dict) else {}
        given.update({key: _fill(known.get(key), each, filled) for key, each in given.items()})
    elif isinstance(given, (list, deque)):
        for index, each in enumerate(_beside(own, given)):
            given[index] = _fill(each, given[index], filled)
    elif type(given) is tuple:
        pairs = zip(_beside(own, given), given, strict=True)
        return tuple(_fill(known, each, filled) for known, each in pairs)
    return given


def _beside(own: Any, given: Any) -> list[Any]:
    """Return the items of an own sequence of the same length; None for each if it is no such sequence."""
    is_alike = type(own) is type(given) and len(own) == len(given)
    return list(own) if is_alike else [None] * len(given)


def _can_hold(own: Any, given: Any) -> bool:
    """Return whether a tensor can be overwritten by another, and is then equal to it."""
    return (
        type(own) is type(given)
        and has_memory(own)
        and (own.dtype, own.shape, own.device) == (given.dtype, given.shape, given.device)
        and not own.is_inference()
        and not any(
            extent > 1 and stride == 0 for extent, stride in zip(own.shape, own.stride(), strict=True)
        )
    )


def has_memory(tensor: Any) -> bool:
    """Return whether a tensor is no more than a dtype, a shape, a device and dense bytes."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_nested or tensor.is_meta)
        and not (tensor.is_conj() or tensor.is_neg())
        and not vars(tensor)
    )


# -- pickles -------------------------------------------------------------------------------------------


class Missing(msgspec.Struct, frozen=True):
    """Stands for a tensor that follows."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    on_device: bool

    @classmethod
    def of(cls, tensor: Any) -> Missing:
        """Return what is known of a dense tensor."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(tuple(tensor.shape), tensor.stride(), dtype, tensor.device.type != "cpu")

    def make(self, device: Any) -> Any:
        """Return a tensor that lies in memory as the other does; ``device`` is where those of a GPU come."""
        where = device if self.on_device else "cpu"
        return torch.empty_strided(self.shape, self.strides, dtype=getattr(torch, self.dtype), device=where)


def dump(state: Any, parameters: list[Any]) -> tuple[bytes, list[Any]]:
    """Return the pickle of a state, which refers to parameters by their places, and its tensors.

    Tensors that are not plain are pickled by torch.
    """
    file = io.BytesIO()
    pickler = _OptimizerPickler(file, parameters)
    pickler.dump(state)
    return file.getvalue(), pickler.tensors


def load(data: bytes, parameters: list[Any], tensors: list[Any]) -> Any:
    """Return the state of such a pickle, with other parameters and tensors."""
    return _OptimizerUnpickler(io.BytesIO(data), {"parameter": parameters, "tensor": tensors}).load()


class _OptimizerPickler(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO, parameters: list[Any]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Any] = []
        self._alive: list[Any] = []  # so that no other tensor gets the id of one that was seen
        self._known = {id(each): ("parameter", place) for place, each in enumerate(parameters)}

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and id(obj) not in self._known and has_memory(obj):
            is_dense = obj.is_contiguous() or layout_of(obj.shape, obj.stride())
            self._known[id(obj)] = "tensor", len(self.tensors)
            self._alive.append(obj)
            self.tensors.append(obj if is_dense else obj.contiguous())
        return self._known.get(id(obj)) if isinstance(obj, torch.Tensor) else None


class _OptimizerUnpickler(torch_pickles.Unpickler):
    def __init__(self, file: io.BytesIO, found: dict[str, list[Any]]) -> None:
        super().__init__(file)
        self._found = found

    def persistent_load(self, pid: Any) -> Any:
        kind, number = pid
        return self._found[kind][number]
