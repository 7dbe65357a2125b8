"""SyncBatchNorm against torch's BatchNorm on the concatenated batches."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import pyhvd.torch as hvd
from pyhvd.testing import run_ranks

SHAPES = {"1d": (3,), "1d-long": (3, 5), "2d": (3, 4, 4), "3d": (3, 2, 2, 2)}


def _batches(shape: tuple[int, ...], sizes: list[int], step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.rand((n, *shape), generator=generator, dtype=torch.float64) * 3 + 1 for n in sizes]


def _norm(shape: tuple[int, ...], options: dict[str, Any]) -> Any:
    norms = torch.nn.BatchNorm1d, torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d
    made: Any = norms[len(shape) - 1](3, **options).double()
    if made.affine:
        with torch.no_grad():
            made.weight.copy_(torch.tensor([1.0, 2.0, -1.0]))
            made.bias.copy_(torch.tensor([0.5, 0.0, 1.0]))
    return made


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sizes", [[4, 4], [1, 5], [0, 3]], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": None}, {"eps": 0.1}],
    ids=lambda given: next(iter(given), "plain"),
)
def test_it_is_batch_norm_of_all_batches(shape: str, sizes: list[int], options: dict[str, Any]) -> None:
    steps = []
    alone = _norm(SHAPES[shape], options)
    for step in range(3):
        batches = [each.requires_grad_() for each in _batches(SHAPES[shape], sizes, step)]
        alone.zero_grad()
        out = alone(torch.cat(batches))
        torch.autograd.backward((out**3).sum())
        parts = [each.detach() for each in out.split(sizes)]
        steps.append((parts, [each.grad for each in batches], [each.grad for each in alone.parameters()]))
    state = {name: each.clone() for name, each in alone.state_dict().items()}
    alone.eval()
    evaluated = alone(torch.ones(2, *SHAPES[shape], dtype=torch.float64)).detach()

    def body() -> None:
        rank = hvd.rank()
        norm = hvd.convert_sync_batchnorm(_norm(SHAPES[shape], options))
        assert isinstance(norm, hvd.SyncBatchNorm)
        for step, (outs, inputs, weights) in enumerate(steps):
            norm.zero_grad()
            batch = _batches(SHAPES[shape], sizes, step)[rank].requires_grad_()
            out = norm(batch)
            torch.testing.assert_close(out.detach(), outs[rank])
            torch.autograd.backward((out**3).sum())
            torch.testing.assert_close(batch.grad, inputs[rank])
            for own, wanted in zip(norm.parameters(), weights, strict=True):
                torch.testing.assert_close(hvd.allreduce(own.grad, op=hvd.Sum), wanted)
        for name, wanted in state.items():
            torch.testing.assert_close(norm.state_dict()[name], wanted)
        norm.eval()
        given = torch.ones(2, *SHAPES[shape], dtype=torch.float64)
        if options.get("track_running_stats", True):
            torch.testing.assert_close(norm(given).detach(), evaluated)

    run_ranks(2, body)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_statistics_are_wide(dtype: torch.dtype) -> None:
    def body() -> None:
        torch.manual_seed(hvd.rank())
        given = (torch.rand(64, 3, 8, 8) + 100).to(dtype).requires_grad_()
        norm = hvd.SyncBatchNorm(3)
        out = norm(given.to(memory_format=torch.channels_last))
        assert out.dtype is dtype
        everything = torch.cat(list(hvd.allgather(given.detach().float()).split(64)))
        wanted = torch.nn.BatchNorm2d(3)(everything).split(64)[hvd.rank()]
        torch.testing.assert_close(out.float(), wanted, rtol=0.01, atol=0.01)
        torch.autograd.backward(out.float().pow(2).sum())
        assert given.grad is not None
        assert given.grad.dtype is dtype

    run_ranks(2, body)


def test_layers_in_another_order_and_the_converter() -> None:
    def body() -> None:
        model = torch.nn.Sequential(
            torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.Sequential(torch.nn.BatchNorm2d(2))
        )
        weight = model[1].weight
        model = hvd.convert_sync_batchnorm(model)
        assert model[1].weight is weight
        layers = [model[1], model[2][0]]
        assert all(isinstance(layer, hvd.SyncBatchNorm) for layer in layers)
        for layer in layers:  # they get their names
            layer(torch.rand(2, 2, 3, 3))
        handles = [layer(torch.full((2, 2, 1, 1), 1.0)) for layer in layers]
        assert len(handles) == 2

    run_ranks(2, body)


def test_refusals_and_one_rank() -> None:
    def body() -> None:
        norm = hvd.SyncBatchNorm(3)
        with pytest.raises(ValueError, match="at least 2 dimensions"):
            norm(torch.ones(3))
        with pytest.raises(ValueError, match="3 channels"):
            norm(torch.ones(2, 4))
        given = torch.rand(4, 3)
        torch.testing.assert_close(norm(given), torch.nn.BatchNorm1d(3)(given))

    run_ranks(1, body)


def test_a_process_set() -> None:
    def body() -> None:
        pair = hvd.add_process_set([0, 2])
        if pair.included():
            norm = hvd.SyncBatchNorm(1, process_set=pair)
            norm(torch.full((2, 1), float(hvd.rank())))
            assert norm.running_mean.item() == pytest.approx(0.1)
        hvd.barrier()

    run_ranks(3, body, knobs={"dynamic_process_sets": True})


# -- names ------------------------------------------------------------------------------------------------


def _use(norm: Any) -> None:
    """Check a layer of the members' batches, forward and backward."""
    ranks = norm.process_set.ranks
    batch = torch.full((2, norm.num_features), float(hvd.rank()), requires_grad=True)
    norm.running_mean.zero_()
    out = norm(batch)
    torch.autograd.backward(out.sum())
    torch.testing.assert_close(
        norm.running_mean, torch.full((norm.num_features,), 0.1 * sum(ranks) / len(ranks))
    )
    assert batch.grad is not None
    assert bool(batch.grad.isfinite().all())


