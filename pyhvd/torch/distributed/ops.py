"""torch's reduction operations as pyhvd's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from pyhvd.dtypes import ReduceOp
from pyhvd.errors import UnsupportedOpError

_PAIRS = (
    (dist.ReduceOp.SUM, ReduceOp.SUM),
    (dist.ReduceOp.AVG, ReduceOp.AVERAGE),
    (dist.ReduceOp.PRODUCT, ReduceOp.PRODUCT),
    (dist.ReduceOp.MIN, ReduceOp.MIN),
    (dist.ReduceOp.MAX, ReduceOp.MAX),
    (dist.ReduceOp.BAND, ReduceOp.BAND),
    (dist.ReduceOp.BOR, ReduceOp.BOR),
    (dist.ReduceOp.BXOR, ReduceOp.BXOR),
)
# torch has two types of operations. Their hash is the operation's number; comparisons take much longer.
_OPS = {hash(made): ours for theirs, ours in _PAIRS for made in (theirs, dist.ReduceOp(theirs))}
_SUM, _BOOL = dist.ReduceOp.SUM, torch.bool
_OUR_SUM, _OUR_MAX = ReduceOp.SUM, ReduceOp.MAX


def op_of(opts: Any, dtype: torch.dtype, op: Any = None) -> ReduceOp:
    """Return the operation of a call's options, or the one that was given in their place.

    Raises
    ------
    UnsupportedOpError
        pyhvd does not have it.
    """
    if op is None:
        op = _SUM if opts is None else getattr(opts, "reduceOp", opts)
    found = _OPS.get(hash(op))
    if found is None:
        raise UnsupportedOpError("pyhvd does not have PREMUL_SUM: multiply the tensor, and use SUM")
    # A sum of truth values is whether there is one, as in torch.
    return _OUR_MAX if found is _OUR_SUM and dtype is _BOOL else found
