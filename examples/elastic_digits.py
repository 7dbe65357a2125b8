"""Train on handwritten digits while ranks and hosts come and go; the network is that of digits.py.

Kill a rank while it trains, and look: the others stop, all ranks start again within a second, and go on from
the last commit. With ``--host-discovery-script`` hosts may be added and taken away too.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
from digits import HELD_OUT, Momentum, accuracy, backward, load, new_parameters

import pyhvd as hvd
from pyhvd import elastic


@elastic.run
def train(state: Any, data: Any, options: argparse.Namespace) -> float:
    """Go on from the state; return the held-out accuracy."""
    images, labels, held_out_images, held_out_labels = data
    optimizer = Momentum(state.parameters, options.lr)
    optimizer.velocity = state.velocity
    while state.epoch < options.epochs:
        optimizer.lr = options.lr * (1 - state.epoch / options.epochs)
        own = np.array(list(state.sampler), int)
        for number, batch in enumerate(
            np.array_split(own, max(1, len(own) * hvd.size() // options.batch_size))
        ):
            gradients: dict[str, Any] = {}
            backward(state.parameters, images[batch], labels[batch], len(batch), gradients.__setitem__)
            names = sorted(gradients)
            means = hvd.grouped_allreduce([gradients[name] for name in names], name="gradients")
            optimizer.step(dict(zip(names, means, strict=True)))
            time.sleep(options.pause)
            state.sampler.record_batch(number, len(batch))
            if number % options.batches_per_commit == options.batches_per_commit - 1:
                state.commit()
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.commit()
        if hvd.rank() == 0 and state.epoch % max(options.epochs // 10, 1) == 0:
            print(
                f"epoch {state.epoch:3d} of {options.epochs}, generation {elastic.generation()}", flush=True
            )
    return accuracy(state.parameters, held_out_images, held_out_labels)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example:\n  pyhvdrun -n 4 --min-np 2 examples/elastic_digits.py --pause 0.02",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=30, help="passes over the data (default: 30)")
    parser.add_argument(
        "--batch-size", type=int, default=64, help="examples per step, over all ranks (default: 64)"
    )
    parser.add_argument("--lr", type=float, default=0.2, help="learning rate, falling to 0 (default: 0.2)")
    parser.add_argument("--hidden", type=int, default=64, help="hidden units (default: 64)")
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
    parameters = new_parameters(data[0].shape[1], options.hidden, options.seed)
    state = elastic.ObjectState(
        epoch=0,
        parameters=parameters,
        velocity={name: np.zeros_like(value) for name, value in parameters.items()},
        sampler=elastic.ElasticSampler(len(data[1]), seed=options.seed),
    )
    hit_rate = train(state, data, options)
    if hvd.rank() == 0:
        ranks = f"{hvd.size()} rank{'s' * (hvd.size() > 1)}"
        last = f"generation {elastic.generation()}"
        print(f"held-out accuracy {hit_rate:.1%} ({HELD_OUT} images), {ranks}, {last}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
