"""Train on handwritten digits with torch while ranks and hosts come and go; the network is torch_digits.py's.

Kill a rank while it trains, and look: all ranks start again, and go on from the last commit. The lines that
elastic training needs are marked.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch_digits import HELD_OUT, load, make_model

import pyhvd.torch as hvd


@hvd.elastic.run  # elastic
def train(state: Any, data: list[Any], options: argparse.Namespace) -> float:
    """Go on from the state; return the held-out accuracy."""
    images, labels, held_out_images, held_out_labels = data
    own = torch.utils.data.TensorDataset(images, labels)
    batches = torch.utils.data.DataLoader(own, options.batch_size // hvd.size(), sampler=state.sampler)
    while state.epoch < options.epochs:
        state.model.train()
        for number, (batch, wanted) in enumerate(batches):
            state.optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(state.model(batch), wanted)
            loss.backward()
            state.optimizer.step()
            time.sleep(options.pause)
            state.sampler.record_batch(number, len(batch))  # elastic
            if number % options.batches_per_commit == options.batches_per_commit - 1:
                state.commit()  # elastic
        state.schedule.step()
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.commit()  # elastic
        if hvd.rank() == 0 and state.epoch % max(options.epochs // 5, 1) == 0:
            generation = hvd.elastic.generation()
            print(f"epoch {state.epoch:2d} of {options.epochs}, generation {generation}", flush=True)
    state.model.eval()
    with torch.no_grad():
        part = slice(hvd.rank(), None, hvd.size())
        hits = (state.model(held_out_images[part]).argmax(1) == held_out_labels[part]).sum()
    return float(hvd.allreduce(hits, op=hvd.Sum, name="hits")) / HELD_OUT


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example:\n  pyhvdrun -n 4 --min-np 2 examples/elastic_torch_digits.py --pause 0.02",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=15, help="passes over the data (default: 15)")
    parser.add_argument("--batch-size", type=int, default=64, help="examples per step, over all ranks (64)")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate at the start (default: 0.05)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    parser.add_argument(
        "--batches-per-commit", type=int, default=5, help="steps from one commit to the next (default: 5)"
    )
    parser.add_argument(
        "--pause", type=float, default=0.0, metavar="S", help="sleep in each step, to have time to kill ranks"
    )
    return parser.parse_args()


def main() -> None:
    """Train; rank 0 prints the result."""
    options = parse()
    hvd.init()
    data = load(options.seed)
    torch.manual_seed(options.seed)
    model = make_model()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    state = hvd.elastic.TorchState(  # elastic
        model=model,
        optimizer=hvd.DistributedOptimizer(optimizer, model.named_parameters()),
        schedule=torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, options.epochs),
        sampler=hvd.elastic.ElasticSampler(data[0], seed=options.seed),
        epoch=0,
    )
    hit_rate = train(state, data, options)
    if hvd.rank() == 0:
        last = f"generation {hvd.elastic.generation()}"
        print(f"held-out accuracy {hit_rate:.1%} ({HELD_OUT} images), {hvd.size()} ranks, {last}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
