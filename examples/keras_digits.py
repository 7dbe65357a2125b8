"""Train a small network of Keras 3 on handwritten digits, data-parallel, on any backend of Keras.

    KERAS_BACKEND=jax pyhvdrun -n 2 examples/keras_digits.py

The data are the 1797 scanned digits that come with scikit-learn. The lines that pyhvd needs are marked: a
program for Horovod has the same ones.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import keras
import numpy as np

import pyhvd.keras as hvd

HELD_OUT = 450


def load(seed: int) -> list[Any]:
    """Return training images and labels, then held-out ones; every rank gets the same split."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit("this example needs the digits of scikit-learn: pip install scikit-learn")
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    images, labels = images[order].reshape(-1, 8, 8, 1).astype("float32") / 16, labels[order]
    return [images[HELD_OUT:], labels[HELD_OUT:], images[:HELD_OUT], labels[:HELD_OUT]]


def make_model() -> keras.Model:
    """Return a small convolutional network; its normalisation takes the batches of all ranks together."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same"),
            hvd.SyncBatchNormalization(),  # pyhvd
            layers.ReLU(),
            layers.Conv2D(32, 3, strides=2, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


def train(options: argparse.Namespace) -> float:
    """Train; return the held-out accuracy."""
    images, labels, held_out_images, held_out_labels = load(options.seed)
    keras.utils.set_random_seed(options.seed + hvd.rank())  # other weights on each rank, then rank 0's
    model = make_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(options.lr, momentum=0.9))  # pyhvd
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),  # pyhvd
        hvd.callbacks.MetricAverageCallback(),  # pyhvd
        hvd.callbacks.LearningRateScheduleCallback(  # pyhvd
            options.lr, lambda epoch: 1 - 0.95 * epoch / options.epochs, momentum_correction=False
        ),
    ]
    # Every rank gets its part, and all parts have the same length.
    count = len(labels) // hvd.size() * hvd.size()
    own = slice(hvd.rank(), count, hvd.size())  # pyhvd
    part = slice(hvd.rank(), None, hvd.size())  # pyhvd
    history = model.fit(
        images[own],
        labels[own],
        options.batch_size // hvd.size(),
        options.epochs,
        callbacks=callbacks,
        verbose=0,
    )
    losses = history.history["loss"]
    if hvd.rank() == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {options.epochs} epochs", flush=True)
    scores = np.asarray(model.predict(held_out_images[part], verbose=0))
    hits = (scores.argmax(1) == held_out_labels[part]).sum()
    return float(sum(hvd.allgather_object(int(hits)))) / HELD_OUT  # pyhvd


def main() -> None:
    """Train; rank 0 prints the result."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example:\n  KERAS_BACKEND=tensorflow pyhvdrun -n 2 examples/keras_digits.py --epochs 20",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=15, help="passes over the data (default: 15)")
    parser.add_argument("--batch-size", type=int, default=64, help="examples per step, over all ranks (64)")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate at the start (default: 0.05)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    options = parser.parse_args()
    hvd.init()  # pyhvd
    start = time.perf_counter()
    accuracy = train(options)
    if hvd.rank() == 0:
        ranks = f"{hvd.size()} rank{'s' * (hvd.size() > 1)} of Keras on {keras.backend.backend()}"
        seconds = time.perf_counter() - start
        print(f"held-out accuracy {accuracy:.1%} ({HELD_OUT} images), {ranks}, {seconds:.1f} s", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
