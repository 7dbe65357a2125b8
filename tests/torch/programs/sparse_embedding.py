"""Trains word vectors with sparse gradients and a dense layer, each with an optimizer of its own."""

from typing import Any

import horovod.torch as hvd
import torch

WORDS, WIDTH = 50, 4


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vectors = torch.nn.Embedding(WORDS, WIDTH, sparse=True)
        self.layer = torch.nn.Linear(WIDTH, 2)

    def forward(self, words: Any) -> Any:
        return self.layer(self.vectors(words).mean(1))


def words_of(step: int, rank: int) -> Any:
    """Return sentences of a rank, whose words are of its half."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    half = WORDS // 2
    return torch.randint(half, (6, 5), generator=generator) + half * (rank % 2)


def train(model: Any, optimizers: Any, batches: Any) -> None:
    for batch in batches:
        for optimizer in optimizers:
            optimizer.zero_grad()
        (sum(model(words).square().sum(1).mean() for words in batch) / len(batch)).backward()
        for optimizer in optimizers:
            optimizer.step()


def make(wrap: Any) -> Any:
    torch.manual_seed(0)
    model = Model().double()
    sparse = torch.optim.SparseAdam(list(model.vectors.parameters()), lr=0.1)
    dense = torch.optim.SGD(model.layer.parameters(), lr=0.1)
    return model, [wrap(sparse, model.vectors, "vectors"), wrap(dense, model.layer, "layer")]


def distributed(optimizer: Any, module: Any, prefix: str) -> Any:
    named = [(f"{prefix}.{name}", each) for name, each in module.named_parameters()]
    return hvd.DistributedOptimizer(optimizer, named_parameters=named)


hvd.init()
model, optimizers = make(distributed)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for each in optimizers:
    hvd.broadcast_optimizer_state(each, root_rank=0)
train(model, optimizers, [[words_of(step, hvd.rank())] for step in range(4)])
assert model.vectors.weight.grad.is_sparse
alone, plain = make(lambda optimizer, module, prefix: optimizer)
train(alone, plain, [[words_of(step, rank) for rank in range(hvd.size())] for step in range(4)])
for mine, wanted in zip(model.parameters(), alone.parameters(), strict=True):
    assert torch.allclose(mine, wanted, rtol=1e-6)
