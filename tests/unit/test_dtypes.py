"""The table of dtypes: its codes, names, sizes and ops, compared with numpy and with Horovod's codes."""

from __future__ import annotations

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from pyhvd.dtypes import BITWISE_OPS, BY_CODE, Code, ReduceOp, lookup

HOROVOD = "uint8 int8 uint16 int16 int32 int64 float16 float32 float64 bool".split()  # noqa: SIM905
AVERAGE_TO_MAX = {ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT}


def numpy_dtype(name: str) -> np.dtype[np.generic]:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def test_codes_are_horovods_and_without_gaps() -> None:
    assert [BY_CODE[i].name for i in range(10)] == HOROVOD
    assert sorted(BY_CODE) == list(range(15)) == sorted(Code)
    assert [(c.name.lower(), c) for c in Code] == [(BY_CODE[c].name, c) for c in Code]


def test_the_first_reduce_ops_are_horovods() -> None:
    assert {op.name: int(op) for op in ReduceOp} == {
        "AVERAGE": 0, "SUM": 1, "ADASUM": 2, "MIN": 3, "MAX": 4, "PRODUCT": 5, "BAND": 6, "BOR": 7, "BXOR": 8,
    }  # fmt: skip


@pytest.mark.parametrize("code", Code, ids=lambda c: c.name)
def test_code_and_size_of_each_dtype_agree_with_numpy(code: Code) -> None:
    row = BY_CODE[code]
    dtype = numpy_dtype(row.name)
    assert lookup(dtype) is row
    assert (row.code, row.itemsize) == (code, dtype.itemsize)


@pytest.mark.parametrize(
    "alias", ["intc", "longlong", "ulonglong", "uintp", "single", "double", "cdouble", "?"]
)
def test_aliases_find_their_row(alias: str) -> None:
    dtype = np.dtype(alias)
    assert lookup(dtype).itemsize == dtype.itemsize
    assert numpy_dtype(lookup(dtype).name) == dtype


@pytest.mark.parametrize("code", Code, ids=lambda c: c.name)
def test_ops_by_kind(code: Code) -> None:
    row = BY_CODE[code]
    if code is Code.BOOL:
        assert row.ops == {ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT} | BITWISE_OPS
    elif row.name.startswith("complex"):
        assert row.ops == {ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.PRODUCT}
    else:
        bitwise = BITWISE_OPS if "int" in row.name else set()
        assert row.ops - {ReduceOp.ADASUM} == AVERAGE_TO_MAX | bitwise
    assert row.scalable == (code is not Code.BOOL)


def test_bfloat16_needs_no_import_of_ml_dtypes() -> None:
    code = "import sys, pyhvd.dtypes, pyhvd.arrays; sys.exit('ml_dtypes' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
