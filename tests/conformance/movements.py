"""Cases of allgather, broadcast, alltoall and barrier; :mod:`tests.conformance.oracle` gives the results."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pyhvd as hvd
from tests.conformance.cases import SEVERAL, Cases
from tests.conformance.oracle import DTYPES, SHAPES, Array, exchanged, inputs, same, values

CASES = Cases()


def _finish(handles: list[hvd.Handle]) -> list[Any]:
    return [hvd.synchronize(handle) for handle in handles]


ALLGATHERS: dict[str, Callable[[list[Array]], list[Any]]] = {
    "allgather": lambda ts: [hvd.allgather(t) for t in ts],
    "allgather_async": lambda ts: _finish([hvd.allgather_async(t) for t in ts]),
    "grouped_allgather": lambda ts: hvd.grouped_allgather(ts),
    "grouped_allgather_async": lambda ts: hvd.grouped_allgather_async(ts).result(),
}
BROADCASTS: dict[str, Callable[[list[Array], int], list[Any]]] = {
    "broadcast": lambda ts, root: [hvd.broadcast(t, root) for t in ts],
    "broadcast_async": lambda ts, root: _finish([hvd.broadcast_async(t, root) for t in ts]),
    "broadcast_": lambda ts, root: [hvd.broadcast_(t, root) for t in ts],
    "broadcast_async_": lambda ts, root: _finish([hvd.broadcast_async_(t, root) for t in ts]),
}
TRAILING: tuple[tuple[int, ...], ...] = ((), (3,), (2, 2), (0,))


def _extents(kind: str, size: int) -> list[int]:
    """Return each rank's length of dimension 0."""
    return {
        "even": [3] * size,
        "uneven": [r + 1 for r in range(size)],
        "some none": [(r % 2) * 4 for r in range(size)],
        "one": [5 if r == size - 1 else 0 for r in range(size)],
        "none": [0] * size,
    }[kind]


@CASES.add_each(ALLGATHERS)
def every_dtype_gathered(variant: str) -> None:
    size, rank = hvd.size(), hvd.rank()
    for name in DTYPES:
        parts = [
            [values(name, (n, *tail), r, seed) for r, n in enumerate(_extents(kind, size))]
            for seed, kind in enumerate(("even", "uneven", "some none", "one", "none"))
            for tail in TRAILING[: 2 if variant == "allgather" else 4]
        ]
        mine = [part[rank].copy() for part in parts]
        for part, before, got in zip(parts, mine, ALLGATHERS[variant](mine), strict=True):
            what = f"{variant} of {name} {[p.shape for p in part]}"
            same(got, np.concatenate(part), what)
            assert not np.shares_memory(got, before), what
            same(before, part[rank], f"input of {what}")


@CASES.add_each(BROADCASTS)
def every_dtype_broadcast(variant: str) -> None:
    size, rank = hvd.size(), hvd.rank()
    for seed, name in enumerate(DTYPES):
        root = seed % size
        parts = [inputs(name, shape, size, seed) for shape in SHAPES]
        mine = [part[rank].copy() for part in parts]
        for part, before, got in zip(parts, mine, BROADCASTS[variant](mine, root), strict=True):
            what = f"{variant} of {name} {part[0].shape} from {root}"
            same(got, part[root], what)
            assert (got is before) == variant.endswith("_"), what
            if got is not before:
                same(before, part[rank], f"input of {what}")


@CASES.add()
def only_the_roots_values_count() -> None:
    for root in range(hvd.size()):
        mine = np.full(4, 1.5 if hvd.rank() == root else np.nan)
        assert hvd.broadcast(mine, root).tolist() == [1.5] * 4
        assert hvd.broadcast_(mine, np.int64(root)).tolist() == [1.5] * 4  # type: ignore[arg-type]


def _splits(kind: str, size: int) -> list[list[int]]:
    """Return the splits of each rank."""
    splits: dict[str, list[list[int]]] = {
        "even": [[2] * size for _ in range(size)],
        "uneven": [[(r + 2 * k) % 4 for k in range(size)] for r in range(size)],
        "to one": [[3 if k == 0 else 0 for k in range(size)] for _ in range(size)],
        "from one": [[int(r == size - 1)] * size for r in range(size)],
        "none": [[0] * size for _ in range(size)],
    }
    return splits[kind]


