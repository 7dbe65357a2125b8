"""allreduce and grouped_allreduce."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import pytest
import torch

from tests.torch.names.given import (
    ERRORS,
    FLOATS,
    REDUCED,
    check_close,
    check_duplicate_name,
    in_turn,
    need_gpus,
    need_ranks,
    own_half,
    several,
    tensor,
    tensors_of_all,
)


def _check(op: Any, expected: Any, low: int = -20, high: int = 20) -> None:
    for dtype, shape in several(REDUCED):
        given = tensor(shape, dtype, hvd.rank(), low, high)
        before = given.clone()
        result = hvd.allreduce(given, op=op)
        assert result.dtype is dtype
        assert torch.equal(result, expected(tensors_of_all(shape, dtype, low, high)).to(dtype))
        assert torch.equal(given, before)


def allreduce() -> None:
    _check(hvd.Sum, lambda all_of_them: all_of_them.sum(0))


def allreduce_average() -> None:
    for dtype, shape in several(REDUCED):
        given = tensor(shape, dtype)
        assert torch.equal(hvd.allreduce(given, average=True), given)
        assert torch.equal(hvd.allreduce(given), given)


def allreduce_min() -> None:
    _check(hvd.Min, lambda all_of_them: all_of_them.amin(0))


def allreduce_max() -> None:
    _check(hvd.Max, lambda all_of_them: all_of_them.amax(0))


def allreduce_product() -> None:
    _check(hvd.Product, lambda all_of_them: all_of_them.double().prod(0), -2, 3)


def allreduce_inplace() -> None:
    for dtype, shape in several(REDUCED):
        given = tensor(shape, dtype, hvd.rank())
        expected = tensors_of_all(shape, dtype).sum(0).to(dtype)
        assert hvd.allreduce_(given, None, None, hvd.Sum) is given
        assert torch.equal(given, expected)


def allreduce_async_fused() -> None:
    """Whether poll() is False before others have submitted does not depend on the ranks' speed here."""
    for here in in_turn():
        handles: list[Any] = []

        def submit(handles: list[Any] = handles) -> None:
            for place, (dtype, shape) in enumerate(several(REDUCED)):
                given = tensor(shape, dtype, hvd.rank())
                handles.append(hvd.allreduce_async(given, name=f"fused {place}", op=hvd.Sum))

        if here:
            submit()
            assert hvd.size() == 1 or not any(hvd.poll(each) for each in handles)
        hvd.barrier()
        if not here:
            submit()
        for (dtype, shape), handle in zip(several(REDUCED), handles, strict=True):
            expected = tensors_of_all(shape, dtype).sum(0).to(dtype)
            assert torch.equal(hvd.synchronize(handle), expected)
            assert hvd.poll(handle)


def _scaled(given: Any, factor: float) -> Any:
    """Return a tensor times a factor, as ints and halves are scaled: in a wider dtype."""
    wide = {torch.float16: torch.float32, torch.float32: torch.float32}.get(given.dtype, torch.float64)
    return (given.to(wide) * factor).to(given.dtype)


def allreduce_prescale() -> None:
    for dtype, shape in several(REDUCED):
        result = hvd.allreduce(tensor(shape, dtype), op=hvd.Sum, prescale_factor=0.623)
        check_close(result, _scaled(tensor(shape, dtype), 0.623) * hvd.size())


def allreduce_postscale() -> None:
    for dtype, shape in several(REDUCED):
        result = hvd.allreduce(tensor(shape, dtype), op=hvd.Sum, postscale_factor=0.623)
        check_close(result, _scaled(tensor(shape, dtype) * hvd.size(), 0.623))


def allreduce_process_sets() -> None:
    with own_half() as (half, members):
        for dtype, shape in several(REDUCED):
            result = hvd.allreduce(tensor(shape, dtype, hvd.rank()), op=hvd.Sum, process_set=half)
            assert torch.equal(result, tensors_of_all(shape, dtype)[members].sum(0).to(dtype))


def _check_gradient(factor: float, **options: Any) -> None:
    for dtype, shape in several(FLOATS):
        leaf = tensor(shape, dtype).requires_grad_()
        hvd.allreduce(leaf, **options).backward(torch.ones(shape, dtype=dtype))
        assert torch.equal(leaf.grad, torch.full(shape, factor, dtype=dtype))


