"""The one table of element types and reduce ops.

Owns: the wire code of every dtype, the ops that it supports, and the public :class:`ReduceOp` constants.
Codes 0-9 are Horovod's. ``ml_dtypes`` is never imported here: a bfloat16 array is recognised by the name of
its dtype, and travels as 16-bit words.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import numpy as np

from pyhvd.errors import UnsupportedDtypeError


class ReduceOp(enum.IntEnum):
    """How to combine the ranks' tensors: element by element, in rank order.

    Only Adasum takes each tensor as a whole, and combines the ranks in a tree. BAND, BOR and BXOR are the
    bitwise and, or, exclusive or, of integers and bool.
    """

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5
    BAND = 6
    BOR = 7
    BXOR = 8


class Code(enum.IntEnum):
    """Element type on the wire and in the kernels."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    INT32 = 4
    INT64 = 5
    FLOAT16 = 6
    FLOAT32 = 7
    FLOAT64 = 8
    BOOL = 9
    BFLOAT16 = 10
    UINT32 = 11
    UINT64 = 12
    COMPLEX64 = 13
    COMPLEX128 = 14


_ALL_OPS = frozenset((ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT))
_COMPLEX_OPS = frozenset((ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.PRODUCT))
BITWISE_OPS = frozenset((ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR))
_INTEGER_OPS = _ALL_OPS | BITWISE_OPS
_BOOL_OPS = frozenset((ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)) | BITWISE_OPS
_ADASUM_OPS = _ALL_OPS | {ReduceOp.ADASUM}


@dataclass(frozen=True, slots=True)
class DtypeInfo:
    """One row of the table: a dtype, by numpy's name, and the ops that are defined for it."""

    code: Code
    name: str
    itemsize: int
    ops: frozenset[ReduceOp]
    scalable: bool = True
    """Whether it can have prescale and postscale factors other than 1."""


@dataclass(frozen=True, slots=True)
class ReduceSpec:
    """How to reduce tensors of one dtype; for backends, Average is a Sum with a postscale factor."""

    info: DtypeInfo
    op: ReduceOp
    prescale: float = 1.0
    """Factor on each rank's elements before the reduction."""
    postscale: float = 1.0
    """Factor on the result."""


_ROWS = (
    DtypeInfo(Code.UINT8, "uint8", 1, _INTEGER_OPS),
    DtypeInfo(Code.INT8, "int8", 1, _INTEGER_OPS),
    DtypeInfo(Code.UINT16, "uint16", 2, _INTEGER_OPS),
    DtypeInfo(Code.INT16, "int16", 2, _INTEGER_OPS),
    DtypeInfo(Code.INT32, "int32", 4, _INTEGER_OPS),
    DtypeInfo(Code.INT64, "int64", 8, _INTEGER_OPS),
    DtypeInfo(Code.FLOAT16, "float16", 2, _ADASUM_OPS),
    DtypeInfo(Code.FLOAT32, "float32", 4, _ADASUM_OPS),
    DtypeInfo(Code.FLOAT64, "float64", 8, _ADASUM_OPS),
    DtypeInfo(Code.BOOL, "bool", 1, _BOOL_OPS, scalable=False),
    DtypeInfo(Code.BFLOAT16, "bfloat16", 2, _ADASUM_OPS),
    DtypeInfo(Code.UINT32, "uint32", 4, _INTEGER_OPS),
    DtypeInfo(Code.UINT64, "uint64", 8, _INTEGER_OPS),
    DtypeInfo(Code.COMPLEX64, "complex64", 8, _COMPLEX_OPS),
    DtypeInfo(Code.COMPLEX128, "complex128", 16, _COMPLEX_OPS),
)
INTEGERS = frozenset(row.code for row in _ROWS if "int" in row.name)
BY_CODE: dict[int, DtypeInfo] = {int(row.code): row for row in _ROWS}
_BY_NAME: dict[str, DtypeInfo] = {row.name: row for row in _ROWS}
# torch's dtypes that cannot be reduced: they are moved as words of the same size.
_MOVED = {"complex32": Code.INT32, **dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), Code.UINT8)}
_MOVED |= dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), Code.UINT8)
_MOVED_BY_NAME = {
    name: DtypeInfo(code, name, BY_CODE[code].itemsize, frozenset()) for name, code in _MOVED.items()
}
KNOWN: dict[np.dtype[Any], DtypeInfo] = {}
"""Dtypes that :func:`lookup` has found before; numpy takes microseconds to name a dtype.

Needs no lock: entries are only added, and equal dtypes get equal entries.
"""


def lookup(dtype: np.dtype[Any]) -> DtypeInfo:
    """Return the table's row for a numpy dtype; raise UnsupportedDtypeError if none.

    There is none for dtypes of objects, strings, records and dates, nor for other byte orders.
    """
    if (known := KNOWN.get(dtype)) is not None:
        return known
    row = _BY_NAME.get(dtype.name)
    if row is None or dtype.names is not None or dtype.subdtype is not None:
        raise _unsupported(dtype.name)
    if not dtype.isnative:
        raise UnsupportedDtypeError(
            f"dtype {dtype.str!r} is not in this machine's byte order: convert it first with"
            " array.astype(array.dtype.newbyteorder('='))"
        )
    KNOWN[dtype] = row
    return row


def named(name: str) -> DtypeInfo:
    """Return the table's row for a dtype of any library, by its name; raise UnsupportedDtypeError if none."""
    row = _BY_NAME.get(name) or _MOVED_BY_NAME.get(name)
    if row is None:
        raise _unsupported(name)
    return row


def _unsupported(name: str) -> UnsupportedDtypeError:
    return UnsupportedDtypeError(
        f"dtype {name!r} cannot be reduced or sent: pyhvd supports {', '.join(_BY_NAME)}"
        " (for Python objects use broadcast_object or allgather_object)"
    )
