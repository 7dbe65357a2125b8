"""Make the ranks start alike: broadcast parameters, buffers and the state of an optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from pyhvd.api import collectives
from pyhvd.api.call import refusing
from pyhvd.api.objects import allgather_bytes, allgather_object as allgather_object, broadcast_object
from pyhvd.api.process_sets import ProcessSet, global_process_set
from pyhvd.api.topology import rank
from pyhvd.devices.torch_tensors import why_no_memory
from pyhvd.engine import context
from pyhvd.errors import MismatchError
from pyhvd.negotiation.messages import RequestType
from pyhvd.torch.optimizer_state import Missing, dump, load, parameters_of, put, take
from pyhvd.torch.plan import Description, ParameterInfo, describe_differences

# A tensor of fewer bytes travels in a common message with others.
_SMALL = 1 << 20
# Bytes of a common message.
_MESSAGE = 32 << 20
_STATE = "broadcast_optimizer_state"
# Made here: with ranks as threads, several first uses at once may crash msgspec.
_from_rank = msgspec.msgpack.Decoder(tuple[int, bytes])
_description = msgspec.msgpack.Decoder(Description)


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
        A parameter has no memory: it is lazy, a DTensor, or on the device meta.
    MismatchError
        Names, shapes or dtypes differ between the ranks; the text has all differences.
    """
    named, others = _sort_out(params, process_set)
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
    a checkpoint. The other ranks call its ``load_state_dict``. Afterwards they have the root's state, bit by
    bit; their own tensors of the same dtype and shape stay, and are overwritten. No rank steps. If the root
    has no state, parameters without gradient get zeros as gradients, as in Horovod.

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
    parameters, name = parameters_of(optimizer), f"{_STATE}: structure"
    taken: dict[str, Any] = {}
    if here := rank() == root_rank:
        # The other ranks wait for the first message of broadcast_object.
        with refusing(RequestType.BROADCAST, f"{name}.sz", process_set):
            taken = take(optimizer)
            data, tensors = dump(taken, parameters)
        broadcast_object((data, [Missing.of(each) for each in tensors]), root_rank, name, process_set)
    else:
        data, missing = broadcast_object(None, root_rank, name, process_set)
        device = next((each.device for each in parameters if each.device.type != "cpu"), "cpu")
        tensors = [each.make(device) for each in missing]
    numbered = [(f"{_STATE} {number}", tensor) for number, tensor in enumerate(tensors)]
    _broadcast_tensors(numbered, root_rank, process_set)
    if not here:
        taken = load(data, parameters, tensors)
        put(optimizer, taken)
    if not taken["state"]:
        for parameter in parameters:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def _sort_out(params: Any, process_set: ProcessSet) -> tuple[dict[str, Any], dict[str, Any]]:
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
        if why := why_no_memory(tensor):
            # The other ranks wait for the first message of compare().
            with refusing(RequestType.ALLGATHER, "broadcast_parameters: parameters.sz", process_set):
                raise TypeError(f"broadcast_parameters, {name!r}: {why}")
        memory = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.device, tensor.dtype)
        if memory not in seen or tensor.numel() == 0:
            named[name] = tensor
        seen.add(memory)
    return named, {name: each for name, each in pairs if not isinstance(each, torch.Tensor)}


def compare(mine: Description, what: str, process_set: ProcessSet) -> list[Description]:
    """Return all ranks' descriptions, but those that have joined; raise MismatchError if they differ."""
    encoded = msgspec.msgpack.encode(mine)
    known = msgspec.msgpack.encode((context.current().topology.rank, encoded))
    gathered = allgather_bytes(known, f"{what}: parameters", process_set)
    everyone = [_from_rank.decode(each) for each in gathered]
    if all(each == encoded for _, each in everyone):
        return [mine] * len(everyone)
    by_rank = {number: _description.decode(each) for number, each in everyone}
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
