"""Train a small network of JAX on handwritten digits, data-parallel: the compiled step averages gradients.

The data are the 1797 scanned digits that come with scikit-learn. The lines that pyhvd needs are marked.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pyhvd.jax as hvd

HELD_OUT = 450
HIDDEN = 64
MOMENTUM = 0.9

Parameters = dict[str, Any]


def load(seed: int) -> list[Any]:
    """Return training images and labels, then held-out ones; every rank gets the same split."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit("this example needs the digits of scikit-learn: pip install scikit-learn")
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    images, labels = images[order].astype(np.float32) / 16, labels[order]
    return [images[HELD_OUT:], labels[HELD_OUT:], images[:HELD_OUT], labels[:HELD_OUT]]


def make_parameters(seed: int) -> Parameters:
    """Return the weights of a network with one hidden layer."""
    first, second = jax.random.split(jax.random.key(seed))
    return {
        "hidden": jax.random.normal(first, (64, HIDDEN)) * (2 / 64) ** 0.5,
        "hidden bias": jnp.zeros(HIDDEN),
        "output": jax.random.normal(second, (HIDDEN, 10)) * (1 / HIDDEN) ** 0.5,
        "output bias": jnp.zeros(10),
    }


def scores(parameters: Parameters, images: Any) -> Any:
    """Return a score for each class."""
    hidden = jax.nn.relu(images @ parameters["hidden"] + parameters["hidden bias"])
    return hidden @ parameters["output"] + parameters["output bias"]


def loss(parameters: Parameters, images: Any, labels: Any) -> Any:
    """Return the mean cross-entropy."""
    likely = jax.nn.log_softmax(scores(parameters, images))
    return -jnp.take_along_axis(likely, labels[:, None], 1).mean()


def update(
    parameters: Parameters, velocities: Parameters, rate: float, images: Any, labels: Any
) -> tuple[Parameters, Parameters, Any]:
    """Update the parameters by the gradients of all ranks; return them, and this rank's loss."""
    value, gradients = hvd.value_and_grad(loss)(parameters, images, labels)  # pyhvd
    velocities = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocities, gradients)
    parameters = jax.tree.map(lambda p, v: p - rate * v, parameters, velocities)
    return parameters, velocities, value


step = jax.jit(update)


def train(options: argparse.Namespace) -> float:
    """Train; return the held-out accuracy."""
    images, labels, held_out_images, held_out_labels = load(options.seed)
    parameters = make_parameters(options.seed + hvd.rank())  # other weights on each rank, then rank 0's
    parameters = hvd.broadcast_variables(parameters, root_rank=0)  # pyhvd
    velocities = jax.tree.map(jnp.zeros_like, parameters)
    own = options.batch_size // hvd.size()  # pyhvd
    steps = len(labels) // options.batch_size
    for epoch in range(options.epochs):
        order = np.random.default_rng([options.seed, epoch]).permutation(len(labels))
        for number in range(steps):
            first = number * options.batch_size + hvd.rank() * own  # pyhvd
            chosen = order[first : first + own]
            rate = options.lr * (1 - 0.95 * epoch / options.epochs)
            parameters, velocities, value = step(parameters, velocities, rate, images[chosen], labels[chosen])
        mean = hvd.allreduce(value, name="loss")  # pyhvd
        if hvd.rank() == 0 and (epoch + 1) % max(options.epochs // 5, 1) == 0:
            print(f"epoch {epoch + 1:2d} of {options.epochs}  loss {mean:.4f}", flush=True)
    part = slice(hvd.rank(), None, hvd.size())  # pyhvd
    hits = (scores(parameters, held_out_images[part]).argmax(1) == held_out_labels[part]).sum()
    return float(hvd.allreduce(hits, hvd.Sum, name="hits")) / HELD_OUT  # pyhvd


def main() -> None:
    """Train; rank 0 prints the result."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example:\n  pyhvdrun -n 4 examples/jax_digits.py --epochs 20",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=20, help="passes over the data (default: 20)")
    parser.add_argument("--batch-size", type=int, default=64, help="examples per step, over all ranks (64)")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate at the start (default: 0.1)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    options = parser.parse_args()
    hvd.init()  # pyhvd
    start = time.perf_counter()
    accuracy = train(options)
    if hvd.rank() == 0:
        ranks = f"{hvd.size()} rank{'s' * (hvd.size() > 1)}"
        seconds = time.perf_counter() - start
        print(f"held-out accuracy {accuracy:.1%} ({HELD_OUT} images), {ranks}, {seconds:.1f} s", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
