"""What the ranks agree on before they reduce gradients: the same parameters, in the same buckets. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pyhvd.common.text import describe_values
from pyhvd.devices.torch_host_arrays import layout_of


class ParameterInfo(msgspec.Struct, frozen=True, gc=False):
    """One parameter, as one rank has it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: str
    device: str
    nbytes: int
    trainable: bool
    sparse: bool
    """Whether this rank has seen a sparse gradient, which is reduced by its rows."""

    @classmethod
    def of(cls, name: str, tensor: Any, *, trainable: bool = True, sparse: bool = False) -> ParameterInfo:
        """Return the description of a tensor."""
        layout = "" if tensor.is_contiguous() else layout_of(tensor.shape, tensor.stride())
        dtype, device = str(tensor.dtype), tensor.device.type
        return cls(name, tuple(tensor.shape), dtype, layout, device, tensor.nbytes, trainable, sparse)


class Description(msgspec.Struct, frozen=True):
    """What one rank would reduce.

    ``order`` has the parameters by the order in which their gradients became ready.
    """

    parameters: tuple[ParameterInfo, ...]
    groups: tuple[tuple[int, ...], ...]
    terms: dict[str, str]
    order: tuple[int, ...]


def describe_differences(descriptions: Mapping[int, Description]) -> str:
    """Return the text of all differences between ranks; empty if there are none.

    Whether a gradient was sparse, and when it became ready, may differ.
    """
    lines = [
        f"{term}: {describe_values(values)}"
        for term in next(iter(descriptions.values())).terms
        if _differ(values := {rank: each.terms[term] for rank, each in descriptions.items()})
    ]
    names = dict.fromkeys(parameter.name for each in descriptions.values() for parameter in each.parameters)
    by_name = {
        rank: {parameter.name: parameter for parameter in each.parameters}
        for rank, each in descriptions.items()
    }
    for name in names:
        values = {rank: _in_words(parameters.get(name)) for rank, parameters in by_name.items()}
        if _differ(values):
            lines.append(f"parameter {name!r}: {describe_values(values)}")
    orders = {rank: " ".join(p.name for p in each.parameters) for rank, each in descriptions.items()}
    if not lines and _differ(orders):
        lines.append(f"order of the parameters: {describe_values(orders)}")
    groups = {rank: str([list(group) for group in each.groups]) for rank, each in descriptions.items()}
    if not lines and _differ(groups):
        lines.append(f"groups: {describe_values(groups)}")
    return "\n".join(lines)


def _differ(values: Mapping[int, str]) -> bool:
    return len(set(values.values())) > 1


def _in_words(parameter: ParameterInfo | None) -> str:
    if parameter is None:
        return "none"
    state = "" if parameter.trainable else ", frozen"
    order = f" with dimensions in the order {parameter.layout}" if parameter.layout else ""
    return f"{parameter.dtype} {list(parameter.shape)}{order} on {parameter.device}{state}"


def make_buckets(
    parameters: Sequence[ParameterInfo],
    order: Sequence[int],
    groups: Sequence[Sequence[int]],
    limit: int,
) -> list[list[int]]:
    """Return which parameters are reduced together, by their indices.

    Parameters
    ----------
    parameters : sequence of ParameterInfo
        Frozen and sparse ones are in no bucket.
    order : sequence of int
        In which gradients became ready; others come last.
    groups : sequence of sequence of int
        Buckets that the user has chosen.
    limit : int
        Most bytes of a bucket, unless one gradient is larger.
    """
    left = {index for index, each in enumerate(parameters) if each.trainable and not each.sparse}
    buckets: list[list[int]] = []
    for group in groups:
        if members := [index for index in group if index in left]:
            buckets.append(members)
            left.difference_update(members)
    ready = [index for index in dict.fromkeys(order) if index in left]
    ready += sorted(left.difference(ready), reverse=True)
    size, place = 0, ""
    open_bucket: list[int] = []
    for index in ready:
        each = parameters[index]
        if open_bucket and (size + each.nbytes > limit or each.device != place):
            buckets.append(open_bucket)
            open_bucket, size = [], 0
        open_bucket.append(index)
        size, place = size + each.nbytes, each.device
    return [*buckets, open_bucket] if open_bucket else buckets
