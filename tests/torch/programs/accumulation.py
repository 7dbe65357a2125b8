"""Accumulates the gradients of several batches before each reduction; the last batch is shorter."""

import math
from typing import Any

import horovod.torch as hvd
import torch

BATCH, PASSES = 4, 3


def make_model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2)).double()


def rows_of(step: int, rank: int) -> Any:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.rand(BATCH * PASSES - 1, 5, generator=generator, dtype=torch.float64)


def loss_of(model: Any, rows: Any) -> Any:
    return model(rows).square().sum(1).mean()


hvd.init()
model = make_model()
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    named_parameters=model.named_parameters(),
    backward_passes_per_step=PASSES,
)
alone = make_model()
expected = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
for step in range(3):
    optimizer.zero_grad()
    rows = rows_of(step, hvd.rank())
    for start in range(0, len(rows), BATCH):
        loss = loss_of(model, rows[start : start + BATCH])
        loss.div_(math.ceil(len(rows) / BATCH))
        loss.backward()
    optimizer.step()
    expected.zero_grad()
    for rank in range(hvd.size()):
        batches = [rows_of(step, rank)[start : start + BATCH] for start in range(0, len(rows), BATCH)]
        (sum(loss_of(alone, each) for each in batches) / len(batches) / hvd.size()).backward()
    expected.step()
for mine, wanted in zip(model.parameters(), alone.parameters(), strict=True):
    assert torch.allclose(mine, wanted, rtol=1e-9)
