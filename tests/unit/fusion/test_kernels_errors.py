"""The kernels reject invalid arguments, and touch no memory then."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pyhvd import _fusion
from pyhvd.dtypes import BY_CODE, Code, ReduceOp

REFUSED = [(code, op) for code in Code for op in ReduceOp if op not in BY_CODE[code].ops - {ReduceOp.ADASUM}]
REFUSAL = "no kernel has this combination"
F32, SUM = int(Code.FLOAT32), int(ReduceOp.SUM)
MEMORY = np.full(64, 0xA5, np.uint8)
AT = MEMORY.ctypes.data
AT_TWICE = np.array([AT, AT], np.int64)
ONES = np.array([1, 1], np.int64)


@pytest.mark.parametrize(("code", "op"), REFUSED, ids=lambda value: value.name)
def test_undefined_combinations_are_refused(code: Code, op: ReduceOp) -> None:
    joined = np.array([AT, 0], np.int64)
    calls: list[Callable[[], None]] = [
        lambda: _fusion.reduce(AT, AT_TWICE, 2, int(code), int(op), 1.0),
        lambda: _fusion.fill(AT, 2, int(code), int(op)),
        lambda: _fusion.pack(AT, joined, ONES, int(code), int(op), 1.0),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=REFUSAL):
            call()
    assert (MEMORY == 0xA5).all()


def test_the_kernels_and_the_table_of_dtypes_agree() -> None:
    for code, row in BY_CODE.items():
        one = np.zeros(row.itemsize, np.uint8)
        for op in row.ops - {ReduceOp.ADASUM}:
            _fusion.fill(one.ctypes.data, 1, code, int(op))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: _fusion.reduce(AT, AT_TWICE, -1, F32, SUM), "negative, got -1"),
        (lambda: _fusion.reduce(AT, AT_TWICE[:0], 1, F32, SUM), REFUSAL),
        (lambda: _fusion.reduce(AT, np.array([AT, 0]), 1, F32, SUM), "address"),
        (lambda: _fusion.reduce(0, AT_TWICE, 1, F32, SUM), "address"),
        (lambda: _fusion.reduce(AT, AT_TWICE, 1, 15, SUM), REFUSAL),
        (lambda: _fusion.reduce(AT, AT_TWICE, 1, -1, SUM), REFUSAL),
        (lambda: _fusion.reduce(AT, AT_TWICE, 1, F32, 6), REFUSAL),
        (lambda: _fusion.reduce(AT, AT_TWICE, 1, int(Code.BOOL), int(ReduceOp.MAX), 0.5), REFUSAL),
        (lambda: _fusion.scale(AT, AT, -3, F32, 0.5), "negative, got -3"),
        (lambda: _fusion.scale(AT, AT, 1, 99, 0.5), REFUSAL),
        (lambda: _fusion.scale(AT, AT, 1, int(Code.BOOL), 0.5), REFUSAL),
        (lambda: _fusion.scale(AT, 0, 1, F32, 0.5), "address"),
        (lambda: _fusion.fill(AT, -1, F32, SUM), "negative"),
        (lambda: _fusion.fill(AT, 1, F32, 17), REFUSAL),
        (lambda: _fusion.cast(AT, F32, AT, int(Code.INT32), 1), REFUSAL),
        (lambda: _fusion.cast(AT, int(Code.COMPLEX64), AT, F32, 1), REFUSAL),
        (lambda: _fusion.cast(AT, F32, AT, 1000, 1), REFUSAL),
        (lambda: _fusion.cast(AT, F32, AT, int(Code.FLOAT64), -1), "negative"),
        (lambda: _fusion.pack(AT, AT_TWICE, ONES[:1], F32), "2 addresses, but 1 counts"),
        (lambda: _fusion.pack(AT, AT_TWICE, -ONES, F32), r"counts\[0\]"),
        (lambda: _fusion.pack(AT, AT_TWICE, ONES, 77), REFUSAL),
        (lambda: _fusion.pack(AT, np.array([AT, 0]), ONES, F32, 9), REFUSAL),
        (lambda: _fusion.pack(AT, AT_TWICE, ONES, int(Code.BOOL), int(ReduceOp.MIN), 2.0), REFUSAL),
        (lambda: _fusion.pack(0, AT_TWICE, ONES, F32), "address"),
        (lambda: _fusion.unpack(AT, AT_TWICE[:1], ONES, F32), "1 addresses, but 2 counts"),
        (lambda: _fusion.unpack(AT, AT_TWICE, -ONES, F32), r"counts\[0\]"),
        (lambda: _fusion.unpack(AT, AT_TWICE, ONES, 77), REFUSAL),
    ],
)
def test_bad_arguments(call: Callable[[], None], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()
    assert (MEMORY == 0xA5).all()


def test_arrays_of_another_type_are_refused() -> None:
    with pytest.raises(ValueError, match="dtype mismatch"):
        _fusion.pack(AT, AT_TWICE.astype(np.int32), ONES, F32)
    with pytest.raises(ValueError, match="contiguous"):
        _fusion.unpack(AT, np.array([AT, AT, AT], np.int64)[::2], ONES, F32)
    with pytest.raises(TypeError, match="None"):
        _fusion.reduce(AT, None, 1, F32, SUM)  # type: ignore[arg-type]
