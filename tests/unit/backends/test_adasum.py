"""Adasum's kernels compared with numpy bit by bit, its factors, and its batches of tensors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from msgspec.structs import replace

from pyhvd import _fusion
from pyhvd.backends.adasum import TINY, factors_of
from pyhvd.backends.host import batches
from pyhvd.dtypes import Code, ReduceOp
from pyhvd.negotiation.messages import GLOBAL_SET, RequestType
from tests.unit.native.fast_path_simulation import FastPathNetwork
from tests.unit.negotiation.simulation import allreduce

Array = np.ndarray[Any, Any]

DTYPES = {Code.FLOAT32: np.float32, Code.FLOAT64: np.float64}
each_dtype = pytest.mark.parametrize("code", DTYPES, ids=lambda code: code.name)
COUNTS = (0, 1, 7, 8, 9, 64, 1000, 5003)


def vectors(code: Code, count: int, seed: int = 1) -> tuple[Array, Array]:
    """Return two vectors at odd addresses; magnitudes differ, so that the order of a sum changes its bits."""
    rng = np.random.default_rng([seed, count])
    made = []
    for _ in range(2):
        raw = np.empty(count * 8 + 1, np.uint8)[1:]
        vector = raw[: count * np.dtype(DTYPES[code]).itemsize].view(DTYPES[code])
        vector[:] = rng.normal(size=count) * 10.0 ** rng.uniform(-6, 6, count)
        made.append(vector)
    return made[0], made[1]


def in_lanes(x: Array, y: Array) -> float:
    """Return the inner product in the kernels' order: element i goes to lane i % 8, then lanes are halved."""
    rows = -(-len(x) // 8)
    products = np.zeros(rows * 8)
    products[: len(x)] = x.astype(np.float64) * y.astype(np.float64)
    lanes = np.zeros(8)
    for row in products.reshape(rows, 8):
        lanes = lanes + row
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = lanes[:half] + lanes[half:]
    return float(lanes[0])


def terms(code: Code, a: Array, b: Array, counts: list[int]) -> Array:
    out = np.full((len(counts), 3), 77.0)
    _fusion.adasum_terms(out, a.ctypes.data, b.ctypes.data, np.array(counts, np.int64), code)
    return out


@each_dtype
@pytest.mark.parametrize("count", COUNTS)
def test_terms(code: Code, count: int) -> None:
    a, b = vectors(code, count)
    (got,) = terms(code, a, b, [count])
    assert got.tolist() == [in_lanes(a, b), in_lanes(a, a), in_lanes(b, b)]
    exact = math.fsum(float(x) * float(x) for x in a)
    assert math.isclose(got[1], exact, rel_tol=1e-13)


@each_dtype
def test_terms_of_pieces(code: Code) -> None:
    """The kernel sums each piece separately, at any address."""
    a, b = vectors(code, sum(COUNTS))
    got = terms(code, a, b, list(COUNTS))
    first = 0
    for row, count in zip(got, COUNTS, strict=True):
        part = slice(first, first + count)
        assert row.tolist() == [
            in_lanes(a[part], b[part]),
            in_lanes(a[part], a[part]),
            in_lanes(b[part], b[part]),
        ]
        first += count


def test_squares_of_float32_neither_overflow_nor_vanish() -> None:
    a, b = np.full(3, 3e38, np.float32), np.full(3, 1e-45, np.float32)
    (got,) = terms(Code.FLOAT32, a, b, [3])
    big, small = float(a[0]), float(b[0])
    assert np.allclose(got, [3 * big * small, 3 * big * big, 3 * small * small], rtol=1e-15, atol=0)


@each_dtype
@pytest.mark.parametrize("into", ["a third", "a", "b"])
def test_combine(code: Code, into: str) -> None:
    a, b = vectors(code, sum(COUNTS))
    factors = np.random.default_rng(3).normal(size=(len(COUNTS), 2))
    per_element = np.repeat(factors, COUNTS, axis=0)
    want = (per_element[:, 0] * a.astype(np.float64) + per_element[:, 1] * b.astype(np.float64)).astype(
        a.dtype
    )
    out = {"a": a, "b": b, "a third": np.empty_like(a)}[into]
    counts = np.array(COUNTS, np.int64)
    _fusion.adasum_combine(out.ctypes.data, a.ctypes.data, b.ctypes.data, counts, factors, code)
    assert out.tobytes() == want.tobytes()


def test_kernels_refuse() -> None:
    a = np.zeros(4)
    here, counts = a.ctypes.data, np.array([4], np.int64)
    out, factors = np.empty((1, 3)), np.ones((1, 2))
    for code in set(Code) - set(DTYPES):
        with pytest.raises(ValueError, match="no kernel has this combination of dtype, op and factor"):
            _fusion.adasum_terms(out, here, here, counts, code)
        with pytest.raises(ValueError, match="no kernel has this combination of dtype, op and factor"):
            _fusion.adasum_combine(here, here, here, counts, factors, code)
    for wrong, text in ((np.empty((2, 3)), "2 rows, but 1 counts"), (np.empty((1, 2)), "2 columns, not 3")):
        with pytest.raises(ValueError, match=text):
            _fusion.adasum_terms(wrong, here, here, counts, Code.FLOAT64)
    for wrong, text in ((np.ones((3, 2)), "3 rows, but 1 counts"), (np.ones((1, 3)), "3 columns, not 2")):
        with pytest.raises(ValueError, match=text):
            _fusion.adasum_combine(here, here, here, counts, wrong, Code.FLOAT64)
    with pytest.raises(ValueError, match="must not be negative"):
        _fusion.adasum_terms(out, here, here, -counts, Code.FLOAT64)
    with pytest.raises(ValueError, match="address"):
        _fusion.adasum_terms(out, 0, here, counts, Code.FLOAT64)
    with pytest.raises(ValueError, match="address"):
        _fusion.adasum_combine(0, here, here, counts, factors, Code.FLOAT64)


@pytest.mark.parametrize(
    ("row", "want"),
    [
        ((0.0, 4.0, 9.0), (1.0, 1.0)),  # orthogonal
        ((4.0, 4.0, 4.0), (0.5, 0.5)),  # equal
        ((6.0, 4.0, 9.0), (0.25, 1 - 1 / 3)),  # parallel, of lengths 2 and 3
        ((-6.0, 4.0, 9.0), (1.75, 1 + 1 / 3)),  # opposite
        ((0.0, 0.0, 9.0), (1.0, 1.0)),
        ((0.0, 0.0, 0.0), (1.0, 1.0)),
        ((1e-155, TINY / 2, 9.0), (1.0, 1.0)),
        ((TINY, TINY, TINY), (0.5, 0.5)),
        ((math.nan, math.nan, 9.0), (math.nan, math.nan)),
        ((math.inf, math.inf, 9.0), (math.nan, -math.inf)),
    ],
)
def test_factors(row: tuple[float, float, float], want: tuple[float, float]) -> None:
    company = (1.0, 1.0, 2.0)
    got = factors_of(np.array([company, row]))
    assert got[0].tolist() == [0.5, 0.75]
    assert np.allclose(got[1], want, rtol=1e-15, atol=0, equal_nan=True)


def test_adasum_is_never_delegated() -> None:
    """An Adasum tensor's slot is never delegated, even if a sum of the same name had a delegated slot."""
    network = FastPathNetwork(4)
    add, other = allreduce("x"), allreduce("y")
    adasum = replace(add, type=RequestType.ADASUM, op=ReduceOp.ADASUM)
    for _ in range(2):
        network.everywhere([add])
        network.everywhere([other])
        assert len(network.ready_table.delegated) == 2
        kept = (GLOBAL_SET, network.everywhere([other])[0][0].response.slot)
        for _ in range(3):
            (end, *_) = network.everywhere([adasum])[0]
            assert end.response.error is None
            assert end.response.slot >= 0
            assert [*network.ready_table.delegated] == [kept]
    network.check_no_residue()


@settings(max_examples=200, deadline=None)
@given(counts=st.lists(st.integers(0, 60), max_size=30), limit=st.integers(1, 100))
def test_rides(counts: list[int], limit: int) -> None:
    """Every tensor with elements is in one batch; a batch of several tensors does not exceed the limit."""
    plan = list(batches(counts, limit))
    assert sorted(i for ride in plan for i in ride) == [i for i, count in enumerate(counts) if count]
    for ride in plan:
        assert ride == sorted(ride)
        assert len(ride) == 1 or sum(counts[i] for i in ride) <= limit
        assert len(ride) == 1 or all(2 * counts[i] < limit for i in ride)
