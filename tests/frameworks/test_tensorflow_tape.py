"""DistributedGradientTape: what it returns for all kinds of sources and groups, and what it compares."""
# ruff: noqa: E402

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="needs TensorFlow: run `make test-frameworks`")

import pyhvd.tensorflow as hvd
from tests.frameworks.doors import on_doors

MODES: dict[str, Callable[[Any], Any]] = {"eager": lambda function: function, "graph": tf.function}


def _variables() -> list[Any]:
    return [tf.Variable([1.0, 2.0]), tf.Variable([[3.0]]), tf.Variable(4.0)]


def _loss(variables: Any) -> Any:
    """Return a loss whose gradients are 1 on rank 0 and 3 on rank 1, times 1, 2 and 3."""
    factor = 1.0 + 2 * hvd.rank()
    return factor * tf.add_n([(k + 1) * tf.reduce_sum(each) for k, each in enumerate(variables)])


def _gradients(variables: Any, **options: Any) -> Any:
    with hvd.DistributedGradientTape(tf.GradientTape(), **options) as tape:
        loss = _loss(variables)
    return tape.gradient(loss, variables)


def _in_both_modes(check: Callable[[Any, Any], None]) -> None:
    """Call a function with the variables, and with what makes its step eager or traced."""
    hvd.init()
    for wrap in MODES.values():
        for _ in range(2):
            check(_variables(), wrap)


def _flat(gradients: Any) -> list[Any]:
    return [float(np.ravel(each)[0]) for each in tf.nest.flatten(gradients)]


@on_doors()
def test_the_average_of_all_ranks() -> None:
    def check(variables: Any, wrap: Any) -> None:
        @wrap
        def step() -> Any:
            with tf.GradientTape() as tape:
                loss = _loss(variables)
            made = hvd.DistributedGradientTape(tape)
            assert isinstance(made, tf.GradientTape)
            assert type(made).__name__ == "GradientTape"
            return made.gradient(loss, variables)

        assert _flat(step()) == [2, 4, 6]

    _in_both_modes(check)


@on_doors()
def test_structures_of_sources() -> None:
    def check(variables: Any, wrap: Any) -> None:
        @wrap
        def step() -> Any:
            with hvd.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
                loss = _loss(variables)
            nested = tape.gradient(loss, {"a": variables[0], "b": [variables[1], variables[2]]})
            assert set(nested) == {"a", "b"}
            alone = tape.gradient(loss, variables[1])
            assert isinstance(alone, tf.Tensor)
            jacobian = tape.jacobian(loss, variables[2])
            return nested, alone, jacobian

        nested, alone, jacobian = step()
        assert _flat(nested) == [2, 4, 6]
        assert _flat(alone) == [4]
        assert _flat(jacobian) == [3 + 6 * hvd.rank()]

    _in_both_modes(check)


@on_doors()
def test_tensors_that_are_watched() -> None:
    def check(_: Any, wrap: Any) -> None:
        @wrap
        def step(x: Any) -> Any:
            with hvd.DistributedGradientTape(tf.GradientTape(watch_accessed_variables=False)) as tape:
                tape.watch(x)
                loss = tf.reduce_sum(x * x)
            return tape.gradient(loss, [x])

        assert _flat(step(tf.constant([1.0 + hvd.rank()]))) == [3]

    _in_both_modes(check)


@on_doors()
def test_gradients_that_are_none() -> None:
    def check(variables: Any, wrap: Any) -> None:
        @wrap
        def step() -> Any:
            with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = _loss(variables[:2])
            made = tape.gradient(loss, variables)
            assert made[2] is None
            return made[:2]

        assert _flat(step()) == [2, 4]

        @wrap
        def with_zeros() -> Any:
            with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = _loss(variables[:2])
            return tape.gradient(loss, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO)

        assert _flat(with_zeros()) == [2, 4, 0]

        others = [tf.Variable(tf.ones(5)) for _ in range(2)]  # which were not compared before

        @wrap
        def on_one_rank() -> Any:
            with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = _loss(others[: 1 + hvd.rank()])
            return tape.gradient(loss, others)

        with pytest.raises(hvd.MismatchError, match="gradient 1: rank 0: no gradient of Variable"):
            on_one_rank()

    _in_both_modes(check)


@on_doors()
def test_groups() -> None:
    def check(variables: Any, wrap: Any) -> None:
        for groups in (
            1,
            2,
            7,
            [variables[1:]],
            [[variables[2], variables[0]]],
            [[variables[0]], [variables[1]]],
        ):
            assert _flat(wrap(partial(_gradients, variables, groups=groups))()) == [2, 4, 6]

    _in_both_modes(check)
    for wrong in (0, -1, [tf.Variable(1.0)], True):
        with pytest.raises(ValueError, match="groups"):
            hvd.DistributedGradientTape(tf.GradientTape(), groups=wrong)


