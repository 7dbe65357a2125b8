"""Gradients of the verbs, against a simulation of all ranks in one autograd graph."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import pyhvd.torch as hvd
from pyhvd.testing import run_ranks

Tensors = Sequence[torch.Tensor]
SIZE = 3
OPS = {"average": hvd.Average, "sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max, "product": hvd.Product}


def _inputs(*shapes: tuple[int, ...], seed: int = 0) -> list[torch.Tensor]:
    """Return a tensor for each rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5 for shape in shapes]


def _weights(outputs: Tensors) -> list[torch.Tensor]:
    """Return what each rank's loss multiplies its output by."""
    return [
        (rank + 1.0) * torch.arange(1.0, 1.0 + out.numel()).reshape(out.shape)
        for rank, out in enumerate(outputs)
    ]


def _truth(inputs: Tensors, simulate: Callable[[Tensors], Tensors]) -> list[torch.Tensor]:
    """Return, for each rank, the gradient of the sum of all ranks' losses."""
    leaves = [given.clone().requires_grad_() for given in inputs]
    outputs = simulate(leaves)
    loss = sum((out * weight).sum() for out, weight in zip(outputs, _weights(outputs), strict=True))
    return list(torch.autograd.grad(loss, leaves))


def _check(
    inputs: Tensors,
    verb: Callable[[torch.Tensor], Any],
    simulate: Callable[[Tensors], Tensors],
    factor: float = 1.0,
) -> None:
    """Hold a verb's results and gradients against the simulation's; ``factor``: what Horovod's have more."""
    expected = [factor * each for each in _truth(inputs, simulate)]
    outputs = simulate(inputs)
    weights = _weights(outputs)

    def body() -> None:
        rank = hvd.rank()
        for _ in range(3):
            leaf = inputs[rank].clone().requires_grad_()
            out = verb(leaf)
            torch.testing.assert_close(out, outputs[rank])
            torch.autograd.backward((out * weights[rank]).sum())
            torch.testing.assert_close(leaf.grad, expected[rank])

    run_ranks(SIZE, body, timeout=60, knobs={"dynamic_process_sets": True})


SIMULATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "average": lambda stacked: stacked.mean(0),
    "sum": lambda stacked: stacked.sum(0),
    "min": lambda stacked: stacked.amin(0),
    "max": lambda stacked: stacked.amax(0),
    "product": lambda stacked: stacked.prod(0),
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("scales", [(1.0, 1.0), (2.0, -0.5)], ids=str)
@pytest.mark.parametrize("grouped", [False, True], ids=["one", "grouped"])
@pytest.mark.parametrize("name", [None, "x"], ids=["unnamed", "named"])
def test_allreduce(op: str, scales: tuple[float, float], grouped: bool, name: str | None) -> None:
    inputs = _inputs(*[(2, 3)] * SIZE)
    pre, post = scales

    def simulate(given: Tensors) -> list[torch.Tensor]:
        out = SIMULATED[op](torch.stack(list(given)) * pre) * post
        return [2 * out if grouped else out] * SIZE

    def verb(given: torch.Tensor) -> torch.Tensor:
        terms: Any = {"name": name, "op": OPS[op], "prescale_factor": pre, "postscale_factor": post}
        if not grouped:
            return hvd.allreduce(given, **terms)
        both: list[torch.Tensor] = hvd.grouped_allreduce([given, given], **terms)
        return both[0] + both[1]

    _check(inputs, verb, simulate)


@pytest.mark.parametrize("zeros", list(itertools.product([False, True], repeat=3)), ids=str)
def test_product_with_zeros(zeros: tuple[bool, ...]) -> None:
    inputs = _inputs(*[(4,)] * SIZE)
    for given, zero in zip(inputs, zeros, strict=True):
        if zero:
            given[1:3] = 0

    def simulate(given: Tensors) -> list[torch.Tensor]:
        return [torch.stack(list(given)).prod(0)] * SIZE

    _check(inputs, lambda given: hvd.allreduce(given, op=hvd.Product), simulate)


def test_ranks_that_share_an_extreme_share_its_gradient() -> None:
    inputs = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 5.0, 3.0]), torch.tensor([1.0, 5.0, 2.0])]

    def simulate(given: Tensors) -> list[torch.Tensor]:
        return [torch.stack(list(given)).amax(0)] * SIZE

    _check(inputs, lambda given: hvd.allreduce(given, op=hvd.Max), simulate)


@pytest.mark.parametrize("grouped", [False, True], ids=["one", "grouped"])
def test_allgather_is_one_nth(grouped: bool) -> None:
    inputs = _inputs((2, 3), (0, 3), (1, 3))

    def simulate(given: Tensors) -> list[torch.Tensor]:
        out = torch.cat(list(given))
        return [2 * out if grouped else out] * SIZE

    def verb(given: torch.Tensor) -> torch.Tensor:
        if not grouped:
            return hvd.allgather(given, name="x")
        both = hvd.grouped_allgather([given, given])
        return both[0] + both[1]

    _check(inputs, verb, simulate, 1 / SIZE)


@pytest.mark.parametrize("root", [0, 2])
def test_broadcast_is_one_nth(root: int) -> None:
    def simulate(given: Tensors) -> list[torch.Tensor]:
        others = sum(0 * each for each in given)
        return [given[root] + others] * SIZE

    _check(_inputs(*[(2, 3)] * SIZE), lambda given: hvd.broadcast(given, root), simulate, 1 / SIZE)


