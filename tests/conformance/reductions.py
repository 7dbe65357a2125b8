"""Cases of allreduce and reducescatter: each variant, dtype and op, compared with the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.dtypes import ReduceOp
from tests.conformance.cases import SEVERAL, Cases, is_last, outcome
from tests.conformance.oracle import (
    DTYPES,
    INFO,
    OPS,
    SCALABLE,
    SHAPES,
    SUMMABLE,
    Array,
    inputs,
    reduced,
    rows,
    same,
)

CASES = Cases()
Variant = Callable[..., list[Any]]


def _finish(handles: list[hvd.Handle]) -> list[Any]:
    return [hvd.synchronize(handle) for handle in handles]


ALLREDUCES: dict[str, Variant] = {
    "allreduce": lambda ts, **how: [hvd.allreduce(t, **how) for t in ts],
    "allreduce_async": lambda ts, **how: _finish([hvd.allreduce_async(t, **how) for t in ts]),
    "allreduce_": lambda ts, **how: [hvd.allreduce_(t, **how) for t in ts],
    "allreduce_async_": lambda ts, **how: _finish([hvd.allreduce_async_(t, **how) for t in ts]),
    "grouped_allreduce": lambda ts, **how: hvd.grouped_allreduce(ts, **how),
    "grouped_allreduce_async": lambda ts, **how: hvd.grouped_allreduce_async(ts, **how).result(),
    "grouped_allreduce_": lambda ts, **how: hvd.grouped_allreduce_(ts, **how),
    "grouped_allreduce_async_": lambda ts, **how: hvd.grouped_allreduce_async_(ts, **how).result(),
}
REDUCESCATTERS: dict[str, Variant] = {
    "reducescatter": lambda ts, **how: [hvd.reducescatter(t, **how) for t in ts],
    "reducescatter_async": lambda ts, **how: _finish([hvd.reducescatter_async(t, **how) for t in ts]),
    "grouped_reducescatter": lambda ts, **how: hvd.grouped_reducescatter(ts, **how),
    "grouped_reducescatter_async": lambda ts, **how: hvd.grouped_reducescatter_async(ts, **how).result(),
}


def check_allreduce(variant: str, shapes: tuple[tuple[int, ...], ...], name: str, **how: Any) -> None:
    """Run one variant on one dtype, and compare results and inputs with the oracle."""
    parts = [inputs(name, shape, hvd.size(), seed) for seed, shape in enumerate(shapes)]
    mine = [part[hvd.rank()].copy() for part in parts]
    got = ALLREDUCES[variant](mine, **how)
    op = how.get("op", hvd.Average)
    scales = how.get("prescale_factor", 1.0), how.get("postscale_factor", 1.0)
    for part, before, out in zip(parts, mine, got, strict=True):
        what = f"{variant} of {name} {part[0].shape} {op!r} {scales}"
        same(out, reduced(op, part, *scales), what)
        if variant.endswith("_"):
            assert out is before, what
        else:
            assert out is not before, what
            same(before, part[hvd.rank()], f"input of {what}")


@CASES.add_each(ALLREDUCES)
def every_dtype_and_op(variant: str) -> None:
    synchronous = variant in ("allreduce", "allreduce_")
    for name, ops in OPS.items():
        for op in ops:
            check_allreduce(variant, SHAPES[1:3] if synchronous else SHAPES, name, op=op)


@CASES.add_each(REDUCESCATTERS)
def every_dtype_scattered(variant: str) -> None:
    size, rank = hvd.size(), hvd.rank()
    shapes: tuple[tuple[int, ...], ...] = ((7, 2), (size,), (1, 3), (0, 2), (4 * size + 1,), (5, 0))
    shapes = shapes[:3] if variant == "reducescatter" else shapes
    for name in SUMMABLE:
        for op in (hvd.Average, hvd.Sum):
            parts = [inputs(name, shape, size, seed) for seed, shape in enumerate(shapes)]
            mine = [part[rank].copy() for part in parts]
            for part, before, out in zip(parts, mine, REDUCESCATTERS[variant](mine, op=op), strict=True):
                what = f"{variant} of {name} {part[0].shape} {op!r}"
                same(out, reduced(op, part)[rows(len(part[0]), size, rank)], what)
                same(before, part[rank], f"input of {what}")


@CASES.add()
def scales_go_before_and_after() -> None:
    size, rank = hvd.size(), hvd.rank()
    for name in SCALABLE:
        for op in (hvd.Average, hvd.Sum):
            for scales in ((0.5, 1.0), (1.0, 3.0), (0.25, 2.5), (-1.5, 0.3)):
                how: dict[str, Any] = {"op": op, "prescale_factor": scales[0], "postscale_factor": scales[1]}
                for variant in ("allreduce_async", "grouped_allreduce_async_"):
                    check_allreduce(variant, SHAPES[:4], name, **how)
                part = inputs(name, (5, 2), size)
                got = hvd.reducescatter(part[rank].copy(), **how)
                same(got, reduced(op, part, *scales)[rows(5, size, rank)], f"scattered {name} {scales}")


@CASES.add()
def average_of_integers_truncates_toward_zero() -> None:
    size = hvd.size()
    for total in (-7, 7, -1, 1, -8, 3):
        mine = np.array([total if hvd.rank() == 0 else 0], np.int32)
        want = int(total / size)
        assert hvd.allreduce(mine).tolist() == [want], (total, size)
        assert hvd.reducescatter(np.repeat(mine, size)).tolist() == [want], (total, size)
    if size == 2:
        assert hvd.allreduce(np.array([-7 if hvd.rank() else 0], np.int64)).tolist() == [-3]


@CASES.add()
def integers_are_scaled_at_each_stage() -> None:
    """Integers truncate twice: 3 * 0.5 is 1 on every rank before the sum, and the sum times 0.5 truncates."""
    got = hvd.allreduce(np.full(2, 3), op=hvd.Sum, prescale_factor=0.5, postscale_factor=0.5)
    assert got.tolist() == [hvd.size() // 2] * 2


@CASES.add(*SEVERAL)
def integers_wrap_silently() -> None:
    got = hvd.allreduce(np.array([200, 255], np.uint8), op=hvd.Sum)
    assert got.tolist() == [200 * hvd.size() % 256, 255 * hvd.size() % 256]
    high = np.array([np.iinfo(np.int64).max])
    assert hvd.allreduce(high, op=hvd.Sum)[0] == ((2**63 - 1) * hvd.size() + 2**63) % 2**64 - 2**63


@CASES.add()
def bool_knows_any_and_all() -> None:
    mine = np.array([is_last(), True, False])
    assert hvd.allreduce(mine, op=hvd.Max).tolist() == [True, True, False]
    assert hvd.allreduce(mine, op=hvd.Min).tolist() == [hvd.size() == 1, True, False]
    assert hvd.allreduce(mine, op=hvd.Product).tolist() == [hvd.size() == 1, True, False]


@CASES.add()
def what_a_dtype_cannot_do_is_refused() -> None:
    for name, info in INFO.items():
        # On 3 ranks, the call refuses Adasum before it checks the dtype.
        for op in set(ReduceOp) - info.ops - ({ReduceOp.ADASUM} if hvd.size() == 3 else set()):
            with pytest.raises(hvd.UnsupportedDtypeError, match=name):
                hvd.allreduce(np.zeros(2, DTYPES[name]), op=op)
    with pytest.raises(hvd.UnsupportedDtypeError, match="bool cannot be scaled"):
        hvd.allreduce(np.zeros(2, bool), op=hvd.Max, prescale_factor=2.0)
    for op in (hvd.Min, hvd.Max, hvd.Product):
        with pytest.raises(hvd.UnsupportedOpError) as caught:
            hvd.reducescatter(np.zeros(4), op=op)
        assert isinstance(caught.value, ValueError)
        assert isinstance(caught.value, hvd.HorovodInternalError)
    with pytest.raises(ValueError, match="op or average"):
        hvd.allreduce(np.zeros(4), average=True, op=hvd.Sum)
    with pytest.raises(ValueError, match="op=17"):
        hvd.allreduce(np.zeros(4), op=17)  # type: ignore[arg-type]
    for factor in (float("nan"), float("inf"), None):
        with pytest.raises(ValueError, match="prescale"):
            hvd.allreduce(np.zeros(4), prescale_factor=factor)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="two"):
        hvd.reducescatter(np.zeros(4), postscale_factor="two")  # type: ignore[arg-type]


@CASES.add()
def default_op_is_average() -> None:
    mine = np.full(3, float(hvd.rank()), np.float32)
    want = np.full(3, sum(range(hvd.size())) / hvd.size(), np.float32)
    same(hvd.allreduce(mine), reduced(hvd.Average, [np.full(3, r, np.float32) for r in range(hvd.size())]))
    assert np.allclose(hvd.grouped_allreduce([mine])[0], want)
    assert np.allclose(hvd.reducescatter(np.repeat(mine, hvd.size())), want)


@CASES.add()
def halves_accumulate_in_float32() -> None:
    """2048 + 1 is 2048 in float16: a sum with a rounding per step would lose every 1."""
    size = hvd.size()
    for name, big in (("float16", 2048.0), ("bfloat16", 256.0)):
        mine = np.array([big if hvd.rank() == 0 else 1.0], DTYPES[name])
        got = hvd.allreduce(mine, op=hvd.Sum)
        want = np.array([np.float32(big + size - 1)], np.float32).astype(DTYPES[name])
        same(got, want, name)
        if size > 2:
            assert float(got[0]) > big, name


@CASES.add()
def empty_groups_and_empty_tensors() -> None:
    assert hvd.grouped_allreduce([]) == []
    assert hvd.grouped_reducescatter([]) == []
    assert hvd.grouped_allgather([]) == []
    empty = np.empty((0, 3), np.float32)
    for op in OPS["float32"]:
        same(hvd.allreduce(empty, op=op), empty)
        assert hvd.allreduce_(empty, op=op) is empty
    same(hvd.reducescatter(empty), empty)


@CASES.add()
def groups_mix_dtypes_and_shapes() -> None:
    names = [name for name in SUMMABLE for _ in range(2)]
    parts = [inputs(name, SHAPES[i % len(SHAPES)], hvd.size(), i) for i, name in enumerate(names)]
    mine: list[Array] = [part[hvd.rank()] for part in parts]
    for got, part in zip(hvd.grouped_allreduce(tuple(mine), op=hvd.Sum, name="mix"), parts, strict=True):
        same(got, reduced(hvd.Sum, part), str(part[0].dtype))
    for bad in (np.zeros(3), 5, "abc", None):
        error = outcome(lambda bad=bad: hvd.grouped_allreduce(bad))  # type: ignore[misc]
        assert isinstance(error, TypeError), repr(bad)
