"""Models of torch for the question about steps of an optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.mpi import MPI


class Hand(torch.autograd.Function):
    """A backward pass that only hands gradients out; autograd takes them without a copy."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Any], *parameters: Any) -> Any:
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Any) -> Any:
        handed = tuple(ctx.gradients)
        ctx.gradients.clear()
        return None, *handed


class Handed(torch.nn.Module):
    """Parameters whose gradients, full of this rank's number from 1, are made before the step.

    Parameters
    ----------
    counts : sequence of int
        Elements of each parameter.
    dtype : torch.dtype
        Their dtype.
    computed : bool
        Whether the backward pass writes the gradients into new memory, as a real one does.
    """

    def __init__(self, counts: Sequence[int], dtype: Any = torch.float32, computed: bool = False) -> None:
        super().__init__()
        # Their values are never read, so their pages take no memory.
        self.values = torch.nn.ParameterList(
            [torch.nn.Parameter(torch.empty(n, dtype=dtype)) for n in counts]
        )
        self._all = list(self.values)  # a ParameterList takes microseconds to find each of its members
        self.computed = computed
        self._gradients: list[Any] = []
        self._own = float(MPI.COMM_WORLD.Get_rank() + 1)

    def make_gradients(self) -> None:
        """Drop the gradients of the step before, and make those that a backward pass hands out."""
        for each in self._all:
            each.grad = None
        if not self.computed:
            self._gradients = [torch.full_like(each, self._own) for each in self._all]

    def forward(self) -> Any:
        """Return a loss."""
        handed, self._gradients = self._gradients, []
        if self.computed:
            loss = torch.zeros(())
            for each in self._all:
                loss = Compute.apply(loss, self._own, each)
            return loss
        return Hand.apply(handed, *self._all)


class Compute(torch.autograd.Function):
    """A part of a backward pass, which writes one gradient into new memory."""

    @staticmethod
    def forward(ctx: Any, loss: Any, own: float, parameter: Any) -> Any:
        ctx.own = own
        ctx.save_for_backward(parameter)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (parameter,) = ctx.saved_tensors
        return gradient, None, torch.full_like(parameter, ctx.own)


class Still(torch.optim.Optimizer):
    """An optimizer that leaves the weights as they are."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        """Do nothing."""


def transformer() -> list[int]:
    """Return the sizes of 400 parameters: 33 blocks of width 256 with 12 each, and two embeddings."""
    block = [256 * 768, 768, 256 * 256, 256, 256, 256, 256 * 1024, 1024, 1024 * 256, 256, 256, 256]
    return [1000 * 256, *block * 33, 512 * 256, 256, 256]


class Layers(torch.nn.Module):
    """Ten linear layers of 256 x 256, with a batch of 32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(10)])
        self.batch = torch.rand(32, 256)

    def forward(self) -> Any:
        """Return a loss."""
        return self.layers(self.batch).pow(2).mean()


class _Bottleneck(torch.nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.main = torch.nn.Sequential(
            torch.nn.Conv2d(inputs, width, 1, bias=False),
            torch.nn.BatchNorm2d(width),
            torch.nn.ReLU(),
            torch.nn.Conv2d(width, width, 3, stride, 1, bias=False),
            torch.nn.BatchNorm2d(width),
            torch.nn.ReLU(),
            torch.nn.Conv2d(width, outputs, 1, bias=False),
            torch.nn.BatchNorm2d(outputs),
        )
        self.short: torch.nn.Module = torch.nn.Identity()
        if inputs != outputs:
            self.short = torch.nn.Sequential(
                torch.nn.Conv2d(inputs, outputs, 1, stride, bias=False), torch.nn.BatchNorm2d(outputs)
            )

    def forward(self, batch: Any) -> Any:
        return torch.relu(self.main(batch) + self.short(batch))


class ResNet50(torch.nn.Module):
    """ResNet-50 (He et al., 2015), with a batch of 4 images of 64 x 64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        parts: list[torch.nn.Module] = [
            torch.nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            torch.nn.BatchNorm2d(64),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(3, 2, 1),
        ]
        inputs = 64
        for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
            for block in range(blocks):
                stride = 2 if block == 0 and width > 64 else 1
                parts.append(_Bottleneck(inputs, width, stride))
                inputs = 4 * width
        parts += [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(inputs, 1000)]
        self.parts = torch.nn.Sequential(*parts)
        self.batch = torch.rand(4, 3, 64, 64)

    def forward(self) -> Any:
        """Return a loss."""
        return self.parts(self.batch).pow(2).mean()


class Embedding(torch.nn.Module):
    """A table of a million rows of 64, of which a batch looks up 4,096; its gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(MPI.COMM_WORLD.Get_rank())
        self.table = torch.nn.Embedding(1_000_000, 64, sparse=True, _weight=torch.zeros(1_000_000, 64))
        self.rows = torch.randint(1_000_000, (4096,))

    def forward(self) -> Any:
        """Return a loss."""
        return self.table(self.rows).sum()