@CASES.add_each(("even", "uneven", "to one", "from one", "none"))
def every_dtype_in_an_alltoall(kind: str) -> None:
    size, rank = hvd.size(), hvd.rank()
    splits = [[int(n) for n in counts] for counts in _splits(kind, size)]
    surplus = 1
    handles = []
    for seed, name in enumerate(DTYPES):
        for tail in TRAILING:
            parts = [values(name, (sum(splits[r]) + surplus, *tail), r, seed) for r in range(size)]
            handles.append((name, parts, hvd.alltoall_async(parts[rank], splits[rank])))
    for name, parts, handle in handles:
        got, received = hvd.synchronize(handle)
        same(got, exchanged(parts, splits, rank), f"alltoall of {name}")
        same(received, np.array([splits[r][rank] for r in range(size)], np.int32))
    parts = [values("float32", (sum(splits[r]), 2), r) for r in range(size)]
    for given in (np.array(splits[rank], np.int32), np.array(splits[rank], np.uint8), tuple(splits[rank])):
        before = parts[rank].copy()
        got, received = hvd.alltoall(before, given)
        same(got, exchanged(parts, splits, rank), f"splits as {type(given)}")
        same(before, parts[rank], "input")


@CASES.add()
def without_splits_rows_are_shared_evenly() -> None:
    size, rank = hvd.size(), hvd.rank()
    parts = inputs("int16", (2 * size, 3), size)
    want = exchanged(parts, [[2] * size] * size, rank)
    same(hvd.alltoall(parts[rank]), want)
    got, received = hvd.alltoall_async(parts[rank]).result()
    same(got, want)
    assert received.tolist() == [2] * size
    got, received = hvd.alltoall(parts[rank], splits=[])
    same(got, want)
    assert received.tolist() == [2] * size
    empty = np.empty((0, 3), np.int16)
    same(hvd.alltoall(empty), empty)


@CASES.add()
def wrong_splits_are_refused() -> None:
    size = hvd.size()
    rows = np.zeros((size, 2))
    several: list[Any] = [[1] * (size + 1), [-1] + [1] * (size - 1), [2] * size, [1.0] * size, [[1] * size]]
    for wrong in several:
        with pytest.raises(ValueError, match="splits"):
            hvd.alltoall(rows, wrong)
    if size > 1:
        with pytest.raises(ValueError, match="must divide"):
            hvd.alltoall(np.zeros((size + 1, 2)))


@CASES.add()
def rank_zero_tensors() -> None:
    """allreduce and broadcast accept 0-d tensors; the other verbs refuse them on every rank."""
    scalar = np.array(2.0)
    same(hvd.allreduce(scalar, op=hvd.Sum), np.array(2.0 * hvd.size()))
    same(hvd.broadcast(np.array(hvd.rank()), hvd.size() - 1), np.array(hvd.size() - 1))
    assert hvd.allreduce_(scalar, op=hvd.Sum) is scalar
    for verb in (hvd.allgather, hvd.alltoall, hvd.reducescatter):
        with pytest.raises(ValueError, match="rank zero"):
            verb(np.array(1.0))


@CASES.add(*SEVERAL)
def barrier_waits_for_everybody() -> None:
    hvd.barrier()
    if hvd.rank() == hvd.size() - 1:
        time.sleep(0.1)  # the late rank
    entered = np.array([time.monotonic()])
    hvd.barrier()
    left = time.monotonic()
    # No rank may leave the barrier before the last one has entered it. All ranks read the clock of one host.
    assert hvd.allreduce(entered, op=hvd.Max)[0] <= left


@CASES.add()
def barrier_between_collectives_in_flight() -> None:
    handles = [hvd.allreduce_async(np.full(3, i), op=hvd.Sum, name=f"around.{i}") for i in range(20)]
    hvd.barrier()
    handles += [hvd.allgather_async(np.array([hvd.rank()]), name=f"around.g{i}") for i in range(5)]
    hvd.barrier()
    for i in range(20):
        assert handles[i].result().tolist() == [i * hvd.size()] * 3
    for handle in handles[20:]:
        assert handle.result().tolist() == list(range(hvd.size()))
