"""A program for elastic jobs: ``fit()`` in epochs, with a rank that kills itself in the middle of one.

The weights must be those of one process on the joined batches. Rank 0 compares them, and writes a line.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

import pyhvd.keras as hvd

EPOCHS, STEPS, BATCH, RANKS = 3, 4, 8, 2
hvd.init()


def batches(epoch: int, first: int, ranks: list[int]) -> Iterator[tuple[Any, Any]]:
    """Yield an epoch's batches of some ranks, joined."""
    for step in range(first, STEPS):
        made = [np.random.default_rng((epoch, step, rank)).normal(size=(BATCH, 3)) for rank in ranks]
        inputs = np.concatenate(made).astype("float32")
        yield inputs, inputs @ np.array([[1], [2], [3]], "float32")


def make_model(seed: int) -> Any:
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]
    )


class Killer(keras.callbacks.Callback):
    """Kills rank 1 in the second epoch of the first generation, after a batch and before its commit."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if hvd.elastic.generation() == 0 and hvd.rank() == 1 and (state.epoch, batch) == (1, 2):
            os.kill(os.getpid(), signal.SIGKILL)


model = make_model(1 + hvd.rank())
model.compile(
    hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9)), loss="mse", jit_compile="auto"
)
state = hvd.elastic.KerasState(model, epoch=0, batch=0, began=[])


@hvd.elastic.run
def train(state: Any) -> None:
    while state.epoch < EPOCHS:
        state.began = [*state.began, (state.epoch, state.batch)]
        callbacks = [
            hvd.elastic.CommitStateCallback(state),
            Killer(),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
        ]
        data = batches(state.epoch, state.batch, [hvd.rank()])
        steps = STEPS - state.batch
        state.model.fit(data, steps_per_epoch=steps, epochs=1, callbacks=callbacks, verbose=0)


train(state)
if hvd.rank() == 0:
    alone = make_model(1)
    alone.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss="mse", jit_compile=False)
    for number in range(EPOCHS):
        alone.fit(batches(number, 0, [*range(RANKS)]), steps_per_epoch=STEPS, epochs=1, verbose=0)
    for one, other in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    print(f"generation {hvd.elastic.generation()}, began {state.began}")
