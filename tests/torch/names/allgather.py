"""allgather and grouped_allgather."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import pytest
import torch

from tests.torch.names.given import (
    ERRORS,
    FLOATS,
    MOVED,
    check_close,
    check_duplicate_name,
    in_turn,
    need_ranks,
    own_half,
    several,
    tensor,
)

ROWS = (3, 7, 0, 5)


def _part(rank: int, shape: Any, dtype: Any, rows: int | None = None) -> Any:
    return tensor((shape[0] if rows is None else rows, *shape[1:]), dtype, rank, 0, 20)


def _check(members: list[int] | None = None, **options: Any) -> None:
    for dtype, shape in several(MOVED):
        result = hvd.allgather(_part(hvd.rank(), shape, dtype), **options)
        everyone = members or range(hvd.size())
        assert torch.equal(result, torch.cat([_part(rank, shape, dtype) for rank in everyone]))


def allgather() -> None:
    _check()


def allgather_variable_size() -> None:
    for dtype, shape in several(MOVED):
        result = hvd.allgather(_part(hvd.rank(), shape, dtype, ROWS[hvd.rank()]))
        parts = [_part(rank, shape, dtype, ROWS[rank]) for rank in range(hvd.size())]
        assert torch.equal(result, torch.cat(parts))


def allgather_async_fused() -> None:
    for here in in_turn():
        handles: list[Any] = []

        def submit(handles: list[Any] = handles) -> None:
            for place, (dtype, shape) in enumerate(several(MOVED)):
                handles.append(hvd.allgather_async(_part(hvd.rank(), shape, dtype), name=f"fused {place}"))

        if here:
            submit()
            assert hvd.size() == 1 or not any(hvd.poll(each) for each in handles)
        hvd.barrier()
        if not here:
            submit()
        for (dtype, shape), handle in zip(several(MOVED), handles, strict=True):
            parts = [_part(rank, shape, dtype) for rank in range(hvd.size())]
            assert torch.equal(hvd.synchronize(handle), torch.cat(parts))


def allgather_process_sets() -> None:
    with own_half() as (half, members):
        _check(members, process_set=half)


def _check_gradient(members: list[int], **options: Any) -> None:
    """Check the Average over the ranks of each rank's gradient of this rank's rows."""
    for dtype, shape in several(FLOATS):
        rank = hvd.rank()
        leaf = _part(rank, shape, dtype, 1 + ROWS[rank]).requires_grad_()
        result = hvd.allgather(leaf, **options)
        result.backward(torch.cat([torch.full((1 + ROWS[r], *shape[1:]), r + rank) for r in members]))
        mean = sum(rank + each for each in members) / len(members)
        check_close(leaf.grad, torch.full_like(leaf, mean))


def allgather_grad() -> None:
    _check_gradient(list(range(hvd.size())))


def allgather_grad_process_sets() -> None:
    with own_half() as (half, members):
        _check_gradient(members, process_set=half)


def allgather_error() -> None:
    need_ranks()
    for shape in ((3, 10 * (hvd.rank() + 1)), (3,) * (1 + hvd.rank() % 2)):
        with pytest.raises(ERRORS):
            hvd.allgather(torch.ones(shape))


def allgather_type_error() -> None:
    need_ranks()
    with pytest.raises(ERRORS):
        hvd.allgather(torch.ones(17, dtype=torch.int32 if hvd.rank() % 2 else torch.float32))


def allgather_duplicate_name_error() -> None:
    check_duplicate_name(lambda name: hvd.allgather_async(torch.ones(3), name=name))


# -- groups --------------------------------------------------------------------------------------------


def _check_group(members: list[int], **options: Any) -> None:
    for dtype, shape in several(MOVED):
        given = [_part(hvd.rank(), shape, dtype, rows) for rows in (2, ROWS[hvd.rank()])]
        equal, variable = hvd.grouped_allgather(given, **options)
        assert torch.equal(equal, torch.cat([_part(rank, shape, dtype, 2) for rank in members]))
        assert torch.equal(variable, torch.cat([_part(rank, shape, dtype, ROWS[rank]) for rank in members]))


def grouped_allgather() -> None:
    _check_group(list(range(hvd.size())))


def grouped_allgather_process_sets() -> None:
    with own_half() as (half, members):
        _check_group(members, process_set=half)


def grouped_allgather_grad() -> None:
    for dtype, shape in several(FLOATS):
        leaves = [_part(hvd.rank(), shape, dtype, rows).requires_grad_() for rows in (2, ROWS[hvd.rank()])]
        results = hvd.grouped_allgather(leaves)
        torch.autograd.backward(results, [torch.full_like(each, hvd.rank() + 1) for each in results])
        for leaf in leaves:
            check_close(leaf.grad, torch.full_like(leaf, (hvd.size() + 1) / 2))
