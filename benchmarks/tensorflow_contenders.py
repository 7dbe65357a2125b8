"""The steps of TensorFlow: nothing reduced, pyhvd by both of its doors, and MultiWorkerMirroredStrategy."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

from benchmarks import peers
from benchmarks.framework_steps import (
    FACTOR,
    arrays_of,
    nothing_reduced,
    numpy_contenders,
    step_contender,
)
from benchmarks.harness import OURS, Case, World
from benchmarks.questions.frameworks import CALLBACK, MIRRORED, NATIVE, TENSORFLOW, label

_strategies: list[Any] = []


def start(world: World) -> None:
    """Connect TensorFlow's workers, which must come before its first operation; then start pyhvd."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        ports = world.comm.allgather(free.getsockname()[1])
    workers = [f"127.0.0.1:{port}" for port in ports]
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": {"worker": workers}, "task": {"type": "worker", "index": world.rank}}
    )
    import tensorflow as tf

    ring = tf.distribute.experimental.CommunicationImplementation.RING
    options = tf.distribute.experimental.CommunicationOptions(implementation=ring)
    _strategies.append(tf.distribute.MultiWorkerMirroredStrategy(communication_options=options))
    peers.start_pyhvd()


def case(world: World, count: int) -> Case:
    """Return the case of a number of tensors."""
    import tensorflow as tf

    import pyhvd.tensorflow as hvd

    given = arrays_of(world, count)
    tensors = [tf.constant(array) for array in given]

    def multiplied(tensors: Sequence[Any]) -> list[Any]:
        return [FACTOR * tensor for tensor in tensors]

    def traced(name: str) -> Callable[[], Any]:
        def step(tensors: Sequence[Any]) -> Any:
            return hvd.grouped_allreduce(multiplied(tensors), op=hvd.Sum, name=f"tensorflow.{count}.{name}")

        made = tf.function(step)
        made.get_concrete_function(tensors)
        return lambda: made(tensors)

    alone = tf.function(multiplied)
    with mock.patch("pyhvd.tensorflow.collective.native_door", return_value=None):
        by_callback = traced("callback")
    contenders = [
        nothing_reduced(world, lambda: alone(tensors)),
        step_contender(world, NATIVE, traced("native"), kind=OURS),
        step_contender(world, CALLBACK, by_callback),
        step_contender(world, MIRRORED, _by_strategy(tensors, multiplied)),
        *numpy_contenders(world, "tensorflow", count),
    ]
    return Case(label(TENSORFLOW, count), sum(array.nbytes for array in given), contenders)


def _by_strategy(
    tensors: Sequence[Any], multiplied: Callable[[Sequence[Any]], list[Any]]
) -> Callable[[], Any]:
    """Return the step of TensorFlow's own."""
    import tensorflow as tf

    strategy = _strategies[0]

    def replica(tensors: Sequence[Any]) -> Any:
        context = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.SUM, multiplied(tensors))

    step = tf.function(lambda tensors: strategy.run(replica, args=(tensors,)))
    return lambda: step(tensors)
