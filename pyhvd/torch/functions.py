"""Make the ranks start alike: broadcast parameters, buffers and the state of an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from pyhvd.api import collectives
from pyhvd.api.objects import allgather_object, broadcast_object
from pyhvd.api.process_sets import ProcessSet, global_process_set
from pyhvd.api.topology import rank
from pyhvd.devices.torch_host_arrays import why_not
from pyhvd.errors import MismatchError
from pyhvd.torch.plan import Description, ParameterInfo, describe_differences

# A tensor of fewer bytes travels in a common message with others.
_SMALL = 1 << 20
# Bytes of a common message.
_MESSAGE = 32 << 20
_STATE = "broadcast_optimizer_state"


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any],
    root_rank: int = 0,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite parameters with the root's.

    Parameters
    ----------
    params : mapping, or iterable
        ``model.state_dict()``, ``model.named_parameters()``, ``model.parameters()``, or a list of tensors or
        pairs. Values of a mapping that are no tensors, are replaced in it by the root's.
    root_rank : int
        A global rank.
    process_set : ProcessSet
        The ranks that take part.

    Raises
    ------
    ValueError
        ``params`` is of another kind.
    TypeError
        A parameter is lazy, and has no shape yet.
    MismatchError
        Names, shapes or dtypes differ between the ranks; the text has all differences.
    """
    named, others = _sort_out(params)
    infos = tuple(ParameterInfo.of(name, tensor) for name, tensor in named.items())
    terms = {"values that are no tensors": ", ".join(sorted(others))}
    compare(Description(infos, (), terms, ()), "broadcast_parameters", process_set)
    _broadcast_tensors(list(named.items()), root_rank, process_set)
    if others:
        assert isinstance(params, dict)
        params.update(broadcast_object(others, root_rank, "broadcast_parameters: others", process_set))


def broadcast_buffers(
    model: torch.nn.Module, root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrite a model's buffers, such as the running means of BatchNorm, with the root's.

    Each rank's buffers follow its own batches. Call it before the model is evaluated or saved.
    """
    broadcast_parameters(dict(model.named_buffers()), root_rank, process_set)


def broadcast_optimizer_state(
    optimizer: Any,
    root_rank: int = 0,
    model: torch.nn.Module | None = None,  # noqa: ARG001 - Horovod's
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give all ranks the root's state of an optimizer, and its options such as the learning rate.

    The optimizer may be of any kind. It may have state on some ranks only, as when the root has resumed from
    a checkpoint. No rank steps. If the root has no state, parameters without gradient get zeros as gradients,
    as in Horovod.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        The optimizer, distributed or not.
    root_rank : int
        A global rank.
    model : torch.nn.Module, optional
        Has no effect.
    process_set : ProcessSet
        The ranks that take part.

    Raises
    ------
    MismatchError
        The optimizers have other numbers of parameters.
    """
    sizes = str([len(group["params"]) for group in optimizer.param_groups])
    compare(Description((), (), {"numbers of parameters": sizes}, ()), _STATE, process_set)
    here = rank() == root_rank
    tensors: list[Any] = []

    def take_out(tensor: Any) -> Any:
        tensors.append(tensor)
        return _Missing(tuple(tensor.shape), str(tensor.dtype), tensor.device.type != "cpu")

    state = _replace(optimizer.state_dict(), torch.Tensor, take_out) if here else None
    state = broadcast_object(state, root_rank, f"{_STATE}: structure", process_set)
    if not here:
        device = next((each.device for group in optimizer.param_groups for each in group["params"]), "cpu")

        def put_in(missing: _Missing) -> Any:
            tensors.append(missing.make(device))
            return tensors[-1]

        state = _replace(state, _Missing, put_in)
    numbered = [(f"{_STATE} {number}", tensor) for number, tensor in enumerate(tensors)]
    _broadcast_tensors(numbered, root_rank, process_set)
    if not here:
        optimizer.load_state_dict(state)
    if not state["state"]:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)


