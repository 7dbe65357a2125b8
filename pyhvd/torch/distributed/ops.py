"""torch's reduction operations as pyhvd's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from pyhvd.dtypes import ReduceOp
from pyhvd.errors import UnsupportedOpError

# By their hash, which is torch's number of the operation: to compare two of them takes much longer.
_OPS = {
    hash(dist.ReduceOp(theirs)): ours
    for theirs, ours in (
        (dist.ReduceOp.SUM, ReduceOp.SUM),
        (dist.ReduceOp.AVG, ReduceOp.AVERAGE),
        (dist.ReduceOp.PRODUCT, ReduceOp.PRODUCT),
        (dist.ReduceOp.MIN, ReduceOp.MIN),
        (dist.ReduceOp.MAX, ReduceOp.MAX),
        (dist.ReduceOp.BAND, ReduceOp.BAND),
        (dist.ReduceOp.BOR, ReduceOp.BOR),
        (dist.ReduceOp.BXOR, ReduceOp.BXOR),
    )
}
_SUM = dist.ReduceOp(dist.ReduceOp.SUM)


def op_of(opts: Any, dtype: torch.dtype, op: Any = None) -> ReduceOp:
    """Return the operation of a call's options, or the one that was given in their place.

    Raises
    ------
    UnsupportedOpError
        pyhvd does not have it.
    """
    if op is None:
        op = _SUM if opts is None else getattr(opts, "reduceOp", opts)
    if isinstance(op, dist.ReduceOp.RedOpType):
        op = dist.ReduceOp(op)
    found = _OPS.get(hash(op))
    if found is None:
        raise UnsupportedOpError("pyhvd does not have PREMUL_SUM: multiply the tensor, and use SUM")
    # A sum of truth values is whether there is one, as in torch.
    return ReduceOp.MAX if found is ReduceOp.SUM and dtype is torch.bool else found
