"""Cases of op=Adasum, compared with a float64 reference that implements the formula and the tree alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import pyhvd as hvd
from tests.conformance.cases import Cases, is_last, last, outcome, raised
from tests.conformance.oracle import DTYPES, Array, same
from tests.conformance.reductions import ALLREDUCES

CASES = Cases()
POWERS = (1, 2, 4)

ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
"""Largest relative error of one rounding."""


def of_two(a: Array, b: Array) -> Array:
    """Combine two vectors by the formula, in float64; a zero vector leaves the other unchanged."""
    dot = float(a @ b)
    share_a = dot / float(a @ a) / 2 if a.any() else 0.0
    share_b = dot / float(b @ b) / 2 if b.any() else 0.0
    return np.asarray((1 - share_a) * a + (1 - share_b) * b)


def reference(vectors: Sequence[Array]) -> Array:
    """Return Adasum of the ranks' arrays in float64; it combines the ranks' lower and upper half."""
    if len(vectors) == 1:
        return np.asarray(vectors[0], np.float64).reshape(-1)
    half = len(vectors) // 2
    return of_two(reference(vectors[:half]), reference(vectors[half:]))


def check(got: Any, parts: Sequence[Array], prescale: float = 1.0, postscale: float = 1.0) -> None:
    """Compare a result with the reference; only the last digits may differ."""
    assert got.dtype == parts[0].dtype
    assert got.shape == parts[0].shape
    with np.errstate(all="ignore"):
        want = postscale * reference([part.astype(np.float64) * prescale for part in parts])
    # Each level rounds once to float32 or float64, and the result once to its dtype, relative to the maximum.
    name = parts[0].dtype.name
    inner = ROUNDING["float64" if name == "float64" else "float32"]
    bound = (ROUNDING[name] + 8 * inner * len(parts)) * float(np.abs(want).max(initial=0.0))
    worst = float(np.abs(got.astype(np.float64).reshape(-1) - want).max(initial=0.0))
    assert worst <= bound, f"{name} {parts[0].shape}: off by {worst}, {bound} are allowed"


def vectors(name: str, shape: Sequence[int], seed: int = 0) -> list[Array]:
    """Return random tensors with a common part, so that neither their sum nor their average is right."""
    rng = np.random.default_rng([seed, *shape])
    common = rng.normal(size=tuple(shape))
    return [
        np.asarray(common + rng.normal(size=tuple(shape))).astype(DTYPES[name]) for _ in range(hvd.size())
    ]


@CASES.add_each(ALLREDUCES, *POWERS)
def adasum_variants(variant: str) -> None:
    for name in ROUNDING:
        shapes = ((33,), (3, 4), (), (0,), (5,), (1, 7, 2), (3000,))
        parts = [vectors(name, shape, seed) for seed, shape in enumerate(shapes)]
        mine = [part[hvd.rank()].copy() for part in parts]
        for part, before, out in zip(parts, mine, ALLREDUCES[variant](mine, op=hvd.Adasum), strict=True):
            check(out, part)
            assert (out is before) == variant.endswith("_")
            if not variant.endswith("_"):
                same(before, part[hvd.rank()], "input")


@CASES.add(*POWERS)
def adasum_of_orthogonal_vectors_is_their_sum() -> None:
    """Return rows of a Hadamard matrix, whose small integers make the sum exact."""
    size = hvd.size()
    rows = np.array([[1.0]])
    while len(rows) < 16:
        rows = np.block([[rows, rows], [rows, -rows]])
    for name in ROUNDING:
        for repeats in (1, 1000):
            parts = [np.tile(row, repeats).astype(DTYPES[name]) for row in rows[:size]]
            same(hvd.allreduce(parts[hvd.rank()], op=hvd.Adasum), np.asarray(sum(parts)), name)
    alone = np.zeros(7 * size, np.float32)
    alone[7 * hvd.rank() :][:7] = np.arange(1, 8) * 0.1 * (hvd.rank() + 1)
    want = np.concatenate([(np.arange(1, 8) * 0.1 * (r + 1)).astype(np.float32) for r in range(size)])
    same(hvd.allreduce(alone, op=hvd.Adasum), want, "disjoint")


@CASES.add(*POWERS)
def adasum_of_equal_vectors_is_the_vector() -> None:
    for name in ROUNDING:
        for count in (1, 1000, 40_000):
            (vector, *_) = vectors(name, (count,))
            same(hvd.allreduce(vector, op=hvd.Adasum), vector, f"{count} of {name}")
    tiniest = np.full(5, np.finfo(np.float32).smallest_subnormal)
    same(hvd.allreduce(tiniest, op=hvd.Adasum), tiniest, "a square of it is no float32")


@CASES.add(*POWERS)
def adasum_of_parallel_vectors_is_their_average() -> None:
    """Adasum of parallel vectors is right for all lengths, and for opposite directions."""
    lengths = np.array([1.0, -3.0, 0.25, 100.0])[: hvd.size()]
    direction = np.random.default_rng(5).normal(size=1000)
    got = hvd.allreduce(lengths[hvd.rank()] * direction, op=hvd.Adasum)
    assert np.allclose(got, lengths.mean() * direction, rtol=1e-13, atol=0)


@CASES.add(*POWERS)
def adasum_company_does_not_matter() -> None:
    """A tensor gets the same bits alone, fused, in a group, cached, small and large."""
    for name in ROUNDING:
        tensors = [vectors(name, (count,), count) for count in (1, 3, 100, 1001, 30_000)]
        mine = [parts[hvd.rank()] for parts in tensors]
        alone = [hvd.allreduce(x, op=hvd.Adasum) for x in mine]
        for want, parts in zip(alone, tensors, strict=True):
            check(want, parts)
        handles = [hvd.allreduce_async(x, op=hvd.Adasum) for x in [*mine, *mine[::-1]]]
        together = [handle.result() for handle in handles]
        group = hvd.grouped_allreduce(mine[::-1], op=hvd.Adasum, name="adasum company")
        again = hvd.grouped_allreduce_([x.copy() for x in mine[::-1]], op=hvd.Adasum, name="adasum company")
        ways = [together[:5], together[:4:-1], group[::-1], again[::-1]]
        for way in ways:
            for got, want in zip(way, alone, strict=True):
                same(got, want, f"{want.size} of {name}")
        strided = hvd.allreduce(np.repeat(mine[-1], 2)[::2], op=hvd.Adasum)
        same(strided, alone[-1], "strided")


@CASES.add(*POWERS)
def adasum_scales_go_before_and_after() -> None:
    for prescale, postscale in ((0.5, 1.0), (1.0, 3.0), (-1.5, 0.3), (0.0, 2.0)):
        how: dict[str, Any] = {
            "op": hvd.Adasum, "prescale_factor": prescale, "postscale_factor": postscale
        }  # fmt: skip
        waiting = []
        for name in ROUNDING:
            for count in (5, 6000):
                parts = vectors(name, (count,), count)
                mine = parts[hvd.rank()]
                group = hvd.grouped_allreduce_async([mine, mine], **how)
                alone = [hvd.allreduce_async(mine, **how), hvd.allreduce_async_(mine.copy(), **how)]
                waiting.append((parts, alone, group))
        for parts, alone, group in waiting:
            outs = [*(handle.result() for handle in alone), *group.result()]
            check(outs[0], parts, prescale, postscale)
            for out in outs:
                same(out, outs[0], "alone, in place, in a group")


@CASES.add(*POWERS)
def adasum_rounds_halves_once() -> None:
    """These sums of orthogonal vectors would differ with a rounding per level, or in float16."""
    size, rank = hvd.size(), hvd.rank()
    signs = np.array([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]])
    for name, big in (("float16", 2048.0), ("bfloat16", 256.0)):
        parts = [signs[r] * (1.0 if r else big) for r in range(size)]
        got = hvd.allreduce(parts[rank].astype(DTYPES[name]), op=hvd.Adasum)
        same(got, np.asarray(sum(parts)).astype(DTYPES[name]), name)
        if size == 4:
            assert float(got[0]) == big + 4, name
    pair = 40_000.0 * signs[rank][:2] if rank < 2 else np.zeros(2)
    got = hvd.allreduce(pair.astype(np.float16), op=hvd.Adasum, postscale_factor=0.5)
    assert got.tolist() == ([40_000.0, 0.0] if size > 1 else [20_000.0, 20_000.0])


@CASES.add(*POWERS)
def adasum_of_zeros_and_of_tiny_vectors() -> None:
    size, rank = hvd.size(), hvd.rank()
    for name in ROUNDING:
        for count in (0, 1, 30_000):
            zeros = np.zeros(count, DTYPES[name])
            same(hvd.allreduce(zeros, op=hvd.Adasum), zeros, name)
            mine = vectors(name, (count,))[0] if rank == 0 else zeros
            same(hvd.allreduce(mine, op=hvd.Adasum), vectors(name, (count,))[0], f"{name} and zeros")
    # The vectors are too short for a direction: their squares are subnormal in float64.
    short = np.full(3, 1e-160)
    same(hvd.allreduce(short, op=hvd.Adasum), np.asarray(sum([short] * size)), "tiny")
    # A short and a long vector leave each other unchanged.
    mixed = np.array([1.0, 0.0]) if rank == 0 else np.array([1e-160, 1e-160])
    want = np.array([1.0, 0.0]) if size == 1 else np.array([1.0, 1e-160 * (size - 1)])
    assert np.allclose(hvd.allreduce(mixed, op=hvd.Adasum), want, rtol=1e-15, atol=0)


@CASES.add(2, 4)
def adasum_of_what_is_not_finite() -> None:
    """The whole tensor is NaN on every rank; the tensors fused with it are right."""
    good = vectors("float32", (9,))
    for bad in (np.nan, np.inf):
        mine = np.ones(9, np.float32)
        mine[4] = bad if is_last() else 1.0
        first, second, third = hvd.grouped_allreduce([good[hvd.rank()], mine, mine[:4]], op=hvd.Adasum)
        check(first, good)
        assert np.isnan(second).all()
        same(third, mine[:4], "company")


@CASES.add(2, 4)
def adasum_with_joined_ranks() -> None:
    """A joined rank contributes zeros, the identity element."""
    size, rank = hvd.size(), hvd.rank()
    if is_last():
        while True:
            error = outcome(hvd.barrier)
            assert isinstance(error, hvd.MismatchError), repr(error)
            if len(error.per_rank) == size - 1:
                break
        # Only this rank would count unnamed calls.
        for name in ROUNDING:
            for count in (5, 40_000):
                mine = vectors(name, (count,))[rank]
                same(hvd.allreduce(mine, op=hvd.Adasum, name="alone"), mine, name)
                for got in hvd.grouped_allreduce([mine, mine], op=hvd.Adasum, name="two alone"):
                    same(got, mine, name)
        mine = vectors("float64", (6,))[rank]
        how: dict[str, Any] = {"prescale_factor": -0.5, "postscale_factor": 4.0}
        same(hvd.allreduce(mine, op=hvd.Adasum, name="alone", **how), -2.0 * mine, "scaled")
    assert hvd.join() == last()


@CASES.add(4)
def adasum_of_two_that_are_left() -> None:
    live = (1, 2)
    if hvd.rank() in live:
        for turn, name in enumerate(ROUNDING):
            parts = vectors(name, (7,))
            got = hvd.allreduce(parts[hvd.rank()], op=hvd.Adasum, name=f"left.{turn}")
            zeros = np.zeros_like(parts[0])
            check(got, [part if r in live else zeros for r, part in enumerate(parts)])
    assert hvd.join() in range(4)


@CASES.add(1, 2, 4)
def adasum_beside_other_ops_of_one_name() -> None:
    """A name cached for a sum also works for Adasum."""
    size, rank = hvd.size(), hvd.rank()
    parts = vectors("float32", (11,))
    for _ in range(3):
        for _ in range(3):
            total = hvd.allreduce(np.full(11, 2.0, np.float32), op=hvd.Sum, name="adasum or sum")
            assert total[0] == 2.0 * size
        first = hvd.allreduce(parts[rank], op=hvd.Adasum, name="adasum or sum")
        check(first, parts)
        for _ in range(3):
            same(hvd.allreduce(parts[rank], op=hvd.Adasum, name="adasum or sum"), first, "cached")
    if size > 1:
        op = hvd.Adasum if is_last() else hvd.Sum
        error = raised(hvd.allreduce_async(parts[rank], op=op, name="adasum or sum"))
        assert isinstance(error, hvd.MismatchError), repr(error)
        said = {r: value.value for r, value in error.per_rank.items()}
        assert said == {r: "adasum" if r == last() else "allreduce" for r in range(size)}
    check(hvd.allreduce(parts[rank], op=hvd.Adasum, name="adasum or sum"), parts)


@CASES.add(1, 2, 4)
def adasum_with_compression() -> None:
    parts = [part.astype(np.float16) for part in vectors("float32", (50,))]
    mine = parts[hvd.rank()].astype(np.float32)
    got = hvd.allreduce(mine, op=hvd.Adasum, compression=hvd.Compression.fp16)
    assert got.dtype == np.float32
    check(got.astype(np.float16), parts)


@CASES.add()
def what_adasum_cannot_do_is_refused() -> None:
    with pytest.raises(hvd.UnsupportedOpError, match="supports op=Average and op=Sum, not Adasum"):
        hvd.reducescatter(np.ones(4), op=hvd.Adasum)
    for name in ("int32", "uint8", "bool", "complex64") if hvd.size() != 3 else ():
        text = f"not defined for {name} .*: Adasum reduces float16, bfloat16, float32 and float64"
        with pytest.raises(hvd.UnsupportedDtypeError, match=text):
            hvd.allreduce(np.ones(4, DTYPES[name]), op=hvd.Adasum)


@CASES.add(3)
def adasum_needs_a_power_of_two() -> None:
    """Every rank raises locally, before it sends anything; the error is one that Horovod's users catch."""
    tensor = np.ones(4, np.float32)
    calls: list[Callable[[], Any]] = [
        lambda: hvd.allreduce(tensor, op=hvd.Adasum, name="odd"),
        lambda: hvd.allreduce_(tensor, op=hvd.Adasum, name="odd"),
        lambda: hvd.allreduce_async(tensor, op=hvd.Adasum, name="odd"),
        lambda: hvd.allreduce_async_(tensor, op=hvd.Adasum, name="odd"),
        lambda: hvd.grouped_allreduce([tensor], op=hvd.Adasum, name="odd"),
    ]
    for call in calls:
        for kind in (hvd.UnsupportedOpError, ValueError, NotImplementedError, hvd.HorovodInternalError):
            with pytest.raises(kind) as caught:
                call()
        assert str(caught.value) == (
            "allreduce 'odd': op=Adasum pairs ranks, so their number must be a power of two, but the process"
            " set has 3 (ranks 0-2): use a process set of 2 of them, or op=Average"
        )
    assert hvd.allreduce(tensor, op=hvd.Sum, name="odd").tolist() == [3.0] * 4


def digests() -> list[bytes]:
    """Return digests of results; they must be equal under every setting and over every fabric."""
    result = []
    for name in ROUNDING:
        tensors = [vectors(name, (count,), 3)[hvd.rank()] for count in (1, 2, 37, 5001, 70_000)]
        handles = [hvd.allreduce_async(x, op=hvd.Adasum) for x in tensors]
        how: dict[str, Any] = {"prescale_factor": 0.3, "postscale_factor": 1.7}
        group = hvd.grouped_allreduce(tensors, op=hvd.Adasum, **how)
        result += [handle.result().tobytes() for handle in handles] + [x.tobytes() for x in group]
    return result
