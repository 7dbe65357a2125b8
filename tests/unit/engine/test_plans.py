"""What the ranks' sizes make of a remembered call: the plans of all ranks together do what the verb says."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import given, settings, strategies as st

from pyhvd.backends.host import rows_of
from pyhvd.dtypes import Code
from pyhvd.engine.plans import HostPlaces, LocalMove, Plan, make_plan
from pyhvd.negotiation.messages import Request, RequestType
from pyhvd.transport.moves import MoveLayout

Arrays = list[np.ndarray[Any, np.dtype[np.uint8]]]

SIZES = st.integers(1, 5)
ROWS = st.integers(0, 4)


def _plans(
    kind: RequestType, shapes: list[tuple[int, ...]], hosts: list[list[int]] | None = None, **terms: Any
) -> list[Plan]:
    """Return the plans of all ranks, which are the global ranks 10, 11, ..."""
    members = range(10, 10 + len(shapes))
    dims = [shape[0] for shape in shapes] if kind == RequestType.ALLGATHER else ()
    splits = terms.pop("splits", None)
    found = []
    for rank, shape in enumerate(shapes):
        request = Request(kind, "x", Code.INT16, shape, **terms)
        across = None if hosts is None else _around(hosts, rank)
        plan = make_plan(request, rank, members, dims, splits, across)
        assert plan is not None
        found.append(plan)
    return found


def _around(hosts: list[list[int]], rank: int) -> HostPlaces:
    return HostPlaces(MoveLayout(hosts, rank), 1 << 18, [each for ranks in hosts[::-1] for each in ranks])


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
        counts = np.diff(plan.portions.starts).tolist()
        assert plan.portions.starts[0] == 0
        assert (plan.portions.own, plan.portions.longest) == (rank, max(counts))
        assert counts == [n * math.prod(shape[1:]) for n in rows_of(shape[0], size)]
        assert plan.rows == rows_of(shape[0], size)[rank]


def test_verbs_without_sizes_have_no_plan() -> None:
    for request in (Request(RequestType.ALLREDUCE, "x", Code.INT16, (3,)), Request(RequestType.BARRIER, "x")):
        plan = make_plan(request, 0, [0, 1], (), None, None)
        assert plan is not None
        assert (plan.rows, plan.move, plan.portions) == (-1, None, None)


def test_too_many_blocks_are_not_remembered() -> None:
    hosts = [list(range(k * 256, k * 256 + 256)) for k in range(5)]
    request = Request(RequestType.REDUCESCATTER, "x", Code.INT16, (3,))
    assert make_plan(request, 0, range(1280), (), None, _around(hosts, 0)) is None


HOSTS = st.sampled_from(([[0], [1]], [[0, 1], [2, 3]], [[0, 2], [1, 3, 4]], [[1], [0, 2], [3]]))


@settings(deadline=None)
@given(HOSTS, st.data())
def test_a_result_of_all_lanes(hosts: list[list[int]], data: st.DataObject) -> None:
    """Where an all-to-all's lanes lie if payloads bring them all, in the order of the hosts that agree."""
    size = sum(map(len, hosts))
    rows = st.lists(st.lists(ROWS, min_size=size, max_size=size), min_size=size, max_size=size)
    splits = np.array(data.draw(rows), np.int64)
    plans = _plans(RequestType.ALLTOALL, [(int(row.sum()),) for row in splits], hosts, splits=splits)
    whole = b""
    sources = [_values(rank, int(2 * splits[rank].sum())) for rank in range(size)]
    for rank in _around(hosts, 0).order:
        lane = np.zeros(2 * int(splits[rank].sum() - splits[rank, rank]), np.uint8)
        for _, offset, nbytes, at in _moves(plans)[rank].sources.tolist():
            lane[offset : offset + nbytes] = sources[rank][at : at + nbytes]
        whole += lane.tobytes()
    for rank, move in enumerate(_moves(plans)):
        assert move.total == len(whole)
        assert move.starts is not None
        got = np.zeros(2 * int(splits[:, rank].sum()), np.uint8)
        taken, into, nbytes = move.own
        got[into : into + nbytes] = sources[rank][taken : taken + nbytes]
        for lane, offset, count, at in move.targets.tolist():
            first = int(move.starts[lane]) + offset
            got[at : at + count] = np.frombuffer(whole[first : first + count], np.uint8)
        blocks = [np.split(each, np.cumsum(splits[q])[:-1] * 2)[rank] for q, each in enumerate(sources)]
        assert got.tobytes() == b"".join(block.tobytes() for block in blocks)
