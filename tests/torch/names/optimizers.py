"""DistributedOptimizer, SyncBatchNorm, sparse tensors."""

from __future__ import annotations

import warnings
from typing import Any

import horovod.torch as hvd
import pytest
import torch

from tests.torch.names.given import check_close, need_gpus, need_ranks, own_half, tensor
from tests.torch.names.state import OPTIMIZERS, make_model, options_of, step


def check_equal(tensors: Any, process_set: Any = hvd.global_process_set) -> None:
    """Check that all ranks have equal tensors."""
    for each in tensors:
        row = each.detach().reshape(1, -1)
        rows = hvd.allgather(row, process_set=process_set)
        assert torch.equal(rows, row.expand_as(rows))


class _Branches(torch.nn.Module):
    """Each forward goes through one of three layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(5, 2) for _ in range(3))

    def forward(self, batch: Any, branch: int) -> Any:
        return self.layers[branch](batch)


def force_allreduce() -> None:
    """Ranks take different branches in one step, so each lacks gradients that another has."""
    for kind in OPTIMIZERS:
        model = _Branches()
        optimizer = kind(model.parameters(), **options_of(kind, 0))
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        for number in range(3):
            optimizer.zero_grad()
            model(tensor((4, 5)), (hvd.rank() + number) % 3).square().mean().backward()
            optimizer.step()
        check_equal(model.parameters())


def dynamic_requires_grad() -> None:
    """A generator and a discriminator, of which one at a time is trained."""
    torch.manual_seed(0)
    nets = {"gen": torch.nn.Linear(4, 4), "disc": torch.nn.Linear(4, 2)}
    optimizers = {
        name: hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5),
            named_parameters=[(f"{name}.{key}", each) for key, each in net.named_parameters()],
        )
        for name, net in nets.items()
    }
    noise = torch.rand(3, 4, generator=torch.Generator().manual_seed(hvd.rank()))
    for trained in ("gen", "disc", "disc", "gen"):
        for name, net in nets.items():
            for parameter in net.parameters():
                parameter.requires_grad_(name == trained)
        before = {name: net.weight.detach().clone() for name, net in nets.items()}
        optimizers[trained].zero_grad()
        nets["disc"](nets["gen"](noise)).square().sum().backward()
        optimizers[trained].step()
        for name, net in nets.items():
            assert torch.equal(net.weight, before[name]) == (name != trained)
            check_equal(net.parameters())


def gradient_clipping() -> None:
    """The reduced gradient is clipped: it has the same norm on all ranks."""
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    (model(torch.tensor([[10.0 * (hvd.rank() + 1)]]))).sum().backward()
    optimizer.synchronize()
    assert model.weight.grad.item() == 10.0 * (hvd.size() + 1) / 2
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    clipped = model.weight.grad.clone()
    assert abs(clipped.item() - 0.1) < 1e-6
    with optimizer.skip_synchronize():
        optimizer.step()
    check_close(model.weight.detach(), 0.5 - 0.1 * clipped)


def synchronize_step_warning() -> None:
    """The warning is Horovod's; here the gradients are not reduced again."""
    need_ranks()
    model = make_model(0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Sum)
    model(tensor((6, 5))).sum().backward()
    optimizer.synchronize()
    gradient = model[0].weight.grad.clone()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    texts = [str(each.message) for each in caught]
    assert len(texts) == 1
    assert "optimizer.step() called without optimizer.skip_synchronize()" in texts[0]
    assert torch.equal(model[0].weight.grad, gradient)


def duplicate_names() -> None:
    model = make_model(0)
    named = [("same", parameter) for parameter in model.parameters()]
    with pytest.raises(ValueError, match="unique"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=named)


def no_named_parameters() -> None:
    """Gradients are reduced under made-up names; an empty iterable names nothing."""
    model = make_model(0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    step(model, optimizer)
    check_equal(model.parameters())


def missing_named_parameters() -> None:
    model = make_model(0)
    named = list(model.named_parameters())[1:]
    with pytest.raises(ValueError, match="not named"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=named)


def optimizer_no_named_parameters() -> None:
    """The names that are made up are unique over the groups."""
    model = make_model(0)
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(groups, lr=0.001))
    names = list(optimizer._parameter_names.values())
    assert len(set(names)) == len(names) == 4


