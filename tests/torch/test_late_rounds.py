"""Ranks that make no backward pass in a step, and are needed elsewhere before their step()."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import pyhvd.torch as hvd
from pyhvd.testing import RanksFailed, run_ranks
from pyhvd.torch import reducer
from tests.torch.test_loops import check_alike, clip, loss_of
from tests.torch.test_optimizer import check_weights, make_model, sgd

pytestmark = [
    pytest.mark.filterwarnings("ignore:no parameter of this optimizer has a gradient"),
    pytest.mark.filterwarnings(r"ignore:gradients.\d. rank \d makes no backward pass now"),
]

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "groups": {"groups": 2},
    "zeros": {"unused": "zeros"},
    "bf16": {"compression": hvd.Compression.bf16},
}
HOSTS = {"one host": None, "each its own": (0, 1, 2), "two hosts": (0, 0, 1)}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reducer, "_BUCKET_BYTES", 300)
    monkeypatch.setattr(reducer, "_PATIENCE_S", 0.05)


def is_used(step: int, rank: int, size: int) -> bool:
    """Return whether a rank has a batch in a step: the last one lacks some, another one lacks another."""
    return not ((rank == size - 1 and step in (0, 3, 4)) or (rank == 0 and step == 5))


def wait_for_all(kind: str, step: int) -> None:
    """Call a collective, and wait for it, in one of the ways of a program."""
    value = torch.full((2,), float(hvd.rank()))
    if kind == "allreduce":
        hvd.allreduce(value, name="metric")
    elif kind == "handle":
        hvd.allreduce_async(value, name="metric").result()
    elif kind == "unnamed":
        hvd.allgather(value)
    else:
        hvd.barrier()


def train_with_gaps(size: int, kind: str, options: dict[str, Any]) -> None:
    model, alone = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), **options)
    single = sgd(alone)
    for step in range(7):
        optimizer.zero_grad()
        if is_used(step, hvd.rank(), size):
            torch.autograd.backward(loss_of(model, step, [hvd.rank()]))
        wait_for_all(kind, step)
        optimizer.step()
        single.zero_grad()
        ranks = [rank for rank in range(size) if is_used(step, rank, size)]
        torch.autograd.backward(loss_of(alone, step, ranks) * (len(ranks) / size))
        single.step()
    check_alike(model)
    for own, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(own, wanted, rtol=0, atol=1e-2 if "compression" in options else 1e-9)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", ["allreduce", "handle", "unnamed", "barrier"])
def test_a_rank_without_a_backward_pass_is_needed_before_its_step(size: int, kind: str, options: str) -> None:
    run_ranks(size, train_with_gaps, size, kind, OPTIONS[options])


@pytest.mark.parametrize("kind", ["allreduce", "handle"])
@pytest.mark.parametrize("hosts", HOSTS)
def test_on_several_hosts(hosts: str, kind: str) -> None:
    run_ranks(3, train_with_gaps, 3, kind, {}, hosts=HOSTS[hosts])


@pytest.mark.parametrize("knobs", [{"cache_capacity": 0}, {"fast_lane": False}])
def test_without_a_fast_path(knobs: dict[str, Any]) -> None:
    run_ranks(2, train_with_gaps, 2, "allreduce", {}, knobs=knobs)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_use_different_optimizers_in_a_step(size: int) -> None:
    def body() -> None:
        models, alone = [make_model(), make_model()], [make_model(), make_model()]
        both = [hvd.DistributedOptimizer(sgd(model), model.named_parameters()) for model in models]
        single = [sgd(model) for model in alone]
        for step in range(4):
            for optimizer in both:
                optimizer.zero_grad()
            torch.autograd.backward(loss_of(models[(hvd.rank() + step) % 2], step, [hvd.rank()]))
            for optimizer in both:
                optimizer.step()
            for index, optimizer in enumerate(single):
                optimizer.zero_grad()
                ranks = [rank for rank in range(size) if (rank + step) % 2 == index]
                torch.autograd.backward(loss_of(alone[index], step, ranks) * (len(ranks) / size))
                optimizer.step()
        for model, other in zip(models, alone, strict=True):
            check_weights(model, [each.detach() for each in other.parameters()])

    run_ranks(size, body)


def test_a_metric_before_the_backward_pass_on_one_rank_and_after_it_on_another() -> None:
    def body() -> None:
        model, alone = make_model(), make_model()
        optimizer, single = hvd.DistributedOptimizer(sgd(model), model.named_parameters()), sgd(alone)
        for step in range(3):
            optimizer.zero_grad()
            loss = loss_of(model, step, [hvd.rank()])
            if hvd.rank() == 1:
                hvd.allreduce(loss.detach(), name="loss")
            torch.autograd.backward(loss)
            if hvd.rank() == 0:
                hvd.allreduce(loss.detach(), name="loss")
            optimizer.step()
            single.zero_grad()
            torch.autograd.backward(loss_of(alone, step, [0, 1]))
            single.step()
        check_weights(model, [each.detach() for each in alone.parameters()])

    run_ranks(2, body)


@pytest.mark.parametrize("size", [2, 3])
def test_a_gradient_that_is_changed_meanwhile_is_an_error_on_all_ranks(size: int) -> None:
    def body() -> None:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        if hvd.rank() < size - 1:
            torch.autograd.backward(loss_of(model, 0, [hvd.rank()]))
        hvd.allreduce(torch.ones(1), name="metric")
        if hvd.rank() < size - 1:
            clip(model)
        with pytest.raises(hvd.MismatchError, match=r"has changed the gradient of '0\.\w+' before it was"):
            optimizer.step()

    run_ranks(size, body)


def test_a_second_backward_pass_after_a_late_round_adds_to_it() -> None:
    def body() -> None:
        model, alone = make_model(), make_model()
        optimizer, single = hvd.DistributedOptimizer(sgd(model), model.named_parameters()), sgd(alone)
        if hvd.rank() == 0:
            torch.autograd.backward(loss_of(model, 0, [0]))
        hvd.allreduce(torch.ones(1), name="metric")
        torch.autograd.backward(loss_of(model, 1, [hvd.rank()]))
        clip(model)
        optimizer.step()
        torch.autograd.backward(loss_of(alone, 0, [0]) / 2 + loss_of(alone, 1, [0, 1]))
        clip(alone)
        single.step()
        check_weights(model, [each.detach() for each in alone.parameters()])

    run_ranks(2, body)


def wait_for_a_third_rank(pair: Any) -> None:
    if hvd.rank() == 2:
        time.sleep(0.6)
    hvd.allreduce(torch.ones(1), name="of two", process_set=pair)


@pytest.mark.parametrize("late", ["computes", "waits for another"])
def test_a_late_rank_that_will_make_its_backward_pass_is_waited_for(late: str) -> None:
    """What clips its gradients would fail if ranks left the backward pass."""

    def body(late: str) -> None:
        pair = hvd.add_process_set([1, 2])
        model, alone = make_model(), make_model()
        optimizer, single = hvd.DistributedOptimizer(sgd(model), model.named_parameters()), sgd(alone)
        for step in range(2):
            optimizer.zero_grad()
            loss = loss_of(model, step, [hvd.rank()])
            handle = None
            if late == "computes" and hvd.rank() == 1:
                handle = hvd.allreduce_async(torch.ones(1), name="metric")
                time.sleep(0.6)
            elif late == "waits for another" and hvd.rank():
                wait_for_a_third_rank(pair)
            torch.autograd.backward(loss)
            if late == "computes":
                handle = handle or hvd.allreduce_async(torch.ones(1), name="metric")
                hvd.synchronize(handle)
            clip(model)
            optimizer.step()
            single.zero_grad()
            torch.autograd.backward(loss_of(alone, step, range(3)))
            clip(alone)
            single.step()
        check_weights(model, [each.detach() for each in alone.parameters()])

    run_ranks(3, body, late, knobs={"dynamic_process_sets": True})


def test_a_bucket_that_was_reduced_cannot_be_given_back() -> None:
    """A rank that waits for others in the middle of its backward pass has had a part of the round."""

    def body() -> None:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        for step in range(2):
            optimizer.zero_grad()
            torch.autograd.backward(loss_of(model, step, [hvd.rank()]))
            optimizer.step()
        if hvd.rank() == 1:
            first = next(model.parameters())
            first.register_hook(lambda _: hvd.barrier())  # comes last
        torch.autograd.backward(loss_of(model, 2, [hvd.rank()]))
        hvd.barrier()

    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, body)
    assert isinstance(caught.value.__cause__, hvd.MismatchError)
    assert "in the middle of its backward pass: gradients are reduced in part" in str(caught.value.__cause__)
