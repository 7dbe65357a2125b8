"""alltoall."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import pytest
import torch

from tests.torch.names.given import ERRORS, FLOATS, MOVED, need_gpus, need_ranks, own_half, several


def _rows(sender: int, receiver: int, count: int, shape: Any, dtype: Any) -> Any:
    return torch.full((count, *shape[1:]), 10 * sender + receiver).to(dtype)


def _check(members: list[int], **options: Any) -> None:
    """Send rank + 1 rows to each rank of the set."""
    rank = hvd.rank()
    for dtype, shape in several(MOVED):
        given = torch.cat([_rows(rank, to, rank + 1, shape, dtype) for to in members])
        for splits in ([rank + 1] * len(members), torch.full((len(members),), rank + 1, dtype=torch.int32)):
            output, received = hvd.alltoall(given, splits, **options)
            expected = torch.cat([_rows(sender, rank, sender + 1, shape, dtype) for sender in members])
            assert torch.equal(output, expected)
            assert received.dtype is torch.int32
            assert received.tolist() == [sender + 1 for sender in members]


def alltoall() -> None:
    _check(list(range(hvd.size())))


def alltoall_equal_split() -> None:
    everyone, rank = range(hvd.size()), hvd.rank()
    for dtype, shape in several(MOVED):
        output = hvd.alltoall(torch.cat([_rows(rank, to, 2, shape, dtype) for to in everyone]))
        assert torch.equal(output, torch.cat([_rows(sender, rank, 2, shape, dtype) for sender in everyone]))


def alltoall_process_sets() -> None:
    with own_half() as (half, members):
        _check(members, process_set=half)


def _check_gradient(members: list[int], equal: bool = False, **options: Any) -> None:
    """Check that a row's gradient is that of the rank to which the row was sent."""
    rows = 2 if equal else hvd.rank() + 1
    for dtype, shape in several(FLOATS):
        leaf = torch.ones((rows * len(members), *shape[1:]), dtype=dtype, requires_grad=True)
        splits = None if equal else torch.full((len(members),), rows, dtype=torch.int32)
        given = hvd.alltoall(leaf, splits, **options)
        output = given if equal else given[0]
        output.backward(torch.full_like(output, hvd.rank() + 1))
        assert torch.equal(leaf.grad, torch.cat([torch.full_like(leaf[:rows], to + 1) for to in members]))


def alltoall_grad() -> None:
    _check_gradient(list(range(hvd.size())))


def alltoall_equal_split_grad() -> None:
    _check_gradient(list(range(hvd.size())), equal=True)


def alltoall_grad_process_sets() -> None:
    with own_half() as (half, members):
        _check_gradient(members, process_set=half)


def alltoall_type_error() -> None:
    need_ranks()
    with pytest.raises(ERRORS):
        hvd.alltoall(torch.ones(hvd.size(), dtype=torch.int32 if hvd.rank() % 2 else torch.float32))


def alltoall_rank_error() -> None:
    need_ranks()
    for shape in ((hvd.size(), 10 * (hvd.rank() + 1)), (hvd.size(),) * (1 + hvd.rank() % 2)):
        with pytest.raises(ERRORS):
            hvd.alltoall(torch.ones(shape))


def alltoall_equal_split_length_error() -> None:
    need_ranks()
    with pytest.raises(ValueError, match="must divide"):
        hvd.alltoall(torch.ones(hvd.size() + 1))


def alltoall_splits_error() -> None:
    with pytest.raises(ValueError, match="sum to"):
        hvd.alltoall(torch.ones(hvd.size() - 1), torch.ones(hvd.size(), dtype=torch.int32))


def alltoall_splits_type_error() -> None:
    """Horovod refuses int64 too."""
    with pytest.raises(ValueError, match="ints"):
        hvd.alltoall(torch.ones(hvd.size()), torch.ones(hvd.size(), dtype=torch.float32))
    assert hvd.alltoall(torch.ones(hvd.size()), torch.ones(hvd.size(), dtype=torch.int64))[0].sum()


def alltoall_splits_on_gpu() -> None:
    need_gpus()
    device = f"cuda:{hvd.local_rank()}"
    splits = torch.ones(hvd.size(), dtype=torch.int32, device=device)
    output, received = hvd.alltoall(torch.ones(hvd.size(), device=device), splits)
    assert output.device == received.device == splits.device
    assert received.tolist() == [1] * hvd.size()
