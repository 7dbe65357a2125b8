"""What a reducing verb's arguments mean: op, scales, and whether a dtype supports them."""

from __future__ import annotations

import functools
import math
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from pyhvd.common.text import describe_ranks
from pyhvd.dtypes import BY_CODE, INTEGERS, DtypeInfo, ReduceOp, ReduceSpec
from pyhvd.errors import UnsupportedDtypeError, UnsupportedOpError
from pyhvd.negotiation.messages import Request, RequestType


@dataclass(frozen=True, slots=True)
class Reduction:
    """A checked op with its scales."""

    op: ReduceOp
    prescale: float
    postscale: float

    @classmethod
    def of(
        cls,
        kind: RequestType,
        average: bool | None,
        op: ReduceOp | None,
        prescale_factor: float,
        postscale_factor: float,
    ) -> Reduction:
        """Check a verb's arguments.

        Raises
        ------
        ValueError
            Both ``average`` and ``op``, an ``average`` that is no bool, an unknown op, or a factor that is
            not a finite number.
        UnsupportedOpError
            The verb does not have this op.
        """
        if average is not None:
            if op is not None:
                raise ValueError("give op or average, not both; average is deprecated")
            if not isinstance(average, (bool, int, np.bool_)):
                raise ValueError(f"average={average!r} is no bool: was it meant as name={average!r}?")
            text = "average is deprecated: use op=Average or op=Sum"
            warnings.warn(text, DeprecationWarning, stacklevel=_callers_level())
            op = ReduceOp.AVERAGE if average else ReduceOp.SUM
        try:
            chosen = ReduceOp.AVERAGE if op is None else ReduceOp(op)
        except ValueError:
            raise ValueError(f"op={op!r} is none of Average, Sum, Adasum, Min, Max, Product") from None
        if kind is RequestType.REDUCESCATTER and chosen not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise UnsupportedOpError(f"reducescatter has op=Average and op=Sum, not {chosen.name.title()}")
        return cls(chosen, _factor("prescale", prescale_factor), _factor("postscale", postscale_factor))

    def check_ranks(self, ranks: Sequence[int]) -> None:
        """Raise UnsupportedOpError where the op is not defined for so many ranks."""
        size = len(ranks)
        fewer = 1 << size.bit_length() - 1
        if self.op is ReduceOp.ADASUM and size & (size - 1):
            raise UnsupportedOpError(
                "op=Adasum pairs ranks, so their number must be a power of two, but the process set has"
                f" {size} ({describe_ranks(ranks)}): use a process set of {fewer} of them, or op=Average"
            )

    def check(self, info: DtypeInfo) -> None:
        """Raise UnsupportedDtypeError where the dtype does not have this op or cannot be scaled."""
        if self.op not in info.ops:
            supported = ", ".join(op.name.title() for op in sorted(info.ops))
            hint = ": for bool, Max is 'any' and Min is 'all'" if info.name == "bool" else ""
            if self.op is ReduceOp.ADASUM:
                hint = ": Adasum reduces float16, bfloat16, float32 and float64"
            raise UnsupportedDtypeError(
                f"op={self.op.name.title()} is not defined for {info.name} (only {supported}){hint}"
            )
        if not info.scalable and (self.prescale, self.postscale) != (1.0, 1.0):
            raise UnsupportedDtypeError(f"{info.name} cannot be scaled")


def _callers_level() -> int:
    """Return the stacklevel of the first caller outside this package, as seen by this function's caller."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("pyhvd."):
        level, frame = level + 1, frame.f_back
    return level


def _factor(which: str, value: float) -> float:
    try:
        factor = float(value)
    except (TypeError, ValueError) as exc:
        raise ValueError(f"{which}_factor={value!r} is not a number: {exc}") from None
    if not math.isfinite(factor):
        raise ValueError(f"{which}_factor={value!r} is not a finite number")
    return factor


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
