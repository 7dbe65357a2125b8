"""DistributedDataParallel over pyhvd's backend: the weights are those of one process."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from tests.torch.distributed.world import (
    CLASSES,
    FEATURES,
    batch,
    check,
    expected,
    in_group,
    loss_of,
    make_model,
    sgd,
    train,
)

TINY_BUCKETS = 1e-4  # MB: each parameter has one of its own


def ddp(model: Any = None, **options: Any) -> Any:
    """Return a model of DDP; each rank draws other weights, and gets rank 0's."""
    return DistributedDataParallel(model or make_model(seed=dist.get_rank()), **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bucket_cap_mb": TINY_BUCKETS},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"static_graph": True, "gradient_as_bucket_view": True, "bucket_cap_mb": TINY_BUCKETS},
        {"find_unused_parameters": True},
    ],
    ids=str,
)
@in_group(2, 3)
def test_weights_are_those_of_one_process(options: dict[str, Any]) -> None:
    size = dist.get_world_size()
    model = ddp(**options)
    rows = 12  # as many for each rank
    optimizer, alone = sgd(model), make_model()
    its_own = sgd(alone)
    for step in range(5):
        optimizer.zero_grad()
        loss_of(model, *batch(step, dist.get_rank(), size, rows)).backward()
        optimizer.step()
        its_own.zero_grad()
        loss_of(alone, *batch(step, rows=rows)).backward()
        its_own.step()
    check(model, alone)


class TwoHeads(torch.nn.Module):
    """Each step uses one of two heads, and each rank may use another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = torch.nn.Linear(FEATURES, 8)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(8, CLASSES) for _ in range(3))

    def forward(self, inputs: torch.Tensor, head: int) -> Any:
        return self.heads[head](torch.relu(self.trunk(inputs)))


@in_group(2)
def test_parameters_that_a_rank_does_not_use() -> None:
    rank = dist.get_rank()
    model, alone = ddp(TwoHeads(), find_unused_parameters=True), TwoHeads()
    optimizer, its_own = sgd(model), sgd(alone)
    for step in range(5):
        heads = [(step + other) % 2 for other in range(2)]  # of all ranks; nobody uses the third head
        inputs, wanted = batch(step, rank, 2)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs, heads[rank]), wanted).backward()
        assert model.module.heads[2].weight.grad is None
        optimizer.step()
        its_own.zero_grad()
        for other in range(2):
            inputs, wanted = batch(step, other, 2)
            (torch.nn.functional.cross_entropy(alone(inputs, heads[other]), wanted) / 2).backward()
        its_own.step()
    check(model, alone)


@in_group(2)
def test_accumulation_with_no_sync() -> None:
    model = ddp()
    optimizer = sgd(model)
    alone = make_model()
    its_own = sgd(alone)
    for step in range(0, 6, 2):
        optimizer.zero_grad()
        with model.no_sync():
            loss_of(model, *batch(step, dist.get_rank(), 2)).backward()
        loss_of(model, *batch(step + 1, dist.get_rank(), 2)).backward()
        optimizer.step()
        its_own.zero_grad()
        for each in (step, step + 1):
            loss_of(alone, *batch(each)).backward()
        its_own.step()
    check(model, alone)


@in_group(2)
def test_join_of_uneven_inputs() -> None:
    """A rank without inputs takes part with zeros; or all ranks end with an error, and are alike."""
    rank = dist.get_rank()
    for throw in (False, True):
        model = ddp()
        optimizer = sgd(model)
        steps = 3 + 2 * rank
        done = 0
        ends = pytest.raises(RuntimeError, match="exhausted") if throw else contextlib.nullcontext()
        with ends, Join([model], throw_on_early_termination=throw):
            for step in range(steps):
                optimizer.zero_grad()
                loss_of(model, *batch(step, rank, 2)).backward()
                optimizer.step()
                done += 1
        assert done == (3 if throw else steps)
        weights: list[Any] = [None, None]
        dist.all_gather_object(weights, [each.tolist() for each in model.parameters()])
        assert weights[0] == weights[1]
    alone = make_model()
    its_own = sgd(alone)
    for step in range(5):
        its_own.zero_grad()
        for other in range(2 if step < 3 else 1):
            share = batch(step, 1 - other, 2)
            (loss_of(alone, *share) / 2).backward()
        its_own.step()
        if step == 2:
            check(model, alone)  # that of the second time


@in_group(2)
def test_buffers_are_rank_0s() -> None:
    model = ddp(torch.nn.Sequential(torch.nn.Linear(FEATURES, 4), torch.nn.BatchNorm1d(4)))
    for step in range(3):
        model(batch(step, dist.get_rank(), 2)[0]).sum().backward()
    model(batch(0)[0])  # the same inputs, after the broadcast
    means: list[Any] = [None, None]
    dist.all_gather_object(means, model.module[1].running_mean.tolist())
    assert means[0] == means[1]
    assert means[0] != [0.0] * 4


def doubled(state: Any, bucket: Any) -> Any:
    """Average, then double and halve in a chain of callbacks."""
    tensor = bucket.buffer().div_(dist.get_world_size())
    future = dist.all_reduce(tensor, async_op=True).get_future()
    return (
        future.then(lambda each: each.value()[0] * 2)
        .then(lambda each: each.value() / 2)
        .then(lambda each: each.value())
    )


def again(state: Any, bucket: Any) -> Any:
    """Average by a second collective inside the callback of the first, as PowerSGD does."""
    first = dist.all_reduce(torch.ones(1), async_op=True).get_future()

    def average(future: Any) -> Any:
        size = future.value()[0]
        tensor = bucket.buffer()
        inner = dist.all_reduce(tensor, async_op=True).get_future()
        return inner.wait()[0] / size

    return first.then(average)


HOOKS = {
    "allreduce_hook": (default_hooks.allreduce_hook, 1e-5),
    "then chain": (doubled, 1e-5),
    "collective in a callback": (again, 1e-5),
    "fp16_compress_hook": (default_hooks.fp16_compress_hook, 5e-3),
    "fp16_compress_wrapper": (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), 5e-3),
}


@pytest.mark.parametrize("name", HOOKS)
@in_group(2)
def test_comm_hook(name: str) -> None:
    hook, tolerance = HOOKS[name]
    # Collectives in callbacks have no order among those of other buckets.
    model = ddp(bucket_cap_mb=25 if hook is again else TINY_BUCKETS)
    model.register_comm_hook(
        None, lambda state, bucket: hook(state, bucket)
    )  # no annotations, which torch checks
    train(model, sgd(model))
    check(model, expected(), tolerance)


@in_group(2)
def test_power_sgd() -> None:
    """Its callbacks wait for collectives. Its rank is as large as the matrices: nothing is lost."""
    model = ddp()
    state = powerSGD_hook.PowerSGDState(
        dist.group.WORLD, matrix_approximation_rank=16, start_powerSGD_iter=2, min_compression_rate=0.1
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(model, sgd(model))
    check(model, expected(), 1e-3)
    weights: list[Any] = [None, None]
    dist.all_gather_object(weights, [each.tolist() for each in model.parameters()])
    assert weights[0] == weights[1]


@in_group(2)
def test_groups_of_a_hook_and_of_a_model() -> None:
    """A model in a group of its own; each rank's other group has that rank alone."""
    both = dist.new_group([0, 1])
    own = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    model = ddp(process_group=both)
    train(model, sgd(model))
    check(model, expected())
    lonely = ddp(make_model(), process_group=own)
    optimizer = sgd(lonely)
    train(lonely, optimizer, whole=True)
    check(lonely, expected())
