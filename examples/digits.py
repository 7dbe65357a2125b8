"""Train a small network on handwritten digits, data-parallel: numpy computes, and pyhvd sums the gradients.

The data are the 1797 scanned digits that come with scikit-learn. Every step uses the same examples for any
number of ranks. One rank and four ranks therefore have the same loss curve, up to the rounding of sums.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

import pyhvd as hvd

Array = npt.NDArray[Any]
Arrays = dict[str, Array]

HELD_OUT = 450
CLASSES = 10


# -- data ----------------------------------------------------------------------------------------------


def load(seed: int) -> tuple[Array, Array, Array, Array]:
    """Return training images and labels, then held-out images and labels; every rank gets the same split."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit("this example needs the digits of scikit-learn: pip install scikit-learn")
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    images, labels = images[order] / 16.0, labels[order]
    return images[HELD_OUT:], labels[HELD_OUT:], images[:HELD_OUT], labels[:HELD_OUT]


def own_share(examples: int, batch_size: int, seed: int) -> Iterator[tuple[Array, int]]:
    """Yield this rank's part of each global batch of one epoch, and the size of the global batch.

    Every rank draws the same permutation, cuts it into the same global batches, and takes its part of each.
    The last batch holds the remainder: three of 1347 examples in batches of 64. With four ranks, the last
    rank has no part in that batch: its shard is one step shorter than the others'.
    """
    order = np.random.default_rng(seed).permutation(examples)
    for start in range(0, examples, batch_size):
        batch = order[start : start + batch_size]
        share = np.array_split(batch, hvd.size())[hvd.rank()]
        if len(share):
            yield share, len(batch)


# -- model ---------------------------------------------------------------------------------------------


def new_parameters(pixels: int, hidden: int, seed: int) -> Arrays:
    """Return weights for pixels -> hidden (ReLU) -> classes."""
    draw = np.random.default_rng(seed)
    return {
        "hidden.weight": draw.normal(0.0, np.sqrt(2 / pixels), (pixels, hidden)),
        "hidden.bias": np.zeros(hidden),
        "output.weight": draw.normal(0.0, np.sqrt(1 / hidden), (hidden, CLASSES)),
        "output.bias": np.zeros(CLASSES),
    }


def forward(parameters: Arrays, images: Array) -> tuple[Array, Array]:
    """Return the hidden layer's activations and the score of each class."""
    hidden = np.maximum(images @ parameters["hidden.weight"] + parameters["hidden.bias"], 0.0)
    return hidden, hidden @ parameters["output.weight"] + parameters["output.bias"]


def backward(
    parameters: Arrays, images: Array, labels: Array, whole: int, ready: Callable[[str, Array], None]
) -> float:
    """Return the cross-entropy; pass each gradient on as soon as it is computed, output layer first.

    Loss and gradients are sums over this rank's examples, divided by the size of the global batch. Their sum
    over the ranks is therefore the mean over the batch, even if the ranks' parts differ in size.
    """
    hidden, scores = forward(parameters, images)
    scores -= scores.max(axis=1, keepdims=True)
    log_probability = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    rows = np.arange(len(labels))
    loss = -log_probability[rows, labels].sum() / whole
    error = np.exp(log_probability)
    error[rows, labels] -= 1.0
    error /= whole
    ready("output.weight", hidden.T @ error)
    ready("output.bias", error.sum(axis=0))
    error = (error @ parameters["output.weight"].T) * (hidden > 0.0)
    ready("hidden.weight", images.T @ error)
    ready("hidden.bias", error.sum(axis=0))
    return float(loss)


# -- optimizer -----------------------------------------------------------------------------------------


class Momentum:
    """Gradient descent with momentum, of one process."""

    def __init__(self, parameters: Arrays, lr: float, momentum: float = 0.9) -> None:
        self.parameters = parameters
        self.velocity: Arrays = {name: np.zeros_like(value) for name, value in parameters.items()}
        self.lr = lr
        self._momentum = momentum

    def step(self, gradients: Arrays) -> None:
        """Update the parameters."""
        for name, gradient in gradients.items():
            velocity = self.velocity[name]
            velocity *= self._momentum
            velocity += gradient
            self.parameters[name] -= self.lr * velocity


class DistributedOptimizer:
    """Wrap an optimizer: sum each gradient over the ranks while the next one is computed."""

    def __init__(self, optimizer: Momentum) -> None:
        self._optimizer = optimizer
        self._handles: dict[str, hvd.Handle] = {}

    def ready(self, name: str, gradient: Array) -> None:
        """Start the in-place allreduce of one gradient; the name matches it across ranks."""
        self._handles[name] = hvd.allreduce_async_(gradient, name=f"gradient.{name}", op=hvd.Sum)

    def step(self) -> None:
        """Wait for the sums, then update the parameters by the wrapped optimizer."""
        gradients = {name: hvd.synchronize(handle) for name, handle in self._handles.items()}
        self._handles.clear()
        self._optimizer.step(gradients)

    def broadcast(self, root: int) -> None:
        """Broadcast the root's parameters and momentum to every rank."""
        state = {"parameter": self._optimizer.parameters, "velocity": self._optimizer.velocity}
        handles = [
            hvd.broadcast_async_(array, root, name=f"{kind}.{name}")
            for kind, arrays in state.items()
            for name, array in arrays.items()
        ]
        for handle in handles:
            hvd.synchronize(handle)


# -- training ------------------------------------------------------------------------------------------


