"""reducescatter and grouped_reducescatter."""

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
    need_ranks,
    own_half,
    several,
    tensor,
    tensors_of_all,
)

ROWS = 8
"""They divide by 1, 2 and 4 ranks."""


def _own(whole: Any, members: list[int] | None = None) -> Any:
    """Return this rank's rows."""
    place, count = (hvd.rank(), hvd.size()) if members is None else (members.index(hvd.rank()), len(members))
    return whole.chunk(count)[place]


def reducescatter() -> None:
    for dtype, shape in several(REDUCED, extent=ROWS):
        result = hvd.reducescatter(tensor(shape, dtype, hvd.rank()), op=hvd.Sum)
        assert torch.equal(result, _own(tensors_of_all(shape, dtype).sum(0).to(dtype)))
        # Rows that do not divide: the first ranks have one more.
        uneven = hvd.reducescatter(torch.ones((ROWS + 1, *shape[1:]), dtype=dtype), op=hvd.Sum)
        assert len(uneven) == (ROWS + 1) // hvd.size() + (hvd.rank() < (ROWS + 1) % hvd.size())
        assert (uneven == hvd.size()).all()


def reducescatter_average() -> None:
    for dtype, shape in several(REDUCED, extent=ROWS):
        given = tensor(shape, dtype)
        assert torch.equal(hvd.reducescatter(given), _own(given))


def _scaled(given: Any, factor: float) -> Any:
    wide = {torch.float16: torch.float32, torch.float32: torch.float32}.get(given.dtype, torch.float64)
    return (given.to(wide) * factor).to(given.dtype)


def reducescatter_prescale() -> None:
    for dtype, shape in several(REDUCED, extent=ROWS):
        given = tensor(shape, dtype)
        result = hvd.reducescatter(given, op=hvd.Sum, prescale_factor=0.623)
        check_close(result, _own(_scaled(given, 0.623) * hvd.size()))


def reducescatter_postscale() -> None:
    for dtype, shape in several(REDUCED, extent=ROWS):
        given = tensor(shape, dtype)
        result = hvd.reducescatter(given, op=hvd.Sum, postscale_factor=0.623)
        check_close(result, _own(_scaled(given * hvd.size(), 0.623)))


def reducescatter_async_fused() -> None:
    for here in in_turn():
        handles: list[Any] = []

        def submit(handles: list[Any] = handles) -> None:
            for place, (dtype, shape) in enumerate(several(REDUCED, extent=ROWS)):
                given = tensor(shape, dtype, hvd.rank())
                handles.append(hvd.reducescatter_async(given, name=f"fused {place}", op=hvd.Sum))

        if here:
            submit()
            assert hvd.size() == 1 or not any(hvd.poll(each) for each in handles)
        hvd.barrier()
        if not here:
            submit()
        for (dtype, shape), handle in zip(several(REDUCED, extent=ROWS), handles, strict=True):
            assert torch.equal(hvd.synchronize(handle), _own(tensors_of_all(shape, dtype).sum(0).to(dtype)))


def reducescatter_process_sets() -> None:
    with own_half() as (half, members):
        for dtype, shape in several(REDUCED, extent=ROWS):
            result = hvd.reducescatter(tensor(shape, dtype, hvd.rank()), op=hvd.Sum, process_set=half)
            whole = tensors_of_all(shape, dtype)[members].sum(0).to(dtype)
            assert torch.equal(result, _own(whole, members))


def _check_gradient(factor: float, **options: Any) -> None:
    """Horovod's factor for Sum: the number of ranks."""
    for dtype, shape in several(FLOATS, extent=ROWS):
        leaf = tensor(shape, dtype).requires_grad_()
        result = hvd.reducescatter(leaf, **options)
        result.backward(torch.ones_like(result))
        assert torch.equal(leaf.grad, torch.full(shape, factor, dtype=dtype))


def reducescatter_grad() -> None:
    _check_gradient(hvd.size(), op=hvd.Sum)


def reducescatter_grad_average() -> None:
    _check_gradient(1, op=hvd.Average)


def reducescatter_grad_process_sets() -> None:
    with own_half() as (half, members):
        _check_gradient(len(members), op=hvd.Sum, process_set=half)


def reducescatter_scalar_error() -> None:
    with pytest.raises(ERRORS):
        hvd.reducescatter(torch.tensor(float(hvd.rank())))


def reducescatter_adasum() -> None:
    with pytest.raises(ERRORS):
        hvd.reducescatter(torch.ones(ROWS), op=hvd.Adasum)


def reducescatter_error() -> None:
    need_ranks()
    for shape in ((17 + hvd.rank(), 3), (ROWS,) * (1 + hvd.rank() % 2)):
        with pytest.raises(ERRORS):
            hvd.reducescatter(torch.ones(shape))


def reducescatter_type_error() -> None:
    need_ranks()
    with pytest.raises(ERRORS):
        hvd.reducescatter(torch.ones(ROWS, dtype=torch.int32 if hvd.rank() % 2 else torch.float32))


def reducescatter_duplicate_name_error() -> None:
    check_duplicate_name(lambda name: hvd.reducescatter_async(torch.ones(ROWS), name=name))


# -- groups --------------------------------------------------------------------------------------------


def _check_group(expected: Any, **options: Any) -> None:
    """Reduce a group of tensors that are the same on all ranks; ``expected`` makes a result of the sum."""
    for dtype, shape in several(REDUCED, extent=ROWS):
        given = [tensor(shape, dtype, place) for place in range(3)]
        results = hvd.grouped_reducescatter(given, **options)
        for result, each in zip(results, given, strict=True):
            check_close(result, _own(expected(each)))


def grouped_reducescatter() -> None:
    _check_group(lambda each: each * hvd.size(), op=hvd.Sum)


def grouped_reducescatter_average() -> None:
    _check_group(lambda each: each, op=hvd.Average)


def grouped_reducescatter_prescale() -> None:
    _check_group(lambda each: _scaled(each, 0.623) * hvd.size(), op=hvd.Sum, prescale_factor=0.623)


def grouped_reducescatter_postscale() -> None:
    _check_group(lambda each: _scaled(each * hvd.size(), 0.623), op=hvd.Sum, postscale_factor=0.623)


def grouped_reducescatter_process_sets() -> None:
    with own_half() as (half, members):
        for dtype, shape in several(REDUCED, extent=ROWS):
            given = [tensor(shape, dtype, hvd.rank()), tensor(shape, dtype, hvd.rank()) * 2]
            results = hvd.grouped_reducescatter(given, op=hvd.Sum, process_set=half)
            whole = tensors_of_all(shape, dtype)[members].sum(0).to(dtype)
            assert torch.equal(results[0], _own(whole, members))
            assert torch.equal(results[1], _own(whole * 2, members))


def grouped_reducescatter_grad() -> None:
    for dtype, shape in several(FLOATS, extent=ROWS):
        leaves = [tensor(shape, dtype, place).requires_grad_() for place in range(2)]
        results = hvd.grouped_reducescatter(leaves, op=hvd.Sum)
        torch.autograd.backward(results, [torch.ones_like(each) for each in results])
        for leaf in leaves:
            assert torch.equal(leaf.grad, torch.full(shape, hvd.size(), dtype=dtype))


def grouped_reducescatter_scalar_error() -> None:
    with pytest.raises(ERRORS):
        hvd.grouped_reducescatter([torch.ones(ROWS), torch.tensor(float(hvd.rank()))])
