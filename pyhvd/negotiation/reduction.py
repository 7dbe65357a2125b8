"""What the kernels do for a request: their op, which is never Average, and their factor."""

from __future__ import annotations

import functools
import math
from fractions import Fraction

from pyhvd.dtypes import INTEGERS, ReduceOp
from pyhvd.negotiation.messages import Request


def kernel_terms(request: Request, size: int) -> tuple[ReduceOp, float]:
    """Return op and postscale with Average told as what it is: a Sum, divided by the size of the set.

    Ranks that have joined count in the divisor.
    """
    if request.op != ReduceOp.AVERAGE:
        return ReduceOp(request.op), request.postscale
    return ReduceOp.SUM, _quotient(request.postscale, size, request.dtype in INTEGERS)


@functools.lru_cache(maxsize=256)
def _quotient(postscale: float, size: int, exact: bool) -> float:
    """Return postscale / size; with ``exact`` never nearer to zero than it is.

    Integers are cut off after the multiplication: a factor of 1/49 that was rounded down would make the
    average of 49 ones a 0.
    """
    factor = postscale / size
    if exact and abs(Fraction(factor) * size) < abs(Fraction(postscale)):
        return math.nextafter(factor, math.copysign(math.inf, factor))
    return factor