@on_doors()
def test_local_sources() -> None:
    def check(variables: Any, wrap: Any) -> None:
        for scaled in (True, False):

            @wrap
            def step(scaled: bool = scaled) -> Any:
                tape = hvd.DistributedGradientTape(tf.GradientTape(), scale_local_gradients=scaled)
                tape.register_local_source(variables[1])
                with tape:
                    loss = _loss(variables)
                made = tape.gradient(loss, variables)
                local, shared = tape.get_local_and_global_gradients(made, variables)
                assert [len(local), len(shared)] == [1, 2]
                return made

            assert _flat(step()) == [2, (2 + 4 * hvd.rank()) / (2 if scaled else 1), 6]

    _in_both_modes(check)


@on_doors()
def test_local_layers() -> None:
    import keras

    hvd.init()
    keras.utils.set_random_seed(7)
    layers = [keras.layers.Dense(1), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((2,)), *layers])

    @tf.function
    def step(x: Any) -> Any:
        tape = hvd.PartialDistributedGradientTape(
            tf.GradientTape(), local_layers=[layers[1]], scale_local_gradients=False
        )
        with tape:
            loss = tf.reduce_sum(model(x))
        with tf.GradientTape() as plain:
            own = tf.reduce_sum(model(x))
        return tape.gradient(loss, model.trainable_variables), plain.gradient(own, model.trainable_variables)

    made, own = step(tf.ones((1 + hvd.rank(), 2)))
    everyone = hvd.allgather_object([each.numpy() for each in own])
    for place in range(4):
        expected = (everyone[0][place] + everyone[1][place]) / 2 if place < 2 else own[place]
        np.testing.assert_allclose(made[place], expected, rtol=1e-6)


@on_doors()
def test_options() -> None:
    def check(variables: Any, wrap: Any) -> None:
        for options in (
            {"gradient_predivide_factor": 4.0},
            {"compression": hvd.Compression.fp16},
            {"op": hvd.Sum},
            {"device_dense": "/cpu:0"},
        ):
            expected = [4, 8, 12] if "op" in options else [2, 4, 6]
            assert _flat(wrap(partial(_gradients, variables, **options))()) == expected

    _in_both_modes(check)
    with pytest.raises(ValueError, match="needs op=Average"):
        hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum, gradient_predivide_factor=2.0)
    with pytest.raises(TypeError, match=r"tf\.GradientTape"):
        hvd.DistributedGradientTape(7)
    variables, op = [tf.Variable(tf.ones(7))], hvd.Sum if hvd.rank() else hvd.Average
    with hvd.DistributedGradientTape(tf.GradientTape(), op=op) as tape:
        loss = _loss(variables)
    with pytest.raises(hvd.MismatchError, match="op: "):
        tape.gradient(loss, variables)


@on_doors()
def test_slices_of_embeddings() -> None:
    hvd.init()
    for wrap in MODES.values():
        for dense in (False, True):
            table = tf.Variable(tf.ones((4, 2)))
            other = tf.Variable(2.0)

            @wrap
            def step(rows: Any, table: Any = table, other: Any = other, dense: bool = dense) -> Any:
                with hvd.DistributedGradientTape(tf.GradientTape(), sparse_as_dense=dense) as tape:
                    loss = other * tf.reduce_sum(tf.gather(table, rows))
                slices, number = tape.gradient(loss, [table, other])
                assert isinstance(slices, tf.Tensor if dense else tf.IndexedSlices)
                return tf.convert_to_tensor(slices), number

            found, number = step(tf.constant([0, 0, 1] if hvd.rank() == 0 else [1]))
            assert found[:, 0].numpy().tolist() == [2, 2, 0, 0]
            assert number.numpy() == 4


@on_doors()
def test_process_sets() -> None:
    hvd.init()
    alone, outside = hvd.add_process_set([0]), hvd.add_process_set([1])
    variables = _variables()
    for part in (alone, outside):
        with hvd.DistributedGradientTape(tf.GradientTape(), process_set=part) as tape:
            loss = _loss(variables)
        own = 1 + 2 * hvd.rank()
        assert _flat(tape.gradient(loss, variables)) == [own, 2 * own, 3 * own]
    hvd.remove_process_set(alone)
    hvd.remove_process_set(outside)


@on_doors()
def test_training_equals_one_process() -> None:
    hvd.init()
    inputs = np.random.default_rng(3).normal(size=(64, 3)).astype(np.float32)
    wanted = inputs @ np.array([[1], [2], [3]], np.float32)
    mine = slice(32 * hvd.rank(), 32 * (hvd.rank() + 1))

    def train(own: Any, distributed: bool) -> Any:
        weights = tf.Variable(tf.fill((3, 1), float(0 if not distributed else hvd.rank())))
        if distributed:
            hvd.broadcast_variables([weights], root_rank=0)

        @tf.function
        def step() -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((inputs[own] @ weights - wanted[own]) ** 2)
            if distributed:
                tape = hvd.DistributedGradientTape(tape)
            (gradient,) = tape.gradient(loss, [weights])
            weights.assign_sub(0.1 * gradient)

        for _ in range(20):
            step()
        return weights.numpy()

    np.testing.assert_allclose(train(mine, True), train(slice(None), False), rtol=1e-5)
