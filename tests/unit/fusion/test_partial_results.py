"""Errors of rounding the hosts' partial results of float16 and bfloat16: the figures of across_hosts.md."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from pyhvd import _fusion
from pyhvd.dtypes import ReduceOp, lookup
from tests.conformance.oracle import BF16, Array, Dtype

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
RANKS, LENGTH, SCALES = 8, 1 << 14, 8
HOSTS = (2, 4, 8)


def reduced(parts: Sequence[Array], factor: float = 1.0) -> Array:
    """Return the sum of arrays by pyhvd's kernels, in their dtype."""
    out = np.empty_like(parts[0])
    starts = np.array([part.ctypes.data for part in parts], np.int64)
    code = lookup(out.dtype).code
    _fusion.reduce(out.ctypes.data, starts, out.size, int(code), int(ReduceOp.SUM), factor)
    return out


def gradients(count: int, dtype: Dtype) -> list[Array]:
    """Return the ranks' gradients: noise, of several scales."""
    rng = np.random.default_rng(count)
    scales = np.repeat(10.0 ** rng.uniform(-2, 1, SCALES), LENGTH // SCALES)
    return [(rng.normal(size=LENGTH) * scales).astype(dtype) for _ in range(count)]


def error_of(got: Array, want: Array) -> float:
    """Return the RMS error, relative to each scale's RMS."""
    wrong, size = ((each.reshape(SCALES, -1) ** 2).mean(1) for each in (got.astype(float) - want, want))
    return float(np.sqrt((wrong / size).mean()))


def errors_of(hosts: int, dtype: Dtype) -> tuple[float, float, float]:
    """Return the errors of averages: partial results in float32, in the dtype, and every sum in the dtype."""
    parts = gradients(hosts * RANKS, dtype)
    want = np.sum([part.astype(float) for part in parts], axis=0) / len(parts)
    of_hosts = [parts[first : first + RANKS] for first in range(0, len(parts), RANKS)]
    wide = [reduced([part.astype(F32) for part in each]) for each in of_hosts]
    in_turn = parts[0]
    for part in parts[1:]:
        in_turn = reduced([in_turn, part])
    factor = 1 / len(parts)
    return (
        error_of(reduced(wide, factor).astype(dtype), want),
        error_of(reduced([reduced(each) for each in of_hosts], factor), want),
        error_of(reduced([in_turn], factor), want),
    )


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_rounded_partial_results_cost_half_a_rounding_on_any_number_of_hosts(dtype: Dtype) -> None:
    for hosts in HOSTS:
        once, rounded, in_turn = errors_of(hosts, dtype)
        print(f"{dtype} {hosts} hosts: {once:.1e} {rounded:.1e} {in_turn:.1e}")
        assert once < rounded < 1.6 * once
        assert in_turn > 1.8 * rounded
