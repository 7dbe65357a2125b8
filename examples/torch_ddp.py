"""Train a small network of torch on handwritten digits by DistributedDataParallel, over pyhvd.

The data are the 1797 scanned digits that come with scikit-learn. The two marked lines are
the only ones that pyhvd needs. The program runs under each launcher.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import pyhvd.torch.distributed  # noqa: F401 - pyhvd: makes its backend known

HELD_OUT = 450


def load(seed: int) -> list[Any]:
    """Return training images and labels, then held-out ones; every rank gets the same split."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit("this example needs the digits of scikit-learn: pip install scikit-learn")
    images, labels = (torch.as_tensor(each) for each in load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    images, labels = images[order].float().reshape(-1, 1, 8, 8) / 16, labels[order]
    return [images[HELD_OUT:], labels[HELD_OUT:], images[:HELD_OUT], labels[:HELD_OUT]]


def make_model() -> torch.nn.Module:
    """Return a small convolutional network."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 3, stride=2, padding=1),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(32 * 4 * 4, 10),
    )


def train(options: argparse.Namespace) -> float:
    """Train; return the held-out accuracy."""
    rank, size = dist.get_rank(), dist.get_world_size()
    images, labels, held_out_images, held_out_labels = load(options.seed)
    torch.manual_seed(options.seed + rank)  # each rank draws other weights, and then gets rank 0's
    model: Any = DistributedDataParallel(make_model())
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, options.epochs)

    own = torch.utils.data.TensorDataset(images, labels)
    sampler: Any = torch.utils.data.DistributedSampler(own, seed=options.seed)
    batches = torch.utils.data.DataLoader(own, max(options.batch_size // size, 1), sampler=sampler)
    for epoch in range(1, options.epochs + 1):
        sampler.set_epoch(epoch)
        for batch, wanted in batches:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(batch), wanted)
            loss.backward()
            optimizer.step()
        schedule.step()
        mean = loss.detach()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        if rank == 0 and epoch % max(options.epochs // 5, 1) == 0:
            print(f"epoch {epoch:2d} of {options.epochs}  loss {mean:.4f}", flush=True)
    with torch.no_grad():
        part = slice(rank, None, size)
        hits = (model.module(held_out_images[part]).argmax(1) == held_out_labels[part]).sum()
    dist.all_reduce(hits)
    return float(hits) / HELD_OUT


def main() -> None:
    """Train; rank 0 prints the result."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="examples:\n  pyhvdrun -n 4 examples/torch_ddp.py\n"
        "  mpiexec -n 4 python examples/torch_ddp.py\n"
        "  torchrun --nproc-per-node 4 examples/torch_ddp.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=15, help="passes over the data (default: 15)")
    parser.add_argument("--batch-size", type=int, default=64, help="examples per step, over all ranks (64)")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate at the start (default: 0.05)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    options = parser.parse_args()
    dist.init_process_group("pyhvd")  # pyhvd: was "gloo"
    start = time.perf_counter()
    accuracy = train(options)
    size = dist.get_world_size()
    if dist.get_rank() == 0:
        ranks = f"{size} rank{'s' * (size > 1)}"
        seconds = time.perf_counter() - start
        print(f"held-out accuracy {accuracy:.1%} ({HELD_OUT} images), {ranks}, {seconds:.1f} s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