def allreduce_grad() -> None:
    _check_gradient(hvd.size(), op=hvd.Sum)


def allreduce_grad_average() -> None:
    _check_gradient(1, average=True)


def allreduce_grad_process_sets() -> None:
    with own_half() as (half, members):
        _check_gradient(len(members), op=hvd.Sum, process_set=half)


def allreduce_error() -> None:
    need_ranks()
    for shape in ((17 + hvd.rank(), 3), (12, 12) if hvd.rank() else (12, 4, 3), (2,) * (1 + hvd.rank() % 2)):
        with pytest.raises(ERRORS):
            hvd.allreduce(torch.ones(shape))


def allreduce_type_error() -> None:
    need_ranks()
    with pytest.raises(ERRORS):
        hvd.allreduce(torch.ones(17, dtype=torch.int32 if hvd.rank() % 2 else torch.float32))


def allreduce_cpu_gpu_error() -> None:
    need_ranks()
    need_gpus()
    device = "cpu" if hvd.rank() % 2 else f"cuda:{hvd.local_rank()}"
    with pytest.raises(ERRORS):
        hvd.allreduce(torch.ones(17, device=device))


def allreduce_duplicate_name_error() -> None:
    check_duplicate_name(lambda name: hvd.allreduce_async(torch.ones(3), name=name))


def allreduce_multi_gpu() -> None:
    need_gpus(2)
    pytest.skip("pyhvd has one device for each rank")


# -- groups --------------------------------------------------------------------------------------------


def _group(shape: Any, dtype: Any) -> list[Any]:
    return [tensor(shape, dtype, hvd.rank()) * factor for factor in (1, 2, 3)]


def _check_group(results: Any, shape: Any, dtype: Any, members: list[int]) -> None:
    summed = tensors_of_all(shape, dtype)[members].sum(0)
    for result, factor in zip(results, (1, 2, 3), strict=True):
        assert torch.equal(result, (summed * factor).to(dtype))


def grouped_allreduce() -> None:
    for dtype, shape in several(REDUCED):
        results = hvd.grouped_allreduce(_group(shape, dtype), op=hvd.Sum)
        _check_group(results, shape, dtype, list(range(hvd.size())))


def grouped_allreduce_average() -> None:
    for dtype, shape in several(REDUCED):
        given = [tensor(shape, dtype) + place for place in range(3)]
        for result, each in zip(hvd.grouped_allreduce(given, average=True), given, strict=True):
            assert torch.equal(result, each)


def grouped_allreduce_inplace() -> None:
    for dtype, shape in several(REDUCED):
        given = _group(shape, dtype)
        results = hvd.grouped_allreduce_(given, op=hvd.Sum)
        assert all(result is each for result, each in zip(results, given, strict=True))
        _check_group(given, shape, dtype, list(range(hvd.size())))


def grouped_allreduce_process_sets() -> None:
    with own_half() as (half, members):
        for dtype, shape in several(REDUCED):
            results = hvd.grouped_allreduce(_group(shape, dtype), op=hvd.Sum, process_set=half)
            _check_group(results, shape, dtype, members)


def _check_gradients_of_group(factor: float, **options: Any) -> None:
    for dtype, shape in several(FLOATS):
        leaves = [tensor(shape, dtype, place).requires_grad_() for place in range(3)]
        results = hvd.grouped_allreduce(leaves, **options)
        torch.autograd.backward(results, [torch.ones(shape, dtype=dtype)] * 3)
        for leaf in leaves:
            assert torch.equal(leaf.grad, torch.full(shape, factor, dtype=dtype))


def grouped_allreduce_grad() -> None:
    _check_gradients_of_group(hvd.size(), op=hvd.Sum)


def grouped_allreduce_grad_average() -> None:
    _check_gradients_of_group(1, average=True)


def grouped_allreduce_grad_process_sets() -> None:
    with own_half() as (half, members):
        _check_gradients_of_group(len(members), op=hvd.Sum, process_set=half)


def grouped_allreduce_cpu_gpu_error() -> None:
    need_gpus()
    with pytest.raises(ERRORS):
        hvd.grouped_allreduce([torch.ones(3), torch.ones(3, device=f"cuda:{hvd.local_rank()}")])