def use_layers_in_a_set() -> None:
    """Use layers of all ranks but the last, and layers of all ranks, in turns."""
    few = hvd.add_process_set(range(hvd.size() - 1))
    if few.included():
        for features in (1, 2):
            _use(hvd.SyncBatchNorm(features, process_set=few))
    _use(hvd.SyncBatchNorm(3))
    again = hvd.SyncBatchNorm(3)
    if few.included():
        _use(hvd.SyncBatchNorm(4, process_set=few))
    _use(again)
    hvd.barrier()


@pytest.mark.parametrize("size", [3, 4])
def test_a_layer_in_a_set_and_then_one_for_all(size: int) -> None:
    run_ranks(size, use_layers_in_a_set, knobs={"dynamic_process_sets": True})


def use_used_layers(way: str) -> None:
    """Let rank 0 keep its layers over shutdown(), or copy used ones; the others make new ones."""
    hvd.init()
    _use(hvd.SyncBatchNorm(5))
    first, second = hvd.SyncBatchNorm(1), hvd.SyncBatchNorm(2)
    _use(first)
    _use(second)
    if way == "init":
        hvd.shutdown()
        hvd.init()
    if hvd.rank():
        first, second = hvd.SyncBatchNorm(1), hvd.SyncBatchNorm(2)
    elif way == "copy":
        first, second = copy.deepcopy([first, second])
    elif way == "pickle":
        first, second = pickle.loads(pickle.dumps([first, second]))
    for layer in (second, first, second):
        _use(layer)
    _use(hvd.SyncBatchNorm(3))
    hvd.barrier()


@pytest.mark.filterwarnings("ignore:You are using `torch.load`:FutureWarning")  # torch 2.4 does itself
@pytest.mark.parametrize("way", ["init", "copy", "pickle"])
@pytest.mark.parametrize("size", [2, 3])
def test_used_layers_among_new_ones(size: int, way: str) -> None:
    run_ranks(size, use_used_layers, way, init=False)


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_without_batches_joins_before_its_layers_have_names(size: int) -> None:
    def body() -> None:
        first, second = hvd.SyncBatchNorm(2), hvd.SyncBatchNorm(2)
        if hvd.rank() != size - 1:
            for layer in (first, second):
                layer(torch.rand(2, 2))
        hvd.join()
        for layer in (second, first, second):
            _use(layer)
        hvd.barrier()

    run_ranks(size, body)