def optimizer_process_sets() -> None:
    """The ranks of a set train together; the halves differ."""
    with own_half() as (half, members):
        model = make_model(members[0])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), process_set=half)
        for number in range(3):
            optimizer.zero_grad()
            model(tensor((6, 5), rank=10 * number + hvd.rank()) / 20).square().mean().backward()
            optimizer.step()
        check_equal(model.parameters(), half)
        other = hvd.allgather(model[0].weight.detach().reshape(1, -1))
        assert not torch.equal(other[0], other[1])


def sparse_embeddings() -> None:
    """Each rank's batch touches other rows; SparseAdam needs gradients that are still sparse."""
    for as_dense in (False, True):
        torch.manual_seed(0)
        model = torch.nn.EmbeddingBag(10, 3, mode="sum", sparse=True)
        optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), sparse_as_dense=as_dense)
        before = model.weight.detach().clone()
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.tensor([hvd.rank(), 7]), torch.tensor([0, 1])).sum().backward()
            optimizer.step()
            assert model.weight.grad.is_sparse
        check_equal(model.parameters())
        touched = (model.weight != before).all(1).nonzero().flatten().tolist()
        assert touched == [*range(hvd.size()), 7]


def _sparse(rank: int, members: int) -> Any:
    """Return a rank's tensor: a row of its own, and one that all ranks have."""
    indices = torch.tensor([[rank % members, members]])
    values = torch.stack([torch.full((3,), rank + 1.0), torch.ones(3)])
    return torch.sparse_coo_tensor(indices, values, (members + 1, 3))


def _check_sparse(members: list[int], **options: Any) -> None:
    count = len(members)
    dense = sum(_sparse(rank, count).to_dense() for rank in members)
    for op, expected in ((hvd.Sum, dense), (hvd.Average, dense / count)):
        handle = hvd.sparse_allreduce_async(_sparse(hvd.rank(), count), name="sparse", op=op, **options)
        check_close(handle().to_dense(), expected)


def async_sparse_allreduce() -> None:
    _check_sparse(list(range(hvd.size())))


def async_sparse_allreduce_process_sets() -> None:
    with own_half() as (half, members):
        _check_sparse(members, process_set=half)


# -- what Horovod's tests need CUDA for ------------------------------------------------------------------


def gpu_required() -> None:
    need_gpus()


def delta_optimizer() -> None:
    """The Adasum variant; Horovod's test needs CUDA and NCCL."""
    model = make_model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=hvd.Adasum)
    before = model[0].weight.detach().clone()
    for number in range(2):
        optimizer.zero_grad()
        model(tensor((6, 5), rank=10 * number + hvd.rank()) / 20).square().mean().backward()
        optimizer.step()
    assert not torch.equal(model[0].weight, before)
    check_equal(model.parameters())


def sync_batch_norm() -> None:
    """The statistics are those of all ranks' batches, also on the CPU."""
    rows = [2 + rank for rank in range(hvd.size())]
    whole = torch.cat([tensor((count, 4, 3), rank=rank) for rank, count in enumerate(rows)])
    plain, ours = torch.nn.BatchNorm1d(4), hvd.SyncBatchNorm(4)
    starts = [sum(rows[:rank]) for rank in range(hvd.size() + 1)]
    mine = slice(starts[hvd.rank()], starts[hvd.rank() + 1])
    leaf, own = whole.clone().requires_grad_(), whole[mine].clone().requires_grad_()
    weights = torch.arange(12.0).reshape(1, 4, 3)
    expected, output = plain(leaf), ours(own)
    (expected.square() * weights).sum().backward()
    (output.square() * weights).sum().backward()
    check_close(output, expected[mine], rtol=1e-4, atol=1e-5)
    check_close(own.grad, leaf.grad[mine], rtol=1e-3, atol=1e-4)
    check_close(ours.running_var, plain.running_var)
    of_weight = hvd.allreduce(ours.weight.grad, op=hvd.Sum)
    check_close(of_weight, plain.weight.grad, rtol=1e-3, atol=1e-3)


def model_parallelism() -> None:
    need_gpus(2)
    pytest.skip("pyhvd has one device for each rank")
