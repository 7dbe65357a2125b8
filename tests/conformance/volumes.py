"""Cases of many names, many shapes and much data: results stay right if the response cache overflows."""

from __future__ import annotations

import numpy as np

import pyhvd as hvd
from tests.conformance.cases import SECONDS, Cases
from tests.conformance.oracle import inputs, reduced, same

CASES = Cases()


@CASES.add()
def three_thousand_names() -> None:
    """Submit three times as many names as the cache holds, in three rounds."""
    size, rank = hvd.size(), hvd.rank()
    for step in range(3):
        handles = [
            hvd.allreduce_async(np.array([i + step, rank]), op=hvd.Sum, name=f"many.{i}") for i in range(3000)
        ]
        ranks = sum(range(size))
        for i, handle in enumerate(handles):
            assert handle.result(SECONDS).tolist() == [(i + step) * size, ranks], (step, i)


@CASES.add()
def forty_shapes_under_one_name() -> None:
    size = hvd.size()
    for step in range(40):
        shape = (step % 7 + 1, step % 5)
        for _ in range(step % 3 + 1):
            got = hvd.allreduce(np.full(shape, step), op=hvd.Sum, name="shifting")
            assert got.shape == shape
            assert (got == step * size).all()
        rows = hvd.allgather(np.full((hvd.rank() + step % 3, 2), step), name="shifting rows")
        assert rows.shape == (sum(range(size)) + size * (step % 3), 2)


@CASES.add()
def repeated_names_over_many_steps() -> None:
    """After the first step of a training loop, every tensor but the one with varying rows is a cache hit."""
    size, rank = hvd.size(), hvd.rank()
    for step in range(60):
        handles = [
            hvd.allreduce_async(np.full(i + 1, step + rank), op=hvd.Sum, name=f"grad.{i}") for i in range(8)
        ]
        gathered = hvd.allgather_async(np.full(rank + step % 2, step), name="metrics")
        root = hvd.broadcast_async(np.array([step * 10 + rank]), step % size, name=f"root.{step % size}")
        want = step * size + sum(range(size))
        for i, handle in enumerate(handles):
            assert handle.result(SECONDS).tolist() == [want] * (i + 1), (step, i)
        assert gathered.result(SECONDS).tolist() == [step] * (sum(range(size)) + size * (step % 2))
        assert root.result(SECONDS).tolist() == [step * 10 + step % size]


@CASES.add(2, 4)
def five_thousand_in_flight() -> None:
    mine = [np.full(3, i % 100 + hvd.rank(), np.float32) for i in range(5000)]
    handles = [hvd.allreduce_async(array, op=hvd.Sum) for array in mine]
    ranks = sum(range(hvd.size()))
    for i, handle in enumerate(handles):
        assert handle.result(SECONDS)[2] == i % 100 * hvd.size() + ranks


@CASES.add(2, 3)
def tensors_of_several_windows() -> None:
    """A tensor larger than the shared window and than a fusion batch, between small tensors."""
    size, rank = hvd.size(), hvd.rank()
    parts = inputs("float32", (2_300_001,), size)
    small = [hvd.allreduce_async(np.ones(3), op=hvd.Sum, name=f"small.{i}") for i in range(4)]
    handle = hvd.allreduce_async(parts[rank], op=hvd.Sum, name="large")
    small += [hvd.allreduce_async(np.ones(3), op=hvd.Sum, name=f"small.{i}") for i in range(4, 8)]
    want = reduced(hvd.Sum, parts)
    same(handle.result(SECONDS), want, "large")
    assert all(each.result(SECONDS)[0] == size for each in small)
    same(hvd.allreduce(parts[rank], op=hvd.Sum, prescale_factor=2.0), reduced(hvd.Sum, parts, 2.0), "scaled")
    gathered = hvd.allgather(parts[rank][: 700_000 * (rank + 1)])
    assert len(gathered) == sum(700_000 * (r + 1) for r in range(size))
    same(gathered[:700_000], parts[0][:700_000], "gathered")
    same(hvd.broadcast(parts[rank], size - 1), parts[-1], "broadcast")
