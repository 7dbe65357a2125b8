"""Programs of compiled steps that never end by themselves: what a fault of another rank does to graphs.

``python -m tests.frameworks.endless_steps FOLDER`` is one rank; FOLDER is that of
:mod:`tests.hosts.fault_programs`. The variable :data:`FRAMEWORK` has the framework. With a signal's name in
:data:`STRIKE`, rank 1 sends itself that signal during a step, and writes the time into ``struck``.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.hosts.fault_programs import noted_steps

FRAMEWORK = "TEST_FRAMEWORK"
STRIKE = "TEST_STRIKE"
_COUNT = 20
_STRUCK_AT = 3
_LATER_S = 0.05


def train_with_jax(note: Callable[[], None]) -> None:
    """Make steps of a function that JAX has compiled."""
    import jax
    import jax.numpy as jnp

    import pyhvd.jax as hvd

    @jax.jit
    def step(x: Any) -> Any:
        return [hvd.allreduce(x + k, hvd.Sum, name=f"step {k}") for k in range(_COUNT)]

    @hvd.elastic.run
    def train(_: Any) -> None:
        while True:
            jax.block_until_ready(step(jnp.ones(1000)))
            note()

    train(hvd.elastic.JaxState(epoch=0))


def train_with_tensorflow(note: Callable[[], None]) -> None:
    """Make steps of a ``tf.function``."""
    import tensorflow as tf

    import pyhvd.tensorflow as hvd

    @tf.function
    def step(x: Any) -> Any:
        return [hvd.allreduce(x + k, op=hvd.Sum, name=f"step {k}") for k in range(_COUNT)]

    @hvd.elastic.run
    def train(_: Any) -> None:
        while True:
            step(tf.ones(1000))
            note()

    train(hvd.elastic.TensorFlowState(epoch=0))


def train_with_keras(note: Callable[[], None]) -> None:
    """Call ``fit()``."""
    import keras

    import pyhvd.keras as hvd

    model = keras.Sequential([keras.Input((3,)), *(keras.layers.Dense(4) for _ in range(_COUNT // 2))])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.0), groups=5)
    model.compile(optimizer, loss="mse", jit_compile="auto")

    class Note(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            note()

    @hvd.elastic.run
    def train(state: Any) -> None:
        inputs = np.ones((8, 3), np.float32)
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), Note()]
        while True:
            state.model.fit(inputs, inputs[:, :1], batch_size=1, callbacks=callbacks, verbose=0)

    train(hvd.elastic.KerasState(model, epoch=0))


_PROGRAMS = {"jax": train_with_jax, "tensorflow": train_with_tensorflow, "keras": train_with_keras}


def striking(note: Callable[[], None], folder: Path, number: signal.Signals) -> Callable[[], None]:
    """Return the function that notes a step; soon after an early one this process gets a signal."""
    steps = itertools.count(1)

    def strike() -> None:
        (folder / "struck").write_text(str(time.time()))
        os.kill(os.getpid(), number)

    def note_and_strike() -> None:
        note()
        if next(steps) == _STRUCK_AT:
            threading.Timer(_LATER_S, strike).start()

    return note_and_strike


def main() -> None:
    """Make steps until a call raises."""
    import pyhvd

    folder = Path(sys.argv[1])
    pyhvd.init()
    with noted_steps(folder) as note:
        if STRIKE in os.environ and pyhvd.rank() == 1:
            note = striking(note, folder, signal.Signals[os.environ[STRIKE]])
        _PROGRAMS[os.environ[FRAMEWORK]](note)


if __name__ == "__main__":
    main()
