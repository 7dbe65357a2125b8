"""Measures images per second with random data; the flags are those that such benchmarks have."""

import argparse
import timeit
from typing import Any

import horovod.torch as hvd
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--num-warmup-batches", type=int, default=2)
parser.add_argument("--num-batches-per-iter", type=int, default=3)
parser.add_argument("--num-iters", type=int, default=2)


def log(text: str) -> None:
    if hvd.rank() == 0:
        print(text)


def run(args: Any) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, stride=2),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(8, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Average,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    data = torch.randn(args.batch_size, 3, 32, 32)
    target = torch.randint(10, (args.batch_size,))

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(data), target).backward()
        optimizer.step()

    timeit.timeit(step, number=args.num_warmup_batches)
    rates = []
    for number in range(args.num_iters):
        seconds = timeit.timeit(step, number=args.num_batches_per_iter)
        rates.append(args.batch_size * args.num_batches_per_iter / seconds)
        log(f"Iter #{number}: {rates[-1]:.1f} img/sec")
    mean = sum(rates) / len(rates)
    log(f"Total img/sec on {hvd.size()} ranks: {hvd.size() * mean:.1f}")
    weight = next(model.parameters()).detach().reshape(1, -1)
    assert torch.equal(hvd.allgather(weight), weight.expand(hvd.size(), -1))


hvd.init()
run(parser.parse_args())
run(parser.parse_args(["--fp16-allreduce"]))
