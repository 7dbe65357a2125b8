"""The memory of large tensors that are results: kept for later ones, and as users know it."""

from __future__ import annotations

import io
import pickle
import random
import resource
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import pyhvd
import pyhvd.torch as hvd
from pyhvd.native.shared_memory import limit_pool, pool_counts
from pyhvd.testing import run_ranks

LIMIT = 8 << 20
COUNT = 40_000
LANES = pytest.mark.parametrize("fast", [True, False], ids=["fast", "by-message"])


@pytest.fixture(autouse=True)
def _empty_pool() -> Iterator[None]:
    limit_pool(0)
    yield
    limit_pool(0)


def _on(size: int, fast: bool, body: Callable[[], None]) -> None:
    run_ranks(size, body, timeout=60, knobs={"fast_lane": fast, "pool_size": LIMIT})


@LANES
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.complex64],
    ids=str,
)
def test_a_freed_result_gives_its_memory_to_the_next_one(fast: bool, dtype: torch.dtype) -> None:
    def body() -> None:
        given = torch.ones(4, COUNT // 2, dtype=dtype)
        for _ in range(8):
            out = hvd.allreduce(given, name="x", op=hvd.Sum)
            assert torch.equal(out, given)
            assert out.dtype is dtype
            assert out.untyped_storage().nbytes() == given.nbytes
            assert (out.storage_offset(), out.is_contiguous(), out._is_view()) == (0, True, False)
            assert not out.requires_grad
        seen = pyhvd.metrics()
        assert seen.results_reused >= 4
        assert seen.results_new <= 3

    _on(1, fast, body)
    assert pool_counts()[0] == 0


@LANES
def test_storage_is_as_users_know_it(fast: bool) -> None:
    def body() -> None:
        def result() -> torch.Tensor:
            for _ in range(3):
                out = hvd.allreduce(torch.arange(float(COUNT)), name="x", op=hvd.Sum)
            assert isinstance(out, torch.Tensor)
            return out

        want = torch.arange(float(COUNT))
        assert torch.equal(pickle.loads(pickle.dumps(result())), want)
        file = io.BytesIO()
        torch.save(result(), file)
        file.seek(0)
        assert torch.equal(torch.load(file, weights_only=True), want)
        shared = result().share_memory_()
        assert shared.is_shared()
        assert torch.equal(shared, want)
        assert torch.equal(result().resize_(5), want[:5])
        assert result().numpy().tolist() == want.tolist()
        grown = result().clone().resize_(2 * COUNT)
        assert torch.equal(grown[:COUNT], want)
        leaf = result().requires_grad_()
        (leaf * 2).sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.tolist() == [2.0] * COUNT
        assert torch.equal(result().mul_(2), 2 * want)

    _on(1, fast, body)


@LANES
def test_results_that_need_gradients(fast: bool) -> None:
    def body() -> None:
        given = torch.ones(COUNT, requires_grad=True)
        for _ in range(4):
            given.grad = None
            hvd.allreduce(given, name="x", op=hvd.Sum).sum().backward()
            assert given.grad is not None
            assert given.grad.tolist() == [2.0] * COUNT

    _on(2, fast, body)


@LANES
def test_layouts_and_rows(fast: bool) -> None:
    def body() -> None:
        images = torch.arange(48_000.0).reshape(4, 3, 40, 100).to(memory_format=torch.channels_last)
        for _ in range(4):
            out = hvd.allreduce(images, name="images", op=hvd.Sum)
            assert torch.equal(out, 2 * images)
            assert out.is_contiguous(memory_format=torch.channels_last)
            rows = hvd.allgather(images.contiguous(), name="rows")
            assert torch.equal(rows, torch.cat([images, images]))

    _on(2, fast, body)


def test_a_storage_outlives_its_tensor_and_the_ranks() -> None:
    held: list[Any] = []

    def body() -> None:
        for k in range(5):
            out = hvd.allreduce(torch.full((COUNT,), float(k)), name="x", op=hvd.Sum)
            held.append((k, out[7:].untyped_storage()))

    _on(1, True, body)
    for k, storage in held:
        assert torch.tensor([]).set_(storage).tolist() == [float(k)] * COUNT
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert pool_counts()[0] == 0


def test_ten_thousand_steps_of_changing_shapes_stay_within_the_limit() -> None:
    rng = random.Random(7)
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.int16]
    shapes = [(rng.randrange(16_000, 150_000), rng.randrange(1, 3), rng.choice(dtypes)) for _ in range(30)]

    def body() -> None:
        held: list[Any] = []
        tensors = [torch.ones(a, b, dtype=dtype) for a, b, dtype in shapes]
        for k in range(10_000):
            which = rng.randrange(len(tensors))
            if k % 50 == 0:  # a new shape by an old name: by message
                rows, columns, dtype = shapes[which]
                tensors[which] = torch.ones(rows - k % 97, columns, dtype=dtype)
            held.append(hvd.broadcast(tensors[which], 0, name=f"x{which}"))
            if k % 5 == 0:
                del held[: rng.randrange(5)]
            held = held[-6:]
            assert pool_counts()[0] <= LIMIT
            if k == 1000:
                before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10  # KiB

    _on(1, True, body)
