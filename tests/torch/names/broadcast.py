"""broadcast."""

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
    need_ranks,
    own_half,
    several,
    tensor,
)


def _check(roots: Any, **options: Any) -> None:
    for root in roots:
        for dtype, shape in several(MOVED):
            given = tensor(shape, dtype, hvd.rank(), 0, 20)
            result = hvd.broadcast(given, root, **options)
            assert torch.equal(result, tensor(shape, dtype, root, 0, 20))
            assert torch.equal(given, tensor(shape, dtype, hvd.rank(), 0, 20))


def broadcast() -> None:
    _check(range(hvd.size()))


def broadcast_inplace() -> None:
    for root in range(hvd.size()):
        for dtype, shape in several(MOVED):
            given = tensor(shape, dtype, hvd.rank(), 0, 20)
            assert hvd.broadcast_(given, root_rank=root) is given
            assert torch.equal(given, tensor(shape, dtype, root, 0, 20))


def broadcast_process_sets() -> None:
    with own_half() as (half, members):
        _check(members, process_set=half)


def _check_gradient(members: list[int], **options: Any) -> None:
    for root in members:
        for dtype, shape in several(FLOATS):
            leaf = tensor(shape, dtype, hvd.rank()).requires_grad_()
            gradient = torch.full(shape, hvd.rank() + 1.0, dtype=dtype)
            hvd.broadcast(leaf, root, **options).backward(gradient)
            mean = sum(rank + 1 for rank in members) / len(members)
            wanted = torch.full(shape, mean if hvd.rank() == root else 0.0, dtype=dtype)
            check_close(leaf.grad, wanted)


def broadcast_grad() -> None:
    _check_gradient(list(range(hvd.size())))


def broadcast_grad_process_sets() -> None:
    with own_half() as (half, members):
        _check_gradient(members, process_set=half)


def broadcast_error() -> None:
    need_ranks()
    with pytest.raises(ERRORS):
        hvd.broadcast(torch.ones(17, 10 * (hvd.rank() + 1)), 0)


def broadcast_type_error() -> None:
    need_ranks()
    with pytest.raises(ERRORS):
        hvd.broadcast(torch.ones(17, dtype=torch.int32 if hvd.rank() % 2 else torch.float32), 0)


def broadcast_rank_error() -> None:
    need_ranks()
    with pytest.raises(ERRORS):
        hvd.broadcast(torch.ones(17), hvd.rank())


def broadcast_duplicate_name_error() -> None:
    check_duplicate_name(lambda name: hvd.broadcast_async(torch.ones(3), 0, name=name))