def train_epoch(
    parameters: Arrays,
    optimizer: DistributedOptimizer,
    images: Array,
    labels: Array,
    shares: Iterable[tuple[Array, int]],
) -> list[float]:
    """Train on this rank's shard, then join; return the loss over all ranks of each step."""
    losses = []
    for share, whole in shares:
        loss = backward(parameters, images[share], labels[share], whole, optimizer.ready)
        optimizer.step()
        losses.append(float(hvd.allreduce(loss, name="loss", op=hvd.Sum)))
    # A rank with a shorter shard waits here, and contributes zeros to the other ranks' allreduces.
    # Zeros leave a Sum right; an Average would be wrong, since it divides by all ranks, joined or not.
    # A joined rank gets no results and misses the last update: the last rank to join broadcasts its state.
    last = hvd.join()
    optimizer.broadcast(last)
    return losses


def accuracy(parameters: Arrays, images: Array, labels: Array) -> float:
    """Return the share of correctly classified images; each rank classifies its part of them."""
    own = np.array_split(np.arange(len(labels)), hvd.size())[hvd.rank()]
    _, scores = forward(parameters, images[own])
    hits = np.count_nonzero(scores.argmax(axis=1) == labels[own])
    return int(hvd.allreduce(np.int64(hits), name="hits", op=hvd.Sum)) / len(labels)


class Progress:
    """Show rank 0's progress: a bar on a terminal if rich is installed, otherwise a line at intervals."""

    def __init__(self, epochs: int, rank: int) -> None:
        self._every = max(epochs // 10, 1)
        self._epochs = epochs
        self._shown = rank == 0
        self._bar: Any = None
        terminal = _terminal() if self._shown else None
        if terminal is not None:
            try:
                from rich.console import Console
                from rich.progress import Progress as Bar
            except ImportError:
                return
            self._bar = Bar(console=Console(file=terminal, force_terminal=True), transient=True)
            self._task = self._bar.add_task("training", total=epochs)
            self._bar.start()

    def due(self, epoch: int) -> bool:
        """Return whether to report this epoch; the result is the same on every rank."""
        return epoch % self._every == 0 or epoch == self._epochs

    def advance(self) -> None:
        """Record the end of one epoch."""
        if self._bar is not None:
            self._bar.advance(self._task)

    def report(self, epoch: int, loss: float, hit_rate: float) -> None:
        """Print the loss and the held-out accuracy of an epoch."""
        line = f"epoch {epoch:3d} of {self._epochs}  loss {loss:.4f}  held-out accuracy {hit_rate:.1%}"
        if self._bar is not None:
            self._bar.console.print(line, highlight=False)
        elif self._shown:
            print(line, flush=True)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()


def _terminal() -> TextIO | None:
    """Return the user's terminal, or None if there is none.

    mpiexec makes stdout a pipe, but pyhvdrun passes the terminal on as stdin. Open MPI's mpiexec makes stdout
    a terminal of its own, wherever the output goes: this function ignores that terminal.
    """
    if sys.stdout.isatty() and "OMPI_COMM_WORLD_RANK" not in os.environ:
        return sys.stdout
    try:
        return open(os.ttyname(0), "w", encoding="utf-8")
    except OSError:
        return None


def train(options: argparse.Namespace) -> tuple[Arrays, list[float], float]:
    """Train; return the parameters, the loss of every step, and the held-out accuracy."""
    images, labels, held_out_images, held_out_labels = load(options.seed)
    # Each rank draws different weights; the broadcast replaces them with rank 0's.
    parameters = new_parameters(images.shape[1], options.hidden, options.seed + hvd.rank())
    momentum = Momentum(parameters, options.lr)
    optimizer = DistributedOptimizer(momentum)
    optimizer.broadcast(0)
    losses: list[float] = []
    hit_rate = 0.0
    progress = Progress(options.epochs, hvd.rank())
    try:
        for epoch in range(1, options.epochs + 1):
            momentum.lr = options.lr * (1 - (epoch - 1) / options.epochs)
            shares = own_share(len(labels), options.batch_size, options.seed + epoch)
            epoch_losses = train_epoch(parameters, optimizer, images, labels, shares)
            losses += epoch_losses
            progress.advance()
            if progress.due(epoch):
                hit_rate = accuracy(parameters, held_out_images, held_out_labels)
                progress.report(epoch, sum(epoch_losses) / max(len(epoch_losses), 1), hit_rate)
    finally:
        progress.close()
    return parameters, losses, hit_rate


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example:\n  pyhvdrun -n 4 examples/digits.py --epochs 40 --hidden 128 --save digits.npz",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=30, help="passes over the data (default: 30)")
    parser.add_argument(
        "--batch-size", type=int, default=64, help="examples per step, over all ranks (default: 64)"
    )
    parser.add_argument("--lr", type=float, default=0.2, help="learning rate, falling to 0 (default: 0.2)")
    parser.add_argument("--hidden", type=int, default=64, help="hidden units (default: 64)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    parser.add_argument("--save", metavar="PATH.npz", help="write the trained parameters there")
    parser.add_argument("--losses", metavar="PATH.json", help="write the loss of every step there")
    options = parser.parse_args()
    if min(options.epochs, options.batch_size, options.hidden) < 1:
        parser.error("--epochs, --batch-size and --hidden must be at least 1")
    return options


def main() -> None:
    """Train; rank 0 prints the result."""
    options = parse()
    hvd.init()
    start = time.perf_counter()
    parameters, losses, hit_rate = train(options)
    seconds = time.perf_counter() - start
    if hvd.rank() == 0:
        if options.save:
            arrays: dict[str, Any] = dict(parameters)
            np.savez(options.save, **arrays)
        if options.losses:
            with open(options.losses, "w", encoding="utf-8") as file:
                json.dump({"ranks": hvd.size(), "losses": losses, "accuracy": hit_rate}, file)
        ranks = f"{hvd.size()} rank{'s' * (hvd.size() > 1)}"
        print(f"held-out accuracy {hit_rate:.1%} ({HELD_OUT} images), {ranks}, {seconds:.1f} s", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
