"""Ranks that join() while others train in a process set."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import pyhvd.torch as hvd
from pyhvd.testing import run_ranks

torch.manual_seed(0)
_MADE: Any = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()


def _model() -> Any:
    """Return a model; all ranks have the same, as threads share torch's random numbers."""
    return copy.deepcopy(_MADE)


def _loss(model: Any, step: int, rank: int) -> Any:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return (model(torch.rand(5, 3, generator=generator).double()) ** 2).sum()


def _alone(steps: list[int], epochs: int) -> list[torch.Tensor]:
    """Return the parameters that one process has after the steps of all members; ``steps`` has each one's."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        for step in range(max(steps)):
            optimizer.zero_grad()
            losses = [_loss(model, step, rank) for rank, count in enumerate(steps) if step < count]
            torch.autograd.backward(sum(losses) / len(steps))
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def train_in_a_set(uneven: bool) -> None:
    """Train with all ranks but the last, which joins at once; members with fewer batches join early.

    The last member has most batches, so it has the parameters of one process on all batches.
    """
    few = hvd.add_process_set(range(hvd.size() - 1))
    steps = [3 + rank * uneven for rank in range(hvd.size() - 1)]
    model = _model()
    if few.included():
        own = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(own, model.named_parameters(), process_set=few)
        for step in range(steps[hvd.rank()]):
            optimizer.zero_grad()
            torch.autograd.backward(_loss(model, step, hvd.rank()))
            optimizer.step()
    assert hvd.join() in range(hvd.size())
    if few.included():
        hvd.broadcast_parameters(model.state_dict(), hvd.size() - 2, few)
        torch.testing.assert_close([each.detach() for each in model.parameters()], _alone(steps, 1))
    hvd.barrier()


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("uneven", [True, False])
def test_an_optimizer_in_a_set(size: int, uneven: bool) -> None:
    run_ranks(size, train_in_a_set, uneven, knobs={"dynamic_process_sets": True})


@pytest.mark.parametrize("size", [3, 4])
def test_an_optimizer_in_a_set_over_epochs(size: int) -> None:
    """In each epoch another member has most batches; after the join all members get its parameters."""
    members = size - 1
    wanted = _alone([2, *[1] * (members - 1)], 3)

    def body() -> None:
        few = hvd.add_process_set(range(members))
        model = _model()
        own = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = (
            hvd.DistributedOptimizer(own, model.named_parameters(), process_set=few)
            if few.included()
            else own
        )
        for epoch in range(3):
            for step in range(0 if not few.included() else 2 if hvd.rank() == epoch % members else 1):
                optimizer.zero_grad()
                # The member with most batches has those that rank 0 has in one process.
                part = (hvd.rank() - epoch) % members
                torch.autograd.backward(_loss(model, step, part))
                optimizer.step()
            hvd.join()
            if few.included():
                hvd.broadcast_parameters(model.state_dict(), epoch % members, few)
        if few.included():
            torch.testing.assert_close([each.detach() for each in model.parameters()], wanted)
        hvd.barrier()

    run_ranks(size, body, knobs={"dynamic_process_sets": True})


def test_batch_norm_in_a_set_whose_member_has_joined() -> None:
    """The statistics are those of the batches that the other members still have."""

    def body() -> None:
        few = hvd.add_process_set([0, 1])
        if hvd.rank() == 0:
            norm = hvd.SyncBatchNorm(1, process_set=few)
            for step in range(3):
                norm.running_mean.zero_()
                out = norm(torch.full((2, 1), step + 1.0, requires_grad=True))
                torch.autograd.backward(out.sum())
                torch.testing.assert_close(norm.running_mean, torch.full((1,), 0.1 * (step + 1)))
        hvd.join()

    run_ranks(3, body, knobs={"dynamic_process_sets": True})
