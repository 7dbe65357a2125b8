"""Compare the NCCL backend with numpy; ranks are threads with fake devices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from pyhvd.backends.gpu.nccl_bindings import reduction, version_text
from pyhvd.backends.host import rows_of
from pyhvd.devices.base import Span
from pyhvd.dtypes import BITWISE_OPS, BY_CODE, Code, ReduceOp, ReduceSpec
from tests.devices.fake import dtype_of
from tests.devices.fake_nccl import FakeNccl
from tests.devices.nccl_ranks import Rank, good, numbers, on_ranks

Array = np.ndarray[Any, Any]

SIZES = (1, 2, 3, 4)


def reduced(parts: Sequence[Array], op: ReduceOp) -> Array:
    how: Any = {ReduceOp.SUM: np.add, ReduceOp.PRODUCT: np.multiply, ReduceOp.MIN: np.minimum}.get(
        op, np.maximum
    )
    result = parts[0]
    for part in parts[1:]:
        result = how(result, part).astype(result.dtype)
    return result


REDUCTIONS = [
    (code, op)
    for code in Code
    for op in (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)
    if op in BY_CODE[code].ops and reduction(FakeNccl(), code, op)
]
each_reduction = pytest.mark.parametrize(("code", "op"), REDUCTIONS, ids=lambda value: value.name)
each_size = pytest.mark.parametrize("size", SIZES)


@each_reduction
@pytest.mark.parametrize("tensors", [1, 3])
def test_allreduce(code: Code, op: ReduceOp, tensors: int) -> None:
    counts = [100, 7, 0][:tensors]

    def work(rank: Rank) -> list[Array]:
        sources = [rank.array(numbers(code, (n,), rank.rank, i)) for i, n in enumerate(counts)]
        targets = [rank.array(np.zeros(n, dtype_of(code))) for n in counts]
        rank.nccl.allreduce(sources, targets, counts, ReduceSpec(BY_CODE[code], op))
        return [rank.look(target) for target in targets]

    for found in good(on_ranks(3, work)):
        for i, (got, n) in enumerate(zip(found, counts, strict=True)):
            want = reduced([numbers(code, (n,), r, i) for r in range(3)], op)
            np.testing.assert_array_equal(got, want)


@settings(max_examples=60)
@given(
    counts=st.lists(st.integers(0, 90), min_size=1, max_size=5),
    shifts=st.lists(st.integers(0, 3), min_size=12, max_size=12),
    factors=st.sampled_from([(1.0, 1.0), (0.5, 1.0), (1.0, 0.25), (2.0, 0.5)]),
    size=st.sampled_from(SIZES),
    seed=st.integers(0, 1000),
    joined=st.sets(st.integers(1, 3)),
)
def test_allreduce_wherever_tensors_lie_and_whoever_has_joined(
    counts: list[int],
    shifts: list[int],
    factors: tuple[float, float],
    size: int,
    seed: int,
    joined: set[int],
) -> None:
    prescale, postscale = factors
    info = BY_CODE[Code.FLOAT32]
    spec = ReduceSpec(info, ReduceOp.SUM, prescale, postscale)

    def work(rank: Rank) -> list[Array]:
        if rank.rank in joined:
            none = [None] * len(counts)
            rank.nccl.allreduce(none, none, counts, spec)
            rank.finish()
            return []
        sources = [
            rank.array(numbers(info.code, (n,), rank.rank, i), shifts[i + rank.rank])
            for i, n in enumerate(counts)
        ]
        targets = [
            rank.array(np.zeros(n, np.float32), shifts[7 + i - rank.rank]) for i, n in enumerate(counts)
        ]
        rank.nccl.allreduce(sources, targets, counts, spec)
        return [rank.look(target) for target in targets]

    present = [r for r in range(size) if r not in joined]
    results = good(on_ranks(size, work, seed=seed))
    for r in present:
        for i, n in enumerate(counts):
            total = sum(numbers(Code.FLOAT32, (n,), other, i) for other in present)
            np.testing.assert_array_equal(results[r][i], total * prescale * postscale)


def test_one_tensor_alone_is_not_packed() -> None:
    def work(rank: Rank) -> int:
        source = rank.array(np.ones(1000, np.float32))
        before = rank.device.allocated
        rank.nccl.allreduce([source], [source], [1000], ReduceSpec(source.info, ReduceOp.SUM, 1.0, 0.5))
        assert (rank.look(source) == 1.0).all()
        return rank.device.allocated - before

    assert good(on_ranks(2, work)) == [0, 0]


def test_the_buffer_is_used_again_and_a_large_one_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyhvd.devices.fusion_buffer.KEPT", 10_000)

    def work(rank: Rank) -> list[int]:
        kept = []
        for count in (100, 1000, 500, 2000, 100):
            pair = [rank.array(np.ones(count, np.float32)) for _ in range(2)]
            rank.finish()
            before = rank.device.allocated
            rank.nccl.allreduce(pair, pair, [count] * 2, ReduceSpec(pair[0].info, ReduceOp.SUM))
            assert (rank.look(pair[1]) == 2.0).all()
            kept.append(rank.device.allocated - before)
        return kept

    assert good(on_ranks(2, work))[0] == [800, 7200, 0, -8000, 800]


@each_size
@pytest.mark.parametrize("factors", [(1.0, 1.0), (2.0, 0.5), (1.0, 0.5)])
@pytest.mark.parametrize("shapes", [[(8, 3)], [(7, 3)], [(0, 2)], [(2,), (5, 2), (12,)]])
@pytest.mark.parametrize("shift", [0, 1])
def test_reducescatter(
    size: int, factors: tuple[float, float], shapes: list[tuple[int, ...]], shift: int
) -> None:
    info = BY_CODE[Code.FLOAT32]

    def work(rank: Rank) -> list[Array]:
        behind = shift * (rank.rank % 3)  # a different tensor on each rank
        sources = [rank.array(numbers(info.code, s, rank.rank, i), behind) for i, s in enumerate(shapes)]
        mine = [(rows_of(s[0], size)[rank.rank], *s[1:]) for s in shapes]
        targets = [rank.array(np.zeros(s, np.float32), behind) for s in mine]
        rank.nccl.reducescatter(sources, targets, shapes, ReduceSpec(info, ReduceOp.SUM, *factors))
        return [rank.look(target) for target in targets]

    results = good(on_ranks(size, work, seed=size))
    for i, shape in enumerate(shapes):
        total = sum(numbers(info.code, shape, r, i) for r in range(size)) * math.prod(factors)
        np.testing.assert_array_equal(np.concatenate([found[i] for found in results]), total)


@pytest.mark.parametrize("tensors", [1, 2])
@pytest.mark.parametrize("shape", [(5, 2), (6, 2)])
def test_reducescatter_of_a_rank_that_has_joined(shape: tuple[int, int], tensors: int) -> None:
    info = BY_CODE[Code.INT32]

    def work(rank: Rank) -> list[Array]:
        def scatter(sources: list[Any], targets: list[Any]) -> None:
            rank.nccl.reducescatter(sources, targets, [shape] * tensors, ReduceSpec(info, ReduceOp.MAX))

        if rank.rank == 1:
            scatter([None] * tensors, [None] * tensors)
            rank.finish()
            return []
        sources = [rank.array(numbers(info.code, shape, 0, i) - 9) for i in range(tensors)]
        targets = [rank.array(np.zeros((3, 2), np.int32)) for _ in range(tensors)]
        scatter(sources, targets)
        return [rank.look(target) for target in targets]

    found, nothing = good(on_ranks(2, work))
    assert nothing == []
    for i, got in enumerate(found):
        np.testing.assert_array_equal(got, (numbers(info.code, shape, 0, i) - 9)[:3])


@settings(max_examples=40)
@given(
    counts=st.lists(st.lists(st.integers(0, 40), min_size=4, max_size=4), min_size=1, max_size=4),
    size=st.sampled_from(SIZES),
    seed=st.integers(0, 1000),
)
def test_allgather(counts: list[list[int]], size: int, seed: int) -> None:
    counts = [each[:size] for each in counts]
    counts.append([16] * size)  # an even one

    def values(tensor: int, rank: int) -> Array:
        return np.random.default_rng([tensor, rank]).integers(0, 256, counts[tensor][rank], np.uint8)

    def work(rank: Rank) -> list[Array]:
        sources = [
            rank.array(values(i, rank.rank)) if each[rank.rank] else None for i, each in enumerate(counts)
        ]
        targets = [rank.array(np.zeros(sum(each), np.uint8)) for each in counts]
        rank.nccl.allgather(sources, [target.span for target in targets], counts)
        return [rank.look(target) for target in targets]

    for found in good(on_ranks(size, work, seed=seed)):
        for i, got in enumerate(found):
            np.testing.assert_array_equal(got, np.concatenate([values(i, r) for r in range(size)]))


@each_size
def test_broadcast(size: int) -> None:
    def work(rank: Rank) -> list[Array]:
        found = []
        for root in range(size):
            view = rank.array(np.full(9, rank.rank, np.int64))
            rank.nccl.broadcast(view.span, root)
            found.append(rank.look(view))
        rank.nccl.broadcast(Span(0, 0), 0)
        return found

    for found in good(on_ranks(size, work)):
        assert [set(each.tolist()) for each in found] == [{root} for root in range(size)]


@settings(max_examples=40)
@given(
    sizes=st.lists(st.lists(st.integers(0, 30), min_size=4, max_size=4), min_size=4, max_size=4),
    size=st.sampled_from(SIZES),
    seed=st.integers(0, 1000),
)
def test_alltoall(sizes: list[list[int]], size: int, seed: int) -> None:
    """Test an alltoall in which rank a sends ``sizes[a][b]`` bytes to rank b."""

    def block(a: int, b: int) -> Array:
        return np.random.default_rng([a, b]).integers(0, 256, sizes[a][b], np.uint8)

    def work(rank: Rank) -> Array:
        me = rank.rank
        given_counts, taken_counts = sizes[me][:size], [sizes[r][me] for r in range(size)]
        send = rank.array(np.concatenate([block(me, r) for r in range(size)]))
        recv = rank.array(np.zeros(sum(taken_counts), np.uint8))
        rank.nccl.alltoall(send.span, given_counts, recv.span, taken_counts)
        return rank.look(recv)

    for me, found in enumerate(good(on_ranks(size, work, seed=seed))):
        np.testing.assert_array_equal(found, np.concatenate([block(r, me) for r in range(size)]))


# -- what NCCL has ---------------------------------------------------------------------------------------


def test_what_nccl_cannot_reduce_is_known_beforehand() -> None:
    refused = {
        (code, op)
        for code in Code
        for op in (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)
        if op in BY_CODE[code].ops and reduction(FakeNccl(), code, op) is None
    }
    words = {(c, o) for c, o in itertools.product((Code.INT16, Code.UINT16), BY_CODE[Code.INT16].ops)}
    products = {(Code.COMPLEX64, ReduceOp.PRODUCT), (Code.COMPLEX128, ReduceOp.PRODUCT)}
    assert refused == {pair for pair in words if pair[1] not in {ReduceOp.AVERAGE, *BITWISE_OPS}} | products


def test_versions_are_shown_as_nccl_writes_them() -> None:
    assert [version_text(number) for number in (23203, 22304, 21000, 2708)] == [
        "2.32.3",
        "2.23.4",
        "2.10.0",
        "2.7.8",
    ]


def test_the_names_of_types_are_those_of_the_library() -> None:
    class Old(FakeNccl):
        def __getattribute__(self, name: str) -> Any:
            if name == "NCCL_BFLOAT16":
                raise AttributeError(name)
            return super().__getattribute__(name)

    assert reduction(Old(), Code.BFLOAT16, ReduceOp.SUM) is None
    assert reduction(Old(), Code.FLOAT16, ReduceOp.SUM) == (6, 0, 1)


def test_what_nccl_cannot_reduce_goes_by_the_host() -> None:
    def work(rank: Rank) -> list[str]:
        view = rank.array(np.ones((4, 2), np.int16))
        rank.nccl.allreduce([view], [view], [8], ReduceSpec(view.info, ReduceOp.SUM))
        rank.nccl.reducescatter([view], [view], [(4, 2)], ReduceSpec(view.info, ReduceOp.SUM))
        rank.nccl.broadcast(view.span, 0)
        rank.finish()
        rank.nccl.close()
        asked: list[str] = rank.by_host.asked
        return asked

    assert good(on_ranks(2, work)) == [["allreduce", "reducescatter", "close"]] * 2
