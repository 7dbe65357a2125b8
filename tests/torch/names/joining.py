"""join: ranks that have no more batches."""

from __future__ import annotations

from collections.abc import Iterator

import horovod.torch as hvd
import torch

from tests.torch.names.given import REDUCED, check_close, need_ranks, several, tensor


def _each_first() -> Iterator[tuple[bool, int]]:
    """Yield for each rank: whether this rank joins before the others' calls, and which one does."""
    need_ranks()
    for first in range(hvd.size()):
        yield hvd.rank() == first, first
        last = hvd.join()
        assert last in range(hvd.size())
        assert last == hvd.broadcast_object(last, 0)


def join_allreduce() -> None:
    """An Average divides by all ranks, as in Horovod; a joined rank has no part in Min, Max and Product."""
    for joined, _ in _each_first():
        if joined:
            continue
        for dtype, shape in several(REDUCED):
            given = tensor(shape, dtype)
            assert torch.equal(hvd.allreduce(given, op=hvd.Sum), given * (hvd.size() - 1))
            assert torch.equal(hvd.allreduce(given, op=hvd.Max), given)
        mean = hvd.allreduce(torch.ones(3), average=True)
        check_close(mean, torch.full((3,), 1 - 1 / hvd.size()))


def join_allgather() -> None:
    """Horovod refuses it beside a joined rank; here that rank has no rows."""
    for joined, first in _each_first():
        if not joined:
            rows = hvd.allgather(torch.full((2, 3), hvd.rank()))
            others = [rank for rank in range(hvd.size()) if rank != first]
            assert rows[::2, 0].tolist() == others


def join_broadcast() -> None:
    """Horovod refuses it beside a joined rank; here only the root must not have joined."""
    for joined, first in _each_first():
        if not joined:
            root = (first + 1) % hvd.size()
            assert hvd.broadcast(torch.full((3,), hvd.rank()), root).tolist() == [root] * 3
