"""Tensors in host memory through the public verbs: they come back as tensors, and carry what torch needs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import pyhvd as hvd
from pyhvd.testing import run_ranks

REDUCED = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
]
LANES = pytest.mark.parametrize("fast", [True, False], ids=["fast", "by-message"])


def _on(size: int, fast: bool, body: Callable[..., Any], *args: Any) -> list[Any]:
    return run_ranks(size, body, *args, timeout=60, knobs={"fast_lane": fast})


def _is_fast(handle: Any) -> bool:
    return type(handle) is hvd.Handle


def _reduce_often(make: Callable[[int], torch.Tensor], fast: bool, in_place: bool = False) -> torch.Tensor:
    """Sum the ranks' tensors several times under one name; check the last call's lane, return its result."""
    verb = hvd.allreduce_async_ if in_place else hvd.allreduce_async
    for _ in range(3):
        given = make(hvd.rank())
        handle = verb(given, name="x", op=hvd.Sum)
        result: torch.Tensor = handle.result()
        assert type(result) is type(given) if in_place else torch.Tensor
        assert (result is given) == in_place
        hvd.barrier()
    assert _is_fast(handle) == fast
    return result


@LANES
@pytest.mark.parametrize("dtype", REDUCED, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 4), (0, 2)], ids=str)
def test_every_dtype_and_shape(fast: bool, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    def make(rank: int) -> torch.Tensor:
        return torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape).to(dtype) * (rank + 1)

    def body() -> None:
        for in_place in (False, True):
            result = _reduce_often(make, fast, in_place)
            assert result.dtype is dtype
            assert torch.equal(result, make(0) + make(1))

    _on(2, fast, body)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_dtypes_that_torch_cannot_add(dtype: torch.dtype) -> None:
    def body() -> list[Any]:
        given = torch.tensor([hvd.rank(), 1, 0]).to(dtype)
        results = [hvd.allreduce(given, name="x", op=hvd.Max) for _ in range(3)]
        assert all(each.dtype is dtype for each in results)
        return [each.tolist() for each in results]

    assert _on(2, True, body) == [[[1, 1, 0]] * 3] * 2


@LANES
def test_channels_last_goes_as_it_lies(fast: bool) -> None:
    def make(rank: int) -> torch.Tensor:
        images = torch.arange(120.0).reshape(2, 3, 4, 5) * (rank + 1)
        return images.to(memory_format=torch.channels_last)

    def body() -> None:
        for in_place in (False, True):
            result = _reduce_often(make, fast, in_place)
            assert torch.equal(result, make(0) + make(1))
            assert result.is_contiguous(memory_format=torch.channels_last)
        volume = torch.ones(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d) * hvd.rank()
        assert torch.equal(hvd.broadcast(volume, 1), torch.ones(2, 3, 4, 5, 6))
        # What goes by rows is row-major.
        assert hvd.allgather(make(0)).shape == (4, 3, 4, 5)

    _on(2, fast, body)


@LANES
def test_another_layout_on_one_rank_is_a_mismatch(fast: bool) -> None:
    def body() -> None:
        images = torch.ones(2, 3, 4, 5)
        for _ in range(3):
            hvd.allreduce(images, name="x")
            hvd.barrier()
        if hvd.rank() == 1:
            images = images.to(memory_format=torch.channels_last)
        with pytest.raises(hvd.MismatchError, match=r"layouts.*rank 0: row-major; rank 1: channels_last"):
            hvd.allreduce(images, name="x")

    _on(2, fast, body)


@LANES
def test_a_numpy_array_does_not_stand_for_channels_last(fast: bool) -> None:
    def body() -> None:
        images = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
        for _ in range(3):
            hvd.allreduce(images, name="x")
            hvd.barrier()
        with pytest.raises(hvd.MismatchError, match="layouts"):
            hvd.allreduce(images if hvd.rank() else np.ones((2, 3, 4, 5), np.float32), name="x")
        for given in (torch.ones(3), np.ones(3, np.float32)):  # row-major: both kinds may meet
            both = hvd.allreduce(given if hvd.rank() else torch.ones(3), name="y")
            assert type(both) is (type(given) if hvd.rank() else torch.Tensor)

    _on(2, fast, body)


@LANES
def test_gaps_and_repeated_elements(fast: bool) -> None:
    def body() -> None:
        for _ in range(3):
            whole = torch.arange(12.0)
            every_other = whole[::2]
            assert hvd.allreduce_(every_other, name="gaps", op=hvd.Sum) is every_other
            assert whole.tolist() == [n * 2.0 if n % 2 == 0 else n for n in range(12)]
            expanded = torch.ones(1).expand(5)
            assert hvd.allreduce(expanded, name="repeated", op=hvd.Sum).tolist() == [2.0] * 5
            assert hvd.allreduce(torch.ones(3, 4).T, name="turned", op=hvd.Sum).stride() == (1, 4)
        with pytest.raises(ValueError, match="share memory"):
            hvd.allreduce_(expanded)

    _on(2, fast, body)


@LANES
def test_views_that_are_conjugated_or_negated(fast: bool) -> None:
    def body() -> None:
        for _ in range(3):
            given = torch.tensor([1 + 2j, 3 - 1j])
            assert hvd.allreduce(given.conj(), name="conj", op=hvd.Sum).tolist() == [2 - 4j, 6 + 2j]
            single = torch.tensor(1 + 2j)
            assert hvd.allreduce(single.imag, name="one", op=hvd.Sum).item() == 4.0
            assert hvd.allreduce(single.conj().imag, name="one", op=hvd.Sum).item() == -4.0
            column = torch.tensor([1 + 2j])
            assert hvd.allreduce(column.conj().imag, name="column", op=hvd.Sum).item() == -4.0
            conjugated = given.conj()
            hvd.allreduce_(conjugated, name="conj", op=hvd.Sum)
            assert given.tolist() == [2 + 4j, 6 - 2j]

    _on(2, fast, body)


@LANES
def test_leaves_may_be_written_and_what_autograd_recorded_may_not(fast: bool) -> None:
    def body() -> None:
        for _ in range(3):
            weight = torch.nn.Parameter(torch.full((3,), float(hvd.rank())))
            assert hvd.broadcast_(weight, 1, name="weight") is weight
            assert weight.tolist() == [1.0] * 3
            assert hvd.allreduce_(weight, name="sum", op=hvd.Sum) is weight
            assert weight.tolist() == [2.0] * 3
            recorded = weight * 2
            with pytest.raises(RuntimeError, match=r"tensor\.detach"):
                hvd.allreduce_(recorded, name="recorded")
            assert not hvd.allreduce(recorded, name="out of place").requires_grad

    _on(2, fast, body)


@LANES
def test_a_backward_pass_that_saved_the_tensor_notices_the_change(fast: bool) -> None:
    def body() -> None:
        for _ in range(3):
            weight = torch.ones(3, requires_grad=True)
            saved = torch.ones(3)
            loss = (weight * saved).sum()
            hvd.allreduce_(saved, name="saved")
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.backward(loss)
            hvd.barrier()

    _on(2, fast, body)


def test_inference_mode() -> None:
    def body() -> None:
        with torch.inference_mode():
            for _ in range(3):
                given = torch.ones(3)
                assert hvd.allreduce_(given, name="x", op=hvd.Sum).tolist() == [2.0] * 3
                assert hvd.allreduce(given, name="y", op=hvd.Sum).tolist() == [4.0] * 3

    _on(2, True, body)


def test_other_verbs_return_tensors() -> None:
    def body() -> None:
        rank = hvd.rank()
        gathered = hvd.allgather(torch.full((rank + 1, 2), rank, dtype=torch.bfloat16))
        assert gathered.dtype is torch.bfloat16
        assert gathered.tolist() == [[0, 0], [1, 1], [1, 1]]
        received, splits = hvd.alltoall(torch.arange(4) + 10 * rank, splits=[1, 3])
        assert received.tolist() == ([0, 10] if rank == 0 else [1, 2, 3, 11, 12, 13])
        assert splits.tolist() == ([1, 1] if rank == 0 else [3, 3])
        part = hvd.reducescatter(torch.arange(3.0), op=hvd.Sum)
        assert part.tolist() == ([0.0, 2.0] if rank == 0 else [4.0])
        mixed = hvd.grouped_allreduce([torch.ones(2), np.ones(2)], op=hvd.Sum)
        assert [type(each) for each in mixed] == [torch.Tensor, np.ndarray]
        empty = hvd.allgather(torch.empty(0, 3))
        assert empty.shape == (0, 3)

    _on(2, True, body)


def test_tensors_in_shared_memory_need_no_copy() -> None:
    def body() -> bool:
        shared = torch.from_numpy(hvd.empty(1 << 18, np.float32))
        for _ in range(3):
            shared.fill_(1.0)
            handle = hvd.allreduce_async_(shared, name="x", op=hvd.Sum)
            handle.wait()
            hvd.barrier()
        assert shared.eq(2.0).all()
        return _is_fast(handle)

    assert _on(2, True, body) == [True, True]


def test_compression() -> None:
    def body() -> None:
        for given in (torch.tensor([1.0, 2.0]), torch.tensor([1.0], dtype=torch.float64), torch.arange(3)):
            result = hvd.allreduce(given, op=hvd.Sum, compression=hvd.Compression.fp16)
            assert result.dtype is given.dtype
            assert torch.equal(result, 2 * given)

    _on(2, True, body)


@pytest.mark.filterwarnings("ignore")  # torch's, of such tensors
@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda: torch.eye(3).to_sparse(), r"to_dense\(\)"),
        (lambda: torch.eye(3).to_sparse_csr(), r"to_dense\(\)"),
        (lambda: torch.ones(3, device="meta"), "device with memory"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), r"dequantize\(\)"),
        (lambda: torch.nn.LazyLinear(3).weight, "one batch through the model"),
        (lambda: torch.float32, "expected a tensor"),
    ],
    ids=["sparse", "csr", "meta", "quantized", "lazy", "no-tensor"],
)
def test_what_has_no_plain_memory_is_refused_on_every_rank(make: Callable[[], Any], remedy: str) -> None:
    def body() -> None:
        if hvd.rank() == 0:
            with pytest.raises(TypeError, match=remedy):
                hvd.allreduce(make(), name="x")
        else:
            with pytest.raises(hvd.RankFailedError, match=remedy):
                hvd.allreduce(torch.ones(3), name="x")
        hvd.barrier()

    _on(2, True, body)


def test_a_fake_tensor_and_a_transform_are_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def body() -> None:
        with FakeTensorMode(), pytest.raises(TypeError, match=r"FakeTensor has no plain memory"):
            hvd.allreduce(torch.ones(3), name="fake")
        with pytest.raises(TypeError, match=r"torch\.func"):
            torch.vmap(lambda each: hvd.allreduce(each, name="vmap"))(torch.ones(2, 3))

    _on(1, True, body)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fn, torch.complex32], ids=str)
def test_dtypes_that_are_moved_and_not_reduced(dtype: torch.dtype, fast: bool) -> None:
    def body() -> None:
        given = torch.tensor([[1.0], [hvd.rank() + 2.0]]).to(dtype)
        words = given.view(torch.int32 if dtype is torch.complex32 else torch.uint8)
        for _ in range(3):
            gathered = hvd.allgather(given, name="rows")
            assert gathered.dtype is dtype
            assert gathered.to(torch.complex64).tolist() == [[1.0], [2.0], [1.0], [3.0]]
            assert hvd.alltoall(given, name="cross").to(torch.complex64)[1] == 1 + 2 * hvd.rank()
            mine = given.clone()
            assert hvd.broadcast_(mine, 0, name="mine") is mine
            assert mine.to(torch.complex64)[1] == 2.0
            # The name then belongs to a dtype of the same code.
            hvd.allreduce(words, name="x", op=hvd.Sum)
            with pytest.raises(hvd.UnsupportedDtypeError, match=r"not defined for .*it can be moved"):
                hvd.allreduce(given, name="x", op=hvd.Sum)

    _on(2, fast, body)


def test_an_unknown_dtype_is_refused_by_name() -> None:
    def body() -> None:
        with pytest.raises(hvd.UnsupportedDtypeError, match="uint4"):
            hvd.allgather(torch.empty(3, dtype=torch.uint4), name="x")

    _on(1, True, body)


def test_a_tensor_beside_a_joined_rank() -> None:
    def body() -> None:
        if hvd.rank() == 1:
            hvd.join()
        else:
            images = torch.ones(2, 3, 4, 5, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
            assert torch.equal(hvd.allreduce(images, op=hvd.Sum), images)
            assert hvd.allgather(torch.ones(2, 3)).shape == (2, 3)
            hvd.join()

    _on(2, True, body)


def test_an_allocation_that_fails_is_an_error_on_every_rank() -> None:
    def body() -> None:
        with pytest.raises((MemoryError, hvd.RankFailedError)):
            hvd.allreduce(torch.ones(1).expand(1 << 46), name="x")

    _on(1, True, body)


def test_torch_is_not_imported_by_pyhvd() -> None:
    program = "import sys, pyhvd as hvd; hvd.init(); hvd.allreduce(1.0); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
