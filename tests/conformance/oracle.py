"""Compute the exact results of the collectives with numpy alone.

Every rank can compute every rank's input, so the ranks exchange nothing for the comparison.

1. The ranks of each host are reduced in their order, then the hosts' results in the order of the hosts.
2. float16 and bfloat16 are reduced in float32, and rounded at the end; with several hosts, also on each host.
3. Integers wrap; a product with a factor truncates them toward zero.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np

from pyhvd.dtypes import BY_CODE, Code, DtypeInfo, ReduceOp
from pyhvd.engine.context import current
from pyhvd.errors import NotInitializedError

Array = np.ndarray[Any, Any]
Dtype = np.dtype[Any]

BF16: Dtype = np.dtype(ml_dtypes.bfloat16)
INFO: dict[str, DtypeInfo] = {row.name: row for row in BY_CODE.values()}
DTYPES: dict[str, Dtype] = {name: BF16 if name == "bfloat16" else np.dtype(name) for name in INFO}
OPS: dict[str, list[ReduceOp]] = {name: sorted(row.ops - {ReduceOp.ADASUM}) for name, row in INFO.items()}
SUMMABLE = [name for name in INFO if ReduceOp.SUM in OPS[name]]
SCALABLE = [name for name, row in INFO.items() if row.scalable]
SHAPES: tuple[tuple[int, ...], ...] = ((5,), (3, 4), (), (0,), (2, 0, 3), (1, 7, 2), (33,))
_BITWISE = {ReduceOp.BAND: np.bitwise_and, ReduceOp.BOR: np.bitwise_or, ReduceOp.BXOR: np.bitwise_xor}
_HALVES = (Code.FLOAT16, Code.BFLOAT16)


def values(name: str, shape: Sequence[int], rank: int, seed: int = 0) -> Array:
    """Return one rank's input: integers of the whole range, so that sums wrap; floats of many magnitudes."""
    dtype, shape = DTYPES[name], tuple(shape)
    rng = np.random.default_rng([seed, rank, int(INFO[name].code), *shape])
    if dtype.kind == "b":
        return np.asarray(rng.integers(0, 2, shape)).astype(bool)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return np.asarray(rng.integers(info.min, info.max, shape, dtype=dtype, endpoint=True))
    spread = 10.0 ** rng.uniform(-2, 2, shape)
    real = np.asarray(rng.normal(size=shape) * spread)
    if dtype.kind == "c":
        real = real + 1j * np.asarray(rng.normal(size=shape) * spread)
    return np.asarray(real).astype(dtype)


def inputs(name: str, shape: Sequence[int], size: int, seed: int = 0) -> list[Array]:
    """Return every rank's input."""
    return [values(name, shape, rank, seed) for rank in range(size)]


def _real(array: Array) -> Array:
    return array.view(array.real.dtype) if array.dtype.kind == "c" else array


def scaled(array: Array, factor: float) -> Array:
    """Apply a scale factor by the rules of the API."""
    if factor == 1.0:
        return array
    if array.dtype.kind in "iu":
        low, high = int(np.iinfo(array.dtype).min), int(np.iinfo(array.dtype).max)
        # The rule multiplies in float64; Python's int() truncates toward zero.
        products = (array.astype(np.float64) * factor).tolist()
        return np.array([min(max(int(x), low), high) for x in products], array.dtype)
    if INFO[array.dtype.name].code in _HALVES:
        return scaled(array.astype(np.float32), factor).astype(array.dtype)
    real = _real(array)
    product: Array = real * real.dtype.type(factor)
    return product.view(array.dtype)


def _combined(op: ReduceOp, x: Array, y: Array) -> Array:
    if op is ReduceOp.MIN:
        return np.minimum(x, y)
    if op is ReduceOp.MAX:
        return np.maximum(x, y)
    if op in _BITWISE:
        return np.asarray(_BITWISE[op](x, y))
    if op is not ReduceOp.PRODUCT:
        return np.asarray(x + y)
    if x.dtype.kind == "c":
        pair = [x.real * y.real - x.imag * y.imag, x.real * y.imag + x.imag * y.real]
        return np.stack(pair, axis=-1).reshape(-1).view(x.dtype)
    return np.asarray(x * y)


def by_host(ranks: Sequence[int]) -> list[list[int]]:
    """Return the positions in ``ranks`` of each host's ranks; all of one host if there is no topology."""
    try:
        hosts = current().topology.hosts
    except NotInitializedError:
        return [list(range(len(ranks)))]
    groups: dict[int, list[int]] = {}
    for position, rank in enumerate(ranks):
        groups.setdefault(hosts[rank] if rank < len(hosts) else 0, []).append(position)
    return list(groups.values())


def reduced(
    op: ReduceOp,
    parts: Sequence[Array],
    prescale: float = 1.0,
    postscale: float = 1.0,
    size: int = 0,
    ranks: Sequence[int] | None = None,
) -> Array:
    """Return the result of an allreduce.

    ``size`` is the divisor if some ranks have joined. ``ranks`` are those of the parts; default: 0, 1, ...
    """
    dtype, shape = parts[0].dtype, parts[0].shape
    half = INFO[dtype.name].code in _HALVES
    wide = np.dtype(np.float32) if half else dtype
    with np.errstate(all="ignore"):
        flat = [scaled(part.reshape(-1), prescale).astype(wide) for part in parts]
        hosts = by_host(range(len(parts)) if ranks is None else ranks)
        partial = [
            functools.reduce(functools.partial(_combined, op), [flat[k] for k in each]) for each in hosts
        ]
        if len(hosts) > 1:
            partial = [each.astype(dtype).astype(wide) for each in partial]
        total = functools.reduce(functools.partial(_combined, op), partial)
        divisor = (size or len(parts)) if op is ReduceOp.AVERAGE else 1
        factor = postscale / divisor
        if dtype.kind in "iu" and abs(Fraction(factor) * divisor) < abs(Fraction(postscale)):
            factor = float(np.nextafter(factor, np.copysign(np.inf, factor)))  # exact quotients stay integers
        return scaled(total, factor).astype(dtype).reshape(shape)


def rows(extent: int, size: int, rank: int) -> slice:
    """Return a rank's rows of dimension 0 in a reducescatter."""
    counts = [extent // size + (r < extent % size) for r in range(size)]
    first = sum(counts[:rank])
    return slice(first, first + counts[rank])


def exchanged(parts: Sequence[Array], splits: Sequence[Sequence[int]], rank: int) -> Array:
    """Return a rank's result of an alltoall; ``splits[r]`` are the splits that rank r passed."""
    blocks = []
    for part, counts in zip(parts, splits, strict=True):
        starts = list(itertools.accumulate(counts, initial=0))
        blocks.append(part[starts[rank] : starts[rank + 1]])
    return np.concatenate(blocks)


def same(got: Any, want: Array, what: str = "") -> None:
    """Assert that type, dtype, shape and bits are equal."""
    assert isinstance(got, np.ndarray), f"{what}: got a {type(got).__name__}"
    assert got.dtype == want.dtype, f"{what}: got {got.dtype}, want {want.dtype}"
    assert got.shape == want.shape, f"{what}: got shape {got.shape}, want {want.shape}"
    if got.tobytes() != want.tobytes():
        wrong = np.flatnonzero(got.reshape(-1) != want.reshape(-1))[:5]
        raise AssertionError(
            f"{what}: {wrong.size} or more wrong, at {wrong}:"
            f" got {got.reshape(-1)[wrong]}, want {want.reshape(-1)[wrong]}"
        )
