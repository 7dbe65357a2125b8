"""What the ranks' sizes make of a remembered call: the plans of all ranks together do what the verb says."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import given, settings, strategies as st

from pyhvd.backends.host import rows_of
from pyhvd.dtypes import Code
from pyhvd.engine.plans import LocalMove, Plan, make_plan
from pyhvd.negotiation.messages import Request, RequestType

Arrays = list[np.ndarray[Any, np.dtype[np.uint8]]]

SIZES = st.integers(1, 5)
ROWS = st.integers(0, 4)


def _plans(kind: RequestType, shapes: list[tuple[int, ...]], **terms: Any) -> list[Plan]:
    """Return the plans of all ranks, which are the global ranks 10, 11, ..."""
    members = range(10, 10 + len(shapes))
    dims = [shape[0] for shape in shapes] if kind == RequestType.ALLGATHER else ()
    splits = terms.pop("splits", None)
    return [
        make_plan(Request(kind, "x", Code.INT16, shape, **terms), rank, members, dims, splits)
        for rank, shape in enumerate(shapes)
    ]


def _carry_out(moves: list[LocalMove], sources: Arrays, targets: Arrays) -> None:
    """Move bytes as the window does; check that the parts are sorted, not empty, and within their lanes."""
    longest = {move.longest for move in moves}
    assert len(longest) == 1
    lanes = [np.full(max(longest), 0xAA, np.uint8) for _ in moves]
    for rank, (move, source) in enumerate(zip(moves, sources, strict=True)):
        for parts in (move.sources, move.targets):
            ends = [(lane, offset + nbytes) for lane, offset, nbytes, _ in parts.tolist()]
            starts = [(lane, offset) for lane, offset, _, _ in parts.tolist()]
            assert starts == sorted(starts)
            assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
            assert all(end <= move.longest for _, end in ends)
            assert all(nbytes > 0 for nbytes in parts[:, 2])
        assert {*move.sources[:, 0].tolist()} <= {rank}
        assert rank not in move.targets[:, 0]
        for lane, offset, nbytes, at in move.sources.tolist():
            lanes[lane][offset : offset + nbytes] = source[at : at + nbytes]
    for move, source, target in zip(moves, sources, targets, strict=True):
        taken, into, nbytes = move.own
        target[into : into + nbytes] = source[taken : taken + nbytes]
        for lane, offset, count, at in move.targets.tolist():
            target[at : at + count] = lanes[lane][offset : offset + count]


def _moves(plans: list[Plan]) -> list[LocalMove]:
    moves = [plan.move for plan in plans if plan.move is not None]
    assert len(moves) == len(plans)
    return moves


def _values(rank: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(rank).integers(0, 256, nbytes, np.uint8)


@settings(deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=5), st.integers(0, 3))
def test_allgather(dims: list[int], width: int) -> None:
    plans = _plans(RequestType.ALLGATHER, [(n, width) for n in dims])
    sources = [_values(rank, 2 * n * width) for rank, n in enumerate(dims)]
    targets = [np.zeros(2 * sum(dims) * width, np.uint8) for _ in dims]
    _carry_out(_moves(plans), sources, targets)
    for plan, target in zip(plans, targets, strict=True):
        assert (plan.rows, plan.beside) == (sum(dims), tuple(dims))
        assert target.tobytes() == b"".join(source.tobytes() for source in sources)


@settings(deadline=None)
@given(SIZES, st.data(), st.integers(0, 20))
def test_broadcast(size: int, data: st.DataObject, count: int) -> None:
    root = data.draw(st.integers(0, size - 1))
    plans = _plans(RequestType.BROADCAST, [(count,)] * size, root=10 + root)
    sources = [_values(rank, 2 * count) for rank in range(size)]
    targets = [np.zeros(2 * count, np.uint8) for _ in range(size)]
    _carry_out(_moves(plans), sources, targets)
    assert all(target.tobytes() == sources[root].tobytes() for target in targets)


@settings(deadline=None)
@given(SIZES, st.data(), st.integers(0, 3))
def test_alltoall(size: int, data: st.DataObject, width: int) -> None:
    rows = st.lists(st.lists(ROWS, min_size=size, max_size=size), min_size=size, max_size=size)
    splits = np.array(data.draw(rows), np.int64).reshape(size, size)
    plans = _plans(RequestType.ALLTOALL, [(int(row.sum()), width) for row in splits], splits=splits)
    sources = [_values(rank, int(2 * splits[rank].sum() * width)) for rank in range(size)]
    targets = [np.zeros(int(2 * splits[:, rank].sum() * width), np.uint8) for rank in range(size)]
    _carry_out(_moves(plans), sources, targets)
    for rank, (plan, target) in enumerate(zip(plans, targets, strict=True)):
        blocks = [
            np.split(source, np.cumsum(splits[q])[:-1] * 2 * width)[rank] for q, source in enumerate(sources)
        ]
        assert target.tobytes() == b"".join(block.tobytes() for block in blocks)
        assert plan.rows == splits[:, rank].sum()
        assert plan.beside.tolist() == splits[:, rank].tolist()
        assert plan.splits == tuple(splits[rank])
        total = int(splits[rank].sum())
        assert plan.even == (total % size == 0 and [*plan.splits] == rows_of(total, size))


@given(SIZES, st.lists(st.integers(0, 5), min_size=1, max_size=3))
def test_reducescatter(size: int, shape: list[int]) -> None:
    plans = _plans(RequestType.REDUCESCATTER, [tuple(shape)] * size)
    for rank, plan in enumerate(plans):
        assert plan.portions is not None
        counts = np.diff(plan.portions).tolist()
        assert plan.portions[0] == 0
        assert counts == [n * math.prod(shape[1:]) for n in rows_of(shape[0], size)]
        assert plan.rows == rows_of(shape[0], size)[rank]


def test_verbs_without_sizes_have_no_plan() -> None:
    plan = make_plan(Request(RequestType.ALLREDUCE, "x", Code.INT16, (3,)), 0, [0, 1], (), None)
    assert (plan.rows, plan.move, plan.portions) == (-1, None, None)
    plan = make_plan(Request(RequestType.BARRIER, "x"), 0, [0, 1], (), None)
    assert (plan.rows, plan.move, plan.portions) == (-1, None, None)