class _Missing(msgspec.Struct, frozen=True):
    """Stands for a tensor that follows."""

    shape: tuple[int, ...]
    dtype: str
    on_device: bool

    def make(self, device: Any) -> Any:
        dtype = getattr(torch, self.dtype.removeprefix("torch."))
        return torch.empty(self.shape, dtype=dtype, device=device if self.on_device else "cpu")


def _replace(tree: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return a copy of nested dicts, lists and tuples in which objects of one type are changed."""
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, dict):
        return {key: _replace(value, kind, change) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_replace(value, kind, change) for value in tree)
    return tree


def _sort_out(params: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors by name, each memory once; and a mapping's other values."""
    if isinstance(params, Mapping):
        pairs: list[Any] = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, (str, bytes, torch.Tensor)):
        listed = enumerate(params)
        pairs = [pair if isinstance(pair, tuple) else (str(place), pair) for place, pair in listed]
    else:
        pairs = [params]
    is_named = all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs)
    if not is_named or not (
        isinstance(params, dict) or all(isinstance(each, torch.Tensor) for _, each in pairs)
    ):
        raise ValueError(
            "broadcast_parameters takes a state_dict, named_parameters(), parameters(), or a list of tensors"
            f" or of (name, tensor), not {type(params).__name__}"
        )
    named: dict[str, Any] = {}
    seen = set()
    for name, tensor in pairs:
        if not isinstance(tensor, torch.Tensor):
            continue
        if torch.nn.parameter.is_lazy(tensor):
            raise TypeError(f"broadcast_parameters, {name!r}: {why_not(tensor)}")
        memory = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.device, tensor.dtype)
        if memory not in seen or tensor.numel() == 0:
            named[name] = tensor
        seen.add(memory)
    return named, {name: each for name, each in pairs if not isinstance(each, torch.Tensor)}


def compare(mine: Description, what: str, process_set: ProcessSet) -> list[Description]:
    """Return all ranks' descriptions, but those that have joined; raise MismatchError if they differ."""
    encoded = msgspec.msgpack.encode(mine)
    known: tuple[int, bytes] = (rank(), encoded)
    everyone = allgather_object(known, f"{what}: parameters", process_set)
    if all(each == encoded for _, each in everyone):
        return [mine] * len(everyone)
    by_rank = {number: msgspec.msgpack.decode(each, type=Description) for number, each in everyone}
    if differences := describe_differences(by_rank):
        raise MismatchError(f"{what}: the ranks differ:\n{differences}", what)
    return list(by_rank.values())


def _broadcast_tensors(named: list[tuple[str, Any]], root_rank: int, process_set: ProcessSet) -> None:
    """Broadcast tensors in place: large ones by themselves, small ones in common messages."""
    handles = []
    together: dict[Any, list[tuple[str, Any]]] = {}
    for name, tensor in named:
        plain = tensor.detach()
        if plain.nbytes >= _SMALL:
            handles.append(collectives.broadcast_async_(plain, root_rank, f"parameter {name}", process_set))
        elif plain.numel():
            together.setdefault((plain.dtype, plain.device), []).append((name, plain))
    packed = [pack for tensors in together.values() for pack in _cut(tensors)]
    flat = []
    for tensors in packed:
        memory = _flatten_dense_tensors([tensor for _, tensor in tensors])
        name = f"parameters {tensors[0][0]} ... {tensors[-1][0]} ({len(tensors)})"
        handles.append(collectives.broadcast_async_(memory, root_rank, name, process_set))
        flat.append(memory)
    for handle in handles:
        handle.result()
    if rank() == root_rank:
        return
    for tensors, memory in zip(packed, flat, strict=True):
        own = [tensor for _, tensor in tensors]
        torch._foreach_copy_(own, _unflatten_dense_tensors(memory, own))


def _cut(tensors: list[tuple[str, Any]]) -> Iterable[list[tuple[str, Any]]]:
    """Cut a list of tensors of one dtype into the contents of messages."""
    pack: list[tuple[str, Any]] = []
    size = 0
    for name, tensor in tensors:
        if pack and size + tensor.nbytes > _MESSAGE:
            yield pack
            pack, size = [], 0
        pack.append((name, tensor))
        size += tensor.nbytes
    if pack:
        yield pack
