"""Random models with frozen, unused and shared parameters, against one process that has all batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import pyhvd.torch as hvd
from pyhvd.testing import run_ranks

WIDTH = 3
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01),
}


@dataclass(frozen=True)
class Plan:
    """A model, and how it is trained.

    Attributes
    ----------
    layers : list of int
        Which layer each step of the forward pass uses; one that occurs twice is shared.
    branches : list of int
        The layer that each rank uses besides.
    frozen : list of (step, int)
        When a layer's freezing changes.
    """

    layers: list[int]
    branches: list[int]
    frozen: list[tuple[int, int]]
    optimizer: str
    passes: int
    groups: int | None
    reduce_at: str
    unused: str
    steps: int
    seed: int

    @property
    def size(self) -> int:
        return len(self.branches)


numbers = st.integers(0, 5)
plans = st.builds(
    Plan,
    layers=st.lists(numbers, min_size=1, max_size=5),
    branches=st.lists(numbers, min_size=2, max_size=3),
    frozen=st.lists(st.tuples(st.integers(0, 3), numbers), max_size=3),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    passes=st.integers(1, 3),
    groups=st.sampled_from([None, 1, 3]),
    reduce_at=st.sampled_from(["step", "backward"]),
    unused=st.sampled_from(["zeros", "none"]),
    steps=st.integers(1, 4),
    seed=st.integers(0, 100),
)


def make_layers(plan: Plan) -> torch.nn.ModuleList:
    layers = torch.nn.ModuleList([torch.nn.Linear(WIDTH, WIDTH).double() for _ in range(6)])
    generator = torch.Generator().manual_seed(plan.seed)
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator, dtype=torch.float64) - 0.5)
    return layers


def freeze(plan: Plan, layers: torch.nn.ModuleList, step: int) -> None:
    for when, number in plan.frozen:
        if when == step:
            layers[number].requires_grad_(not layers[number].weight.requires_grad)


def loss_of(plan: Plan, layers: torch.nn.ModuleList, number: int, rank: int) -> Any:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    values = torch.rand((2, WIDTH), generator=generator, dtype=torch.float64)
    for each in [*plan.layers, plan.branches[rank]]:
        values = torch.tanh(layers[each](values))
    return values.pow(2).mean()


def backward(loss: Any) -> None:
    if loss.requires_grad:  # else everything is frozen
        torch.autograd.backward(loss)


def train_alone(plan: Plan) -> list[torch.Tensor]:
    layers = make_layers(plan)
    optimizer = OPTIMIZERS[plan.optimizer](layers.parameters())
    for step in range(plan.steps):
        freeze(plan, layers, step)
        optimizer.zero_grad()
        for each in range(plan.passes):
            for rank in range(plan.size):
                backward(loss_of(plan, layers, plan.passes * step + each, rank) / plan.size)
        for parameter in layers.parameters():
            if parameter.grad is None and parameter.requires_grad and plan.unused == "zeros":
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    return [each.detach() for each in layers.parameters()]


@pytest.mark.filterwarnings("ignore:no parameter of this optimizer has a gradient")
@given(plans)
def test_the_weights_are_those_of_one_process(plan: Plan) -> None:
    expected = train_alone(plan)

    def body() -> None:
        layers = make_layers(plan)
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS[plan.optimizer](layers.parameters()),
            layers.named_parameters(),
            backward_passes_per_step=plan.passes,
            groups=plan.groups,
            reduce_at=plan.reduce_at,
            unused=plan.unused,
        )
        for step in range(plan.steps):
            freeze(plan, layers, step)
            optimizer.zero_grad()
            for each in range(plan.passes):
                backward(loss_of(plan, layers, plan.passes * step + each, hvd.rank()))
            optimizer.step()
        for own, wanted in zip(layers.parameters(), expected, strict=True):
            torch.testing.assert_close(own.detach(), wanted, rtol=1e-6, atol=1e-9)

    run_ranks(plan.size, body)
