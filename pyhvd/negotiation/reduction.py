"""What the kernels do for a request: their op, which is never Average, and their factor."""

from __future__ import annotations

import functools
import math
from fractions import Fraction

from pyhvd.dtypes import BY_CODE, INTEGERS, ReduceOp, ReduceSpec
from pyhvd.negotiation.messages import Request


def reduce_spec(request: Request, size: int) -> ReduceSpec:
    """Return how backends reduce a request; Average becomes a Sum divided by the size of the process set.

    Joined ranks count in the divisor.
    """
    return _spec(request.dtype, request.op, request.prescale, request.postscale, size)


@functools.lru_cache(maxsize=256)
def _spec(dtype: int, op: int, prescale: float, postscale: float, size: int) -> ReduceSpec:
    if op != ReduceOp.AVERAGE:
        return ReduceSpec(BY_CODE[dtype], ReduceOp(op), prescale, postscale)
    return ReduceSpec(BY_CODE[dtype], ReduceOp.SUM, prescale, _quotient(postscale, size, dtype in INTEGERS))


def _quotient(postscale: float, size: int, exact: bool) -> float:
    """Return postscale / size; with ``exact`` the result is never rounded towards zero.

    Integers are truncated after the multiplication. If 1/49 were rounded down, the average of 49 ones would
    be 0.
    """
    factor = postscale / size
    if exact and abs(Fraction(factor) * size) < abs(Fraction(postscale)):
        return math.nextafter(factor, math.copysign(math.inf, factor))
    return factor
