"""Same input, same bits: for every fusion, every fabric and every configuration.

The tests run :func:`digests` under several configurations, on threads and on processes. Its result must be
the same in all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np

import pyhvd as hvd
from tests.conformance.cases import Cases
from tests.conformance.oracle import DTYPES, OPS, Array, inputs, reduced, same

CASES = Cases()


def varying(name: str, count: int, rank: int, seed: int = 7) -> Array:
    """Return floats of widely varying magnitude, whose sum depends on the order of summation."""
    rng = np.random.default_rng([seed, rank])
    top = 4.0 if name == "float16" else 12.0
    return np.asarray(rng.normal(size=count) * 10.0 ** rng.uniform(-top, top, count)).astype(DTYPES[name])


def _parts(name: str, count: int) -> list[Array]:
    with np.errstate(over="ignore"):
        return [varying(name, count, rank) for rank in range(hvd.size())]


WAYS: dict[str, Callable[[Array], Array]] = {
    "alone": lambda x: hvd.allreduce(x, op=hvd.Sum),
    "in place": lambda x: hvd.allreduce_(x, op=hvd.Sum),
    "prescale 1": lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=1.0, postscale_factor=1.0),
    "group of one": lambda x: hvd.grouped_allreduce([x], op=hvd.Sum)[0],
    "end of a group": lambda x: hvd.grouped_allreduce([x[:5], x[:100], x], op=hvd.Sum)[2],
    "strided": lambda x: hvd.allreduce(np.repeat(x, 2)[::2], op=hvd.Sum),
    "named": lambda x: hvd.allreduce(x, op=hvd.Sum, name="det"),
    "cached": lambda x: hvd.allreduce(x, op=hvd.Sum, name="det"),
}


@CASES.add()
def company_does_not_matter() -> None:
    """Return floats of three dtypes, in sizes below and above the fusion threshold."""
    for name in ("float32", "float64", "float16", "bfloat16", "complex64"):
        for count in (1, 1000, 40_000):
            parts = _parts(name, count)
            want = reduced(hvd.Sum, parts)
            for way, call in WAYS.items():
                same(call(parts[hvd.rank()].copy()), want, f"{count} of {name}, {way}")


@CASES.add()
def position_does_not_matter() -> None:
    parts = _parts("float32", 3000)
    want = reduced(hvd.Sum, parts)
    mine = parts[hvd.rank()]
    for before in (0, 1, 3, 20):
        company = [hvd.allreduce_async(mine[: 17 * i + 1], op=hvd.Sum) for i in range(before)]
        handle = hvd.allreduce_async(mine, op=hvd.Sum)
        company += [hvd.allreduce_async(mine[i:], op=hvd.Sum) for i in range(5)]
        same(handle.result(), want, f"behind {before}")
        for i, other in enumerate(company[before:]):
            same(other.result(), want[i:], f"shifted by {i}")
        for i, other in enumerate(company[:before]):
            same(other.result(), want[: 17 * i + 1], f"cut to {17 * i + 1}")


@CASES.add()
def scattered_like_reduced() -> None:
    for name in ("float32", "bfloat16"):
        parts = _parts(name, 1200)
        shaped = parts[hvd.rank()].reshape(12, 100)
        mine = hvd.reducescatter(shaped, op=hvd.Sum)
        same(hvd.allgather(mine).reshape(-1), reduced(hvd.Sum, parts), name)


def digests() -> list[str]:
    """Return one digest per dtype, over every op, alone and fused, and over several sizes."""
    result = []
    for name in DTYPES:
        digest = hashlib.sha256()
        handles = []
        for op in OPS[name]:
            for seed, shape in enumerate(((1,), (333,), (7, 11), (5001,))):
                mine = inputs(name, shape, hvd.size(), seed)[hvd.rank()]
                handles.append(hvd.allreduce_async(mine, op=op))
            if op in (hvd.Sum, hvd.Average):
                handles.append(hvd.reducescatter_async(mine, op=op))
        if hvd.Sum in OPS[name]:
            handles.append(hvd.allreduce_async(mine, op=hvd.Sum, prescale_factor=0.3, postscale_factor=1.7))
        for handle in handles:
            digest.update(handle.result().tobytes())
        result.append(f"{name} {digest.hexdigest()[:16]}")
    return result
