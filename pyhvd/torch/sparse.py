"""The allreduce of sparse tensors: the ranks gather each other's rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from pyhvd.api.call import checked_name
from pyhvd.api.collectives import Average, Sum, submit_allgather
from pyhvd.api.process_sets import ProcessSet, global_process_set
from pyhvd.common.text import describe_values
from pyhvd.dtypes import ReduceOp
from pyhvd.errors import MismatchError, UnsupportedOpError
from pyhvd.negotiation.messages import RequestType
from pyhvd.torch.handles import CombinedHandle


def sparse_allreduce_async(
    tensor: Any,
    name: str,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
) -> CombinedHandle:
    """Start an allreduce of a sparse tensor.

    The ranks gather indices and values, so that bytes follow the rows that are there.

    Parameters
    ----------
    tensor : torch.Tensor
        Of layout ``torch.sparse_coo``, and of the same size on every rank. The number of rows may differ, and
        may be 0.
    name : str
        The same on every rank.
    op : ReduceOp
        Average or Sum.
    process_set : ProcessSet
        The ranks that take part.

    Returns
    -------
    CombinedHandle
        Its result is a coalesced sparse tensor. Horovod returns a function; the handle can be called too.

    Raises
    ------
    TypeError
        The tensor is not of that layout.
    UnsupportedOpError
        Another op.
    MismatchError
        By the handle: the ranks' sizes differ.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.sparse_coo:
        raise TypeError("sparse_allreduce_async takes a tensor of layout torch.sparse_coo: pass to_sparse()")
    if op not in (Average, Sum):
        raise UnsupportedOpError(f"sparse_allreduce_async supports op=Average and op=Sum, not {op!r}")
    name = checked_name(name, RequestType.ALLREDUCE) or "sparse"
    mine = tensor.detach().coalesce()
    dims = mine.sparse_dim()
    # The first row has the sizes of the sparse dimensions, which the ranks compare.
    sizes = torch.tensor([mine.shape[:dims]], dtype=torch.int64, device=mine.device)
    rows = torch.cat([sizes, mine.indices().t()])
    parts = [
        submit_allgather(rows, f"{name}.indices", process_set, grouped=False, with_rows=True),
        submit_allgather(mine.values(), f"{name}.values", process_set, grouped=False),
    ]

    return CombinedHandle(name, parts, partial(_add_up, name, op, mine.shape, process_set))


def _add_up(name: str, op: ReduceOp, shape: Any, process_set: ProcessSet, results: list[Any]) -> Any:
    """Return the tensor of all ranks' rows; raise MismatchError if the sizes differ."""
    (gathered, counts), values = results
    ranks = process_set.ranks or range(len(counts))
    # A rank that has joined has sent nothing, not even the sizes.
    own = {rank: each for rank, each in zip(ranks, gathered.split(list(counts)), strict=True) if len(each)}
    if len({tuple(each[0].tolist()) for each in own.values()}) > 1:
        sizes = {rank: str(each[0].tolist()) for rank, each in own.items()}
        raise MismatchError(
            f"Mismatched sizes of sparse_allreduce {name!r}: {describe_values(sizes)}."
            " Every rank must submit the same under one name.",
            name,
        )
    indices = torch.cat([each[1:] for each in own.values()]).t()
    if op is Average:
        values = values / len(counts) if values.is_floating_point() else values // len(counts)
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False).coalesce()