@pytest.mark.parametrize("unsent", [0, 2])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_alltoall(unsent: int, as_tensor: bool) -> None:
    splits = [[1, 0, 2], [2, 1, 1], [0, 0, 3]]
    inputs = _inputs(*[(sum(rows) + unsent, 2) for rows in splits])

    def simulate(given: Tensors) -> list[torch.Tensor]:
        blocks = [each[: len(each) - unsent].split(rows) for each, rows in zip(given, splits, strict=True)]
        return [torch.cat([blocks[source][target] for source in range(SIZE)]) for target in range(SIZE)]

    def verb(given: torch.Tensor) -> torch.Tensor:
        rows: Any = splits[hvd.rank()]
        out, received = hvd.alltoall(given, torch.tensor(rows) if as_tensor else rows)
        assert received.dtype is torch.int32
        assert received.tolist() == [splits[source][hvd.rank()] for source in range(SIZE)]
        return out

    _check(inputs, verb, simulate)


@pytest.mark.parametrize(("op", "factor"), [("average", SIZE), ("sum", SIZE)])
@pytest.mark.parametrize("grouped", [False, True], ids=["one", "grouped"])
def test_reducescatter_is_n_times(op: str, factor: float, grouped: bool) -> None:
    inputs = _inputs(*[(4, 2)] * SIZE)

    def simulate(given: Tensors) -> list[torch.Tensor]:
        out = SIMULATED[op](torch.stack(list(given))) * -0.5
        return list((2 * out if grouped else out).split([2, 1, 1]))

    def verb(given: torch.Tensor) -> torch.Tensor:
        terms: Any = {"op": OPS[op], "prescale_factor": 2.0, "postscale_factor": -0.25}
        if not grouped:
            return hvd.reducescatter(given, **terms)
        both = hvd.grouped_reducescatter([given, given], **terms)
        return both[0] + both[1]

    _check(inputs, verb, simulate, factor)


def test_a_process_set() -> None:
    def body() -> None:
        pair = hvd.add_process_set([0, 2])
        if pair.included():
            leaf = torch.ones(3, requires_grad=True)
            out = hvd.allreduce(leaf, op=hvd.Sum, process_set=pair)
            rows = hvd.allgather(leaf, process_set=pair)
            torch.autograd.backward((out * (hvd.rank() + 1)).sum() + (rows * (hvd.rank() + 1)).sum())
            assert leaf.grad is not None
            assert leaf.grad.tolist() == [4.0 + 2.0] * 3
        hvd.barrier()

    run_ranks(SIZE, body, knobs={"dynamic_process_sets": True})


@pytest.mark.parametrize("grouped", [False, True], ids=["one", "grouped"])
def test_second_derivatives_of_reductions(grouped: bool) -> None:
    """All ranks have the same input, so what changes on one changes on all, as gradcheck does it."""

    def call(given: torch.Tensor) -> torch.Tensor:
        if grouped:
            first, second = hvd.grouped_allreduce([given, given * given], op=hvd.Sum)
            return first * second
        return hvd.allreduce(given * given, op=hvd.Average) ** 2

    def body() -> None:
        given = torch.tensor([0.5, 1.5], dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(call, (given,))
        assert torch.autograd.gradgradcheck(call, (given,))

    run_ranks(2, body)


@pytest.mark.parametrize(("verb", "factor"), [(hvd.allgather, 0.5), (hvd.alltoall, 1.0)])
def test_second_derivatives_of_moves(verb: Callable[..., Any], factor: float) -> None:
    def body() -> None:
        leaf = (torch.arange(1.0, 5.0) + hvd.rank()).requires_grad_()
        loss = (verb(leaf) ** 3).sum()
        (first,) = torch.autograd.grad(loss, leaf, create_graph=True)
        torch.testing.assert_close(first, 3 * leaf**2)
        (second,) = torch.autograd.grad(first.sum(), leaf)
        torch.testing.assert_close(second, factor * 6 * leaf.detach())

    run_ranks(2, body)


def test_adasum_has_no_gradient() -> None:
    def body() -> None:
        leaf = torch.ones(3, requires_grad=True)
        out = hvd.allreduce(leaf, op=hvd.Adasum)
        with pytest.raises(hvd.UnsupportedOpError, match="detach"):
            torch.autograd.backward(out.sum())

    run_ranks(2, body)


def test_compression_is_differentiable() -> None:
    def body() -> None:
        for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
            leaf = torch.ones(3, requires_grad=True)
            out = hvd.allreduce(leaf, op=hvd.Sum, compression=compression)
            assert out.dtype is torch.float32
            torch.autograd.backward(out.sum())
            assert leaf.grad is not None
            assert leaf.grad.tolist() == [2.0] * 3

    run_ranks(2, body)


def test_nothing_is_recorded_where_nothing_needs_a_gradient() -> None:
    def body() -> None:
        leaf = torch.ones(2, requires_grad=True)
        assert hvd.allreduce(leaf).grad_fn is not None
        assert hvd.allreduce(leaf.detach()).grad_fn is None
        with torch.no_grad():
            assert hvd.allreduce(leaf).grad_fn is None
        assert hvd.synchronize(hvd.allreduce_async(leaf)).grad_fn is None

    run_ranks(2, body)


def test_the_incoming_gradient_is_not_changed() -> None:
    def body() -> None:
        leaf = torch.ones(4, requires_grad=True)
        out = hvd.reducescatter(leaf, op=hvd.Sum)
        given = torch.ones(2)
        torch.autograd.backward(out, given)
        assert given.tolist() == [1.0, 1.0]

    run_ranks(2, body)
