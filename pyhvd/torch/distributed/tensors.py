"""torch's tensors as pyhvd sends them, and results that are stored in the caller's tensors.

Tensors that are not contiguous are copied. Those of a dtype that pyhvd does not know are moved as bytes. All
of this goes past autograd, as torch's own backends do: no write counts as a change of the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from pyhvd.dtypes import BY_CODE
from pyhvd.native.shared_memory import PLACED, are_neighbours, pack, unpack

Store = Callable[[Any], None]
"""Stores the result of a call in the caller's tensors."""

_SENT = {getattr(torch, info.name) for info in BY_CODE.values()}


def listed(tensors: Any) -> list[Any]:
    """Return the tensors of a call that takes one tensor or a list of them."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def in_place(tensor: Any) -> tuple[Any, Store | None]:
    """Return the tensor to reduce or to overwrite in a tensor's place, and what stores its result."""
    plain = tensor.data if tensor.requires_grad else tensor
    if plain.is_contiguous() and not plain.is_conj() and not plain.is_neg():
        return plain, None
    return plain.contiguous().resolve_conj().resolve_neg(), partial(store_like, tensor)


def in_place_each(tensors: Sequence[Any]) -> tuple[list[Any], Store | None]:
    """Do for several tensors what :func:`in_place` does for one."""
    pairs = [in_place(tensor) for tensor in tensors]
    stores = [store for _, store in pairs]
    return [sent for sent, _ in pairs], partial(store_each, stores) if any(stores) else None


def as_bytes(tensor: Any) -> Any:
    """Return a tensor as pyhvd can move it: by itself, or its memory as bytes."""
    return tensor if tensor.dtype in _SENT else tensor.contiguous().view(-1).view(torch.uint8)


def flat(tensor: Any) -> Any:
    """Return a tensor's elements in one dimension, as pyhvd can move them."""
    plain = tensor.data if tensor.requires_grad else tensor
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    return as_bytes(plain if plain.ndim == 1 else plain.reshape(-1))


def flat_parts(tensors: Sequence[Any]) -> tuple[Any, list[int]]:
    """Return the elements of several tensors in one dimension, and how many are each one's."""
    whole = joined(tensors)
    if whole is None and (whole := pack(tensors)) is None:
        whole = torch.cat([flat(tensor) for tensor in tensors])
    sent = as_bytes(whole)
    return sent, [tensor.nbytes // sent.element_size() for tensor in tensors]


def joined(tensors: Sequence[Any]) -> Any | None:
    """Return several tensors as one of one dimension, if they are the pieces of one memory."""
    if not are_neighbours(tensors):
        return None
    memory = tensors[0].untyped_storage().data_ptr()
    if any(tensor.untyped_storage().data_ptr() != memory for tensor in tensors):
        return None
    return tensors[0].data.as_strided([sum(tensor.numel() for tensor in tensors)], [1])


def in_rows(tensor: Any, splits: Sequence[int], size: int) -> tuple[Any, list[int]]:
    """Return a tensor's elements in one dimension, and how many of them each of ``size`` ranks gets.

    ``splits`` are rows of dimension 0; without any, all ranks get as many.
    """
    sent = flat(tensor)
    rows = tensor.shape[0] if tensor.ndim else 1
    if not splits:
        if rows % size:
            raise ValueError(f"without split sizes, dimension 0 ({rows}) must divide by the {size} ranks")
        return sent, [sent.numel() // size] * size
    if sum(splits) != rows or len(splits) != size:
        raise ValueError(f"the split sizes {list(splits)} do not fit {rows} rows and {size} ranks")
    each = sent.numel() // rows if rows else 0
    return sent, [split * each for split in splits]


def store_like(tensor: Any, result: Any) -> None:
    """Store a result of the same shape."""
    tensor.data.copy_(result)


def store_sparse(tensor: Any, result: Any) -> None:
    """Store a sparse result, whose rows are other ones."""
    with torch.no_grad():
        tensor.copy_(result)


def store_each(stores: Sequence[Store | None], results: Sequence[Any]) -> None:
    """Store several results, each by its own function."""
    for store, result in zip(stores, results, strict=True):
        if store is not None:
            store(result)


def store_flat(tensor: Any, result: Any) -> None:
    """Store a result of one dimension."""
    store_parts([tensor], result)


def store_part(tensor: Any, part: Any, _: Any) -> None:
    """Store a part of what the call has overwritten."""
    store_parts([tensor], part)


def store_parts(tensors: Sequence[Any], result: Any) -> None:
    """Store a result of one dimension in several tensors, one after the other.

    Raises ValueError if it has another number of elements.
    """
    if unpack(result, tensors):
        return
    if tensors and result.dtype is not tensors[0].dtype:
        result = result.view(tensors[0].dtype)
    sizes = [tensor.numel() for tensor in tensors]
    if sum(sizes) != result.numel():
        raise ValueError(
            f"the outputs have room for {sizes} elements, but the ranks have sent {result.numel()}: give each"
            " rank outputs of the sizes that the others send"
        )
    for tensor, part in zip(tensors, result.split(sizes), strict=True):
        data = tensor.data
        data.copy_(part.view(data.shape))


def store_placed(tensors: Sequence[Any], target: Any, result: Any) -> None:
    """Store a result, unless it is in ``target``, which is the memory of the tensors, or a copy of it."""
    if result is not target or target.data_ptr() != tensors[0].data_ptr():
        store_parts(tensors, result)


def placed(output: Any) -> tuple[Any, Store]:
    """Return what may take a call's result in an output's place, and what stores a result that it has not."""
    target = flat(output)
    return target, partial(store_placed, [output], target)


def placed_parts(sent: Any, outputs: Sequence[Any]) -> tuple[int, Any, Store]:
    """Return the form and the tensors of a call whose result goes into a list, and what stores its result."""
    target = joined(outputs)
    if target is None:
        return 0, sent, partial(store_parts, outputs)
    target = as_bytes(target)
    return PLACED, (sent, target), partial(store_placed, outputs, target)


def store_elements(store: Store, result: tuple[Any, Any]) -> None:
    """Store the result of an alltoall, whose second part is the numbers of rows."""
    store(result[0])


def store_rows(tensor: Any, target: Any, expected: Sequence[int], result: tuple[Any, Any]) -> None:
    """Store what came from each rank; raise ValueError if that is not as much as expected."""
    elements, counts = result
    if counts.tolist() != expected:
        sizes = f"{counts.tolist()} elements, but the output is for {expected}"
        raise ValueError(f"the ranks have sent {sizes}")
    store_placed([tensor], target, elements)
