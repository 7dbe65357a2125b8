"""Train a logistic regression on GPUs: CuPy computes, and pyhvd averages the gradients in device memory.

The data are synthetic, and the same for any number of ranks. Each rank holds its share on its own device.
Ranks share devices if there are more ranks than devices.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import numpy as np

import pyhvd as hvd


def load_cupy() -> Any:
    """Return CuPy with this rank's device selected; exit with a message without CuPy or a GPU."""
    try:
        import cupy
    except ImportError:
        sys.exit('this example needs CuPy: pip install "pyhvd[cuda13]" (or "pyhvd[cuda12]")')
    try:
        devices = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as exc:
        sys.exit(f"this example needs a GPU, but CUDA finds none: {exc}")
    cupy.cuda.Device(hvd.local_rank() % devices).use()
    return cupy


def own_share(xp: Any, examples: int, features: int, seed: int) -> tuple[Any, Any]:
    """Return this rank's examples and their labels (0 or 1) as arrays of ``xp``, which is numpy or CuPy."""
    draw = np.random.default_rng(seed)
    truth = draw.standard_normal(features)
    inputs = draw.standard_normal((examples, features))
    chances = 1.0 / (1.0 + np.exp(-inputs @ truth))
    labels = (draw.random(examples) < chances).astype(np.float32)
    own = np.array_split(np.arange(examples), hvd.size())[hvd.rank()]
    return xp.asarray(inputs[own], np.float32), xp.asarray(labels[own])


def step(xp: Any, weights: Any, inputs: Any, labels: Any, examples: int) -> tuple[Any, Any]:
    """Return the loss and its gradient over all ranks' examples, without waiting for the device."""
    scores = inputs @ weights
    # log(1 + exp(-s)) for label 1 and log(1 + exp(s)) for label 0, without overflow.
    loss = (xp.logaddexp(0.0, scores) - labels * scores).sum(keepdims=True) / examples
    chances = 1.0 / (1.0 + xp.exp(-scores))
    gradient = inputs.T @ (chances - labels) / examples
    # One call for both: one kernel packs them into one buffer, and one allreduce reduces it.
    total, direction = hvd.grouped_allreduce([loss, gradient], op=hvd.Sum, name="step")
    return total, direction


def train(xp: Any, options: argparse.Namespace) -> tuple[float, float, Any]:
    """Run gradient descent; return the first and the last loss, and the weights."""
    inputs, labels = own_share(xp, options.examples, options.features, options.seed)
    weights = xp.zeros(options.features, np.float32)
    losses = []
    for _ in range(options.steps):
        loss, gradient = step(xp, weights, inputs, labels, options.examples)
        weights -= options.lr * gradient
        losses.append(loss)
    return float(losses[0][0]), float(losses[-1][0]), weights


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example:\n  pyhvdrun -n 2 examples/cupy_logreg.py --steps 200",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=100, help="steps of gradient descent (default: 100)")
    parser.add_argument("--examples", type=int, default=100_000, help="over all ranks (default: 100000)")
    parser.add_argument("--features", type=int, default=256, help="inputs of the model (default: 256)")
    parser.add_argument("--lr", type=float, default=1.0, help="learning rate (default: 1.0)")
    parser.add_argument("--seed", type=int, default=0, help="of the data (default: 0)")
    options = parser.parse_args(argv)
    if min(options.steps, options.features) < 1 or options.examples < 2:
        parser.error("--steps and --features must be at least 1, --examples at least 2")
    return options


def main() -> None:
    """Train; rank 0 prints the losses and the time."""
    options = parse()
    hvd.init()
    cupy = load_cupy()
    start = time.perf_counter()
    first, last, _ = train(cupy, options)
    seconds = time.perf_counter() - start
    if hvd.rank() == 0:
        each = seconds / options.steps * 1e3
        print(f"loss {first:.4f} -> {last:.4f}, {hvd.size()} ranks, {each:.2f} ms per step", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
