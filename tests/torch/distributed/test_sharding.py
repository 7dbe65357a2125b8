"""Optimizers, models and tensors whose parts lie on several ranks: ZeRO, FSDP, DTensor."""

from __future__ import annotations

import copy
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.torch.distributed.world import (
    TORCH,
    batch,
    check,
    expected,
    in_group,
    loss_of,
    make_model,
    needs_fully_shard,
    sgd,
    train,
)

tensors: Any = import_module("torch.distributed.tensor" if TORCH >= (2, 5) else "torch.distributed._tensor")
Partial, Replicate, Shard = tensors.Partial, tensors.Replicate, tensors.Shard
distribute_tensor = tensors.distribute_tensor
overlap_needs_no_gpu = pytest.mark.skipif(
    TORCH < (2, 13), reason="old versions of torch overlap ZeRO with DDP over NCCL and HCCL alone"
)


def adam(model: Any) -> Any:
    """Return an optimizer with state."""
    return torch.optim.Adam(model.parameters(), lr=0.01)


@pytest.mark.parametrize("overlaps", [False, pytest.param(True, marks=overlap_needs_no_gpu)])
@in_group(2)
def test_zero_redundancy_optimizer(overlaps: bool) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model: Any = torch.nn.parallel.DistributedDataParallel(make_model(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adam, lr=0.01, overlap_with_ddp=overlaps
    )
    if not overlaps:
        train(model, optimizer)
        check(model, expected(adam))
        optimizer.consolidate_state_dict(to=1)
        if dist.get_rank() == 1:
            assert len(optimizer.state_dict()["state"]) == 6
        return
    model.register_comm_hook(None, hook_with_zero_step(allreduce_hook, model, optimizer))
    train(model, optimizer, steps=6)
    weights: list[Any] = [None, None]
    dist.all_gather_object(weights, [each.tolist() for each in model.parameters()])
    assert weights[0] == weights[1]


def apart(model: Any) -> Any:
    """Return the weights of an FSDP1 model on all ranks, by name."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    with FullyShardedDataParallel.summon_full_params(model):
        return [each.detach().clone() for each in model.module.parameters()]


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@in_group(2)
def test_fsdp1(strategy: str) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model: Any = FullyShardedDataParallel(
        make_model(),
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    optimizer = adam(model)
    train(model, optimizer)
    model.clip_grad_norm_(1.0)
    for found, wanted in zip(apart(model), expected(adam).parameters(), strict=True):
        torch.testing.assert_close(found, wanted.detach(), rtol=1e-4, atol=1e-5)


@needs_fully_shard
@pytest.mark.parametrize("reshards", [True, False])
@pytest.mark.parametrize("width", [16, 5])
@in_group(2)
def test_fully_shard(reshards: bool, width: int) -> None:
    """Also where the rows do not divide by the ranks."""
    from torch.distributed.fsdp import fully_shard

    model: Any = make_model(width=width)
    alone = copy.deepcopy(model)
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, reshard_after_forward=reshards)
    fully_shard(model)
    train(model, adam(model))
    train(alone, adam(alone), whole=True)
    total: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    of_one = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
    torch.testing.assert_close(total.full_tensor(), of_one, rtol=1e-4, atol=1e-5)
    check(model, alone, 1e-4)


@needs_fully_shard
@in_group(2)
def test_fully_shard_with_mixed_precision_and_accumulation() -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model: Any = make_model()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mp_policy=policy)
    optimizer = sgd(model)
    for step in range(0, 4, 2):
        optimizer.zero_grad()
        for each in (step, step + 1):
            model.set_requires_gradient_sync(each % 2 == 1)
            loss_of(model, *batch(each, dist.get_rank(), 2)).backward()
        optimizer.step()
    alone = make_model()
    its_own = sgd(alone)
    for step in range(0, 4, 2):
        its_own.zero_grad()
        for each in (step, step + 1):
            loss_of(alone, *batch(each)).backward()
        its_own.step()
    check(model, alone, 0.05)


@needs_fully_shard
@in_group(4)
def test_hybrid_sharding() -> None:
    """Two replicas of a model in two shards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    model: Any = make_model()
    fully_shard(model, mesh=mesh)
    train(model, adam(model))
    check(model, expected(adam), 1e-4)


@in_group(2)
def test_tensor_parallel_layers() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model: Any = parallelize_module(make_model(), mesh, plan)
    optimizer = sgd(model)
    train(model, optimizer, whole=True)  # each rank has the whole batch, and a part of each layer
    check(model, expected(), 1e-4)
    assert model[0].weight.to_local().shape == (8, 6)


@in_group(2, 3)
def test_redistribute() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    for rows in (6, 7, 1):  # even, uneven, and with ranks that have none
        whole = torch.arange(rows * 6.0).view(rows, 6)
        rows_apart = distribute_tensor(whole, mesh, [Shard(0)])
        columns_apart = rows_apart.redistribute(placements=[Shard(1)])
        assert torch.equal(rows_apart.full_tensor(), whole)
        assert torch.equal(columns_apart.full_tensor(), whole)
        assert torch.equal(columns_apart.to_local(), distribute_tensor(whole, mesh, [Shard(1)]).to_local())
        everywhere = columns_apart.redistribute(placements=[Replicate()])
        assert torch.equal(everywhere.to_local(), whole)
        sums = rows_apart.sum(dim=0)
        assert sums.placements == (Partial("sum"),)
        assert torch.equal(sums.full_tensor(), whole.sum(0))
        assert torch.equal(sums.redistribute(placements=[Shard(0)]).full_tensor(), whole.sum(0))
        if rows % size == 0 or TORCH >= (2, 5):  # torch 2.4 takes the mean of the ranks' means
            assert torch.allclose(rows_apart.mean().full_tensor(), whole.mean())
        if rows >= size:  # torch takes no maximum of nothing
            assert rows_apart.max().full_tensor() == whole.max()


@in_group(2)
def test_redistribute_has_gradients() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    leaf = torch.arange(8.0).view(4, 2).requires_grad_()
    shards = distribute_tensor(leaf, mesh, [Shard(0)]).detach().requires_grad_()
    (shards.redistribute(placements=[Replicate()]) ** 2).sum().backward()
    assert torch.equal(shards.grad.full_tensor(), 2 * leaf.detach())


@in_group(2)
def test_matrix_products_of_parts() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    left, right = torch.randn(6, 8), torch.randn(8, 5)
    for one in (0, 1):
        for other in (0, 1):
            rows, columns = (
                distribute_tensor(each, mesh, [Shard(dim)]) for each, dim in ((left, one), (right, other))
            )
            found = rows @ columns
            torch.testing.assert_close(found.full_tensor(), left @ right)
