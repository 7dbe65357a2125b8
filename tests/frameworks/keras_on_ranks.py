"""What every backend of Keras must do on two ranks: :func:`make_tests` makes tests of it for one backend.

The functions import Keras when they are called, in ranks that have the right ``KERAS_BACKEND``; pytest's own
process imports none.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import json
import operator
import os
import pickle
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.mpi.harness import on_ranks

_SIZE = 2
_STEPS = 4
_BATCH = 8  # of one rank
_CASES: dict[str, Callable[..., None]] = {}
_NOT_WITH: dict[str, set[str]] = {}


def case(*without: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a function be a test of every backend, but those given."""

    def add(function: Callable[..., None]) -> Callable[..., None]:
        _CASES[function.__name__] = function
        _NOT_WITH[function.__name__] = set(without)
        return function

    return add


def make_tests(backend: str) -> dict[str, Any]:
    """Return the tests of a backend by name; they are skipped where it is not installed."""
    missing = [name for name in ("keras", backend) if importlib.util.find_spec(name) is None]
    mark = pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)}: not installed")
    env = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
    env["PYHVD_DYNAMIC_PROCESS_SETS"] = "1"
    env["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # compiling takes most of the time
    run = on_ranks(_SIZE, env=env, warm=True, timeout=600)
    return {
        f"test_{name}": mark(run(function))
        for name, function in _CASES.items()
        if backend not in _NOT_WITH[name]
    }


# -- models and data -----------------------------------------------------------------------------------


def _hvd() -> Any:
    import pyhvd.keras as hvd

    hvd.init()
    return hvd


def _dense() -> list[Any]:
    import keras

    return [keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]


def _model(layers: Callable[[], list[Any]] = _dense, seed: int = 1) -> Any:
    """Return a small model, with the same weights on every rank that gives the same seed."""
    import keras

    keras.utils.set_random_seed(seed)  # layers take their seeds when they are made
    return keras.Sequential([keras.Input((3,)), *layers()])


def _data(steps: int = _STEPS) -> tuple[Any, Any]:
    """Return the joined batches of all ranks, one after the other."""
    inputs = np.random.default_rng(0).normal(size=(steps * _SIZE * _BATCH, 3)).astype("float32")
    return inputs, inputs @ np.array([[1], [2], [3]], "float32")


def _part(array: Any, rank: int) -> Any:
    """Return one rank's part of each joined batch."""
    parts = array.reshape(-1, _SIZE, _BATCH, *array.shape[1:])
    return parts[:, rank].reshape(-1, *array.shape[1:])


def _my_part(steps: int = _STEPS) -> list[Any]:
    """Return this rank's part of inputs and labels."""
    import pyhvd

    return [_part(each, pyhvd.rank()) for each in _data(steps)]


def _fit(model: Any, inputs: Any, wanted: Any, batch: int = _BATCH, epochs: int = 1, **options: Any) -> Any:
    return model.fit(
        inputs,
        wanted,
        batch_size=batch,
        epochs=epochs,
        shuffle=False,
        verbose=options.pop("verbose", 0),
        **options,
    )


def _alone(optimizer: Any, batch: int = _SIZE * _BATCH, layers: Callable[[], list[Any]] = _dense) -> Any:
    """Return a model that one process has trained on the joined batches."""
    model = _model(layers)
    model.compile(optimizer, loss="mse", jit_compile=False)
    _fit(model, *_data(), batch=batch)
    return model


def _together(optimizer: Any, layers: Callable[[], list[Any]] = _dense, **options: Any) -> Any:
    """Return a model that the ranks have trained on their parts."""
    model = _model(layers)
    model.compile(optimizer, **{"loss": "mse"} | options)
    _fit(model, *_my_part())
    return model


def _assert_close(one: Any, other: Any, atol: float = 1e-5) -> None:
    for mine, wanted in zip(one.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-5, atol=atol)


def _assert_alike(model: Any) -> None:
    """Assert that all ranks have the same weights, bit by bit."""
    import pyhvd

    own = [each.tobytes() for each in model.get_weights()]
    assert pyhvd.broadcast_object(own, 0) == own


def _named(patch: Any) -> set[str]:
    """Return a set of the names of the reductions that this rank makes, or compiles, from now on."""
    from pyhvd.keras.backend import door

    names: set[str] = set()
    kind = type(door())
    own = kind.reduce

    def note(self: Any, tensors: Any, terms: Any) -> Any:
        names.add(terms.name)
        return own(self, tensors, terms)

    patch.setattr(kind, "reduce", note)
    return names


def _reduced() -> int:
    """Return how many tensors this rank has reduced since ``init()``."""
    import pyhvd

    return sum(pyhvd.metrics().tensors.get("allreduce", {}).values())


# -- the optimizer -------------------------------------------------------------------------------------


@case()
def fit_equals_one_process() -> None:
    import keras

    hvd = _hvd()
    of_ema = {"use_ema": True, "ema_overwrite_frequency": 3}
    made: list[Callable[[], Any]] = [
        lambda: keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5),
        lambda: keras.optimizers.Adam(0.01, clipnorm=0.1, weight_decay=0.01, **of_ema),
        lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5), clipvalue=0.2),
    ]
    for make in made:
        given = make()
        own_class = type(given)
        optimizer = hvd.DistributedOptimizer(given)
        assert optimizer is given
        assert isinstance(optimizer, own_class)
        assert type(optimizer) is not own_class
        for name in ("__name__", "__qualname__", "__module__"):
            assert getattr(type(optimizer), name) == getattr(own_class, name)
        trained = _together(optimizer)
        _assert_close(trained, _alone(make()))
        _assert_alike(trained)


@case()
def accumulated_steps_are_reduced_once() -> None:
    import keras

    hvd = _hvd()
    for average, factor in ((True, 1.0), (False, 2.0)):
        # One process with twice the batch, and with the gradients' sum as a twofold rate.
        wanted = _alone(keras.optimizers.SGD(0.02 * factor, momentum=0.9), batch=2 * _SIZE * _BATCH)
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.02, momentum=0.9),
            backward_passes_per_step=2,
            average_aggregated_gradients=average,
        )
        before = _reduced()
        trained = _together(optimizer)
        assert _reduced() - before == _STEPS // 2 * len(trained.trainable_variables)
        _assert_close(trained, wanted)


@case()
def accumulation_of_a_built_optimizer_fits_its_file() -> None:
    import keras

    hvd = _hvd()
    model = _together(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)))
    averaging = keras.optimizers.Adam(0.01, use_ema=True)
    averaging.build(model.trainable_variables)
    for built in (model.optimizer, averaging):
        momentum = keras.ops.convert_to_numpy(built._momentums[0]).copy()
        hvd.DistributedOptimizer(built, backward_passes_per_step=2)
        fresh = type(built).from_config(built.get_config())
        fresh.build(model.trainable_variables)
        assert [each.shape for each in built.variables] == [each.shape for each in fresh.variables]
        fresh.set_weights([keras.ops.convert_to_numpy(each) for each in built.variables])
        assert (keras.ops.convert_to_numpy(fresh._momentums[0]) == momentum).all()
    model.compile(model.optimizer, loss="mse")
    _fit(model, *_my_part())
    _assert_alike(model)


@case()
def other_ways_to_step() -> None:
    import keras

    hvd = _hvd()
    make = keras.optimizers.SGD
    wanted = _alone(make(0.05))
    _assert_close(_together(hvd.DistributedOptimizer(make(0.05)), run_eagerly=True), wanted)
    model = _model()
    model.compile(hvd.DistributedOptimizer(make(0.05)), loss="mse")
    inputs, labels = _my_part()
    for first in range(0, len(inputs), _BATCH):
        model.train_on_batch(inputs[first : first + _BATCH], labels[first : first + _BATCH])
    _assert_close(model, wanted)


@case("torch")  # Keras has no steps_per_execution there
def several_steps_in_one_call() -> None:
    import keras

    hvd = _hvd()
    made = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9))
    trained = _together(made, steps_per_execution=4)
    _assert_close(trained, _alone(keras.optimizers.SGD(0.05, momentum=0.9)))


@case()
def two_optimizers_keep_apart() -> None:
    import keras

    hvd = _hvd()
    wanted = _alone(keras.optimizers.SGD(0.05))
    other = _model(lambda: [keras.layers.Dense(2), keras.layers.Dense(1)])
    other.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
    model = _model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), loss="mse")
    inputs, labels = _my_part()
    for first in range(0, len(inputs), _BATCH):
        for each in (other, model):
            each.train_on_batch(inputs[first : first + _BATCH], labels[first : first + _BATCH])
    _assert_close(model, wanted)
    _assert_alike(other)


@case()
def options_change_no_result() -> None:
    import keras

    hvd = _hvd()
    wanted = _alone(keras.optimizers.SGD(0.05))
    for options, names in (
        ({"groups": 2}, 2),
        ({"gradient_predivide_factor": 2.0, "name": "of mine"}, 1),
        ({"op": hvd.Sum}, 1),
    ):
        with pytest.MonkeyPatch.context() as patch:
            seen = _named(patch)
            rate = 0.025 if "op" in options else 0.05
            trained = _together(hvd.DistributedOptimizer(keras.optimizers.SGD(rate), **options))
        assert len(seen) == names
        assert "name" not in options or seen == {"of mine"}
        _assert_close(trained, wanted)
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        trained = _together(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), compression=compression))
        _assert_close(trained, wanted, atol=1e-2)
        _assert_alike(trained)


@case()
def chosen_groups_are_reduced_in_turn() -> None:
    import keras

    hvd = _hvd()
    model = _model()
    kernels = [each for each in model.trainable_variables if each.name == "kernel"]
    with pytest.MonkeyPatch.context() as patch:
        seen = _named(patch)
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), groups=[kernels]), loss="mse")
        _fit(model, *_my_part())
    assert len(seen) == 3  # the kernels, and each bias
    _assert_close(model, _alone(keras.optimizers.SGD(0.05)))


@case()
def local_layers_keep_their_gradients() -> None:
    import keras

    hvd = _hvd()
    model = _model(lambda: [keras.layers.Dense(4, name="shared"), keras.layers.Dense(1, name="own")])
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.05), local_layers=[model.get_layer("own")], scale_local_gradients=False
    )
    model.compile(optimizer, loss="mse")
    _fit(model, *_my_part(1))
    roots = hvd.broadcast_object({layer.name: layer.get_weights() for layer in model.layers}, 0)
    alike = {
        layer.name: all((a == b).all() for a, b in zip(layer.get_weights(), roots[layer.name], strict=True))
        for layer in model.layers
    }
    assert alike["shared"]
    assert alike["own"] == (hvd.rank() == 0)


@case()
def several_optimizers_in_one() -> None:
    import keras

    hvd = _hvd()
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip("this Keras has no MultiOptimizer")

    def make() -> Any:
        chosen = {".*bias": keras.optimizers.Adam(0.01)}
        choice = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.05), chosen)
        return keras.optimizers.MultiOptimizer(choice)

    trained = _together(hvd.DistributedOptimizer(make()))
    _assert_close(trained, _alone(make()))


@case()
def a_rank_alone_in_its_set_works_alone() -> None:
    import keras

    hvd = _hvd()
    own = hvd.add_process_set([0])
    model = _model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), process_set=own), loss="mse")
    inputs, labels = _my_part()
    _fit(model, inputs, labels)
    wanted = _model()
    wanted.compile(keras.optimizers.SGD(0.05), loss="mse")
    _fit(wanted, inputs, labels)
    _assert_close(model, wanted)
    hvd.remove_process_set(own)


@case()
def differences_are_one_error_with_all_of_them() -> None:
    import keras

    hvd = _hvd()
    width = 4 + hvd.rank()
    model = _model(lambda: [keras.layers.Dense(width, name="hidden"), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), groups=1 + hvd.rank()), loss="mse")
    with pytest.raises(hvd.MismatchError) as caught:
        _fit(model, *_my_part())
    text = str(caught.value)
    assert "groups: rank 0: 1; rank 1: 2" in text
    assert "float32 [3, 4]" in text
    assert "float32 [3, 5]" in text


# -- loss scaling --------------------------------------------------------------------------------------


@case()
def ranks_skip_the_same_steps() -> None:
    import keras

    hvd = _hvd()
    scaling: dict[str, Any] = {"initial_scale": 4.0, "dynamic_growth_steps": 3}
    for passes, wraps in ((1, "after"), (1, "before"), (2, "after")):
        inner = keras.optimizers.SGD(0.01, momentum=0.9)
        if wraps == "before":
            inner = keras.optimizers.LossScaleOptimizer(inner, **scaling)
        optimizer = hvd.DistributedOptimizer(inner, backward_passes_per_step=passes)
        if wraps != "before":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, **scaling)
        assert wraps != "before" or optimizer is inner
        model = _model(lambda: [keras.layers.Dense(2), keras.layers.Dense(1)])
        model.compile(optimizer, loss="mse", auto_scale_loss=False)
        inputs, labels = _my_part(6)
        inputs = inputs.copy()
        if hvd.rank() == 1:
            inputs[2 * _BATCH] = np.inf  # in the third step
        _fit(model, inputs, labels)
        state = [np.asarray(keras.ops.convert_to_numpy(each)) for each in optimizer.variables[:4]]
        assert all((a == b).all() for a, b in zip(state, hvd.broadcast_object(state, 0), strict=True))
        assert all(np.isfinite(each).all() for each in model.get_weights())
        assert int(keras.ops.convert_to_numpy(optimizer.inner_optimizer._iterations)) == 5
        _assert_alike(model)


# -- saving --------------------------------------------------------------------------------------------


@case()
def saved_models_name_plain_classes() -> None:
    import keras

    hvd = _hvd()
    loss = keras.losses.MeanSquaredError()  # Keras 3.15 cannot load the name "mse" from HDF5
    model = _together(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss=loss)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model.save(path)
        with zipfile.ZipFile(path) as parts:
            config = parts.read("config.json").decode()
        assert "pyhvd" not in config
        assert json.loads(config)["compile_config"]["optimizer"]["class_name"] == "Adam"
        plain = keras.saving.load_model(path)
        assert "Distributed" not in repr(type(plain.optimizer).__mro__)
        for ending in ("model.keras", "model.h5"):
            model.save(Path(folder) / ending)
            with warnings.catch_warnings(record=True) as told:
                loaded = hvd.load_model(Path(folder) / ending)
            of_hdf5 = [each for each in told if "restores no state of the optimizer" in str(each.message)]
            assert len(of_hdf5) <= (ending == "model.h5")
            _assert_close(loaded, model)
            if ending == "model.keras":  # Keras restores no slots from HDF5
                for pair in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
                    np.testing.assert_array_equal(*map(keras.ops.convert_to_numpy, pair))
            _fit(loaded, *_my_part())
            _assert_alike(loaded)
        model.save_weights(Path(folder) / "model.weights.h5")
        model.load_weights(Path(folder) / "model.weights.h5")


def a_loaded_state_goes_to_ranks_that_begin() -> None:
    """Rank 0 loads a model; rank 1 makes one, whose optimizer has no variables yet."""
    import keras

    hvd = _hvd()
    seen: list[Any] = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch == 0:
                held = (*self.model.variables, *self.model.optimizer.variables)
                seen.extend(keras.ops.convert_to_numpy(each).tobytes() for each in held)

    def make(seed: int) -> Any:
        made = _model(seed=seed)
        made.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9)), loss="mse")
        return made

    model = make(1)
    _fit(model, *_my_part())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        if hvd.rank() == 0:
            model.save(path)
            model = hvd.load_model(path)
        else:
            model = make(7)
        _fit(model, *_my_part(), callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), Look()])
    one, other = hvd.allgather_object(seen)
    assert one == other
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 2 * _STEPS
    _assert_alike(model)


@case()
def copies_of_the_optimizer_are_plain() -> None:
    import keras

    hvd = _hvd()
    plain = keras.optimizers.SGD(0.25, momentum=0.5)
    optimizer: Any = hvd.DistributedOptimizer(keras.optimizers.SGD(0.25, momentum=0.5))
    config = optimizer.get_config()
    clone = type(optimizer).from_config(config)
    assert clone.get_config() == config
    assert clone._reduction is None
    ways: list[Callable[[Any], Any]] = [lambda each: pickle.loads(pickle.dumps(each)), copy.deepcopy]
    for copied in ways:
        try:
            copied(plain)
        except Exception as exc:
            with pytest.raises(type(exc)):
                copied(optimizer)
        else:
            made = copied(optimizer)
            assert type(made) is type(plain)
            assert made.get_config() == config
    assert optimizer._reduction is not None


# -- callbacks -----------------------------------------------------------------------------------------


@case()
def weights_are_alike_before_the_first_step() -> None:
    import keras

    hvd = _hvd()
    seen: list[Any] = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch == 0:
                seen.extend(self.model.get_weights())

    model = _model(seed=hvd.rank())
    first = model.get_weights()
    optimizer = keras.optimizers.Adam(0.01 * (1 + hvd.rank()))
    model.compile(hvd.DistributedOptimizer(optimizer), loss="mse")
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(1), Look()]
    _fit(model, *_my_part(1), callbacks=callbacks)
    wanted = hvd.broadcast_object(first, 1)
    assert all((one == other).all() for one, other in zip(seen, wanted, strict=True))
    rate = float(keras.ops.convert_to_numpy(optimizer.learning_rate))
    assert rate == pytest.approx(0.01 * (1 + hvd.rank()))  # its own


@case()
def rates_follow_the_formula() -> None:
    import keras

    hvd = _hvd()

    class Rates(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[float] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.seen.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))

    def train(callback: Any, epochs: int, initial: float = 0.5) -> tuple[list[float], Any]:
        model, rates = _model(), Rates()
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(initial)), loss="mse")
        inputs, wanted = _my_part(2)
        history = _fit(model, inputs, wanted, epochs=epochs, callbacks=[callback, rates])
        return rates.seen, history.history["lr"]

    seen, logged = train(hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2), epochs=3)
    wanted = [0.4 / 2 * (((step + 1) / 2) * 1 / 2 + 1) for step in range(4)] + [0.4, 0.4]
    assert seen == pytest.approx(wanted)
    assert logged == pytest.approx([wanted[1], wanted[3], 0.4])
    seen, _ = train(hvd.callbacks.LearningRateScheduleCallback(None, 0.1, start_epoch=1), epochs=3)
    assert seen == pytest.approx([0.5, 0.5, 0.5, 0.5, 0.05, 0.05])
    falling = hvd.callbacks.LearningRateScheduleCallback(1.0, lambda epoch: 1 / (1 + epoch), end_epoch=1)
    seen, _ = train(falling, epochs=2)
    assert seen == pytest.approx([1.0] * 4)


@case()
def metrics_are_averaged() -> None:
    import keras

    hvd = _hvd()

    def train(weights: bool, validates: bool) -> Any:
        model = _model()
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)), loss="mse")
        inputs, labels = _my_part()
        shown = len(inputs) // (1 + 3 * hvd.rank())  # uneven validation
        validation = (inputs[:shown], labels[:shown]) if validates else None
        callback = hvd.callbacks.MetricAverageCallback(weights=weights)
        own: list[Any] = []
        note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: own.append(dict(logs)))
        logs = _fit(model, inputs, labels, validation_data=validation, callbacks=[note, callback]).history
        return own[0], logs, shown

    own, logs, _ = train(weights=False, validates=True)
    everyone = hvd.allgather_object(own)
    for name in ("loss", "val_loss"):
        assert logs[name][0] == pytest.approx(np.mean([each[name] for each in everyone]))
    own, logs, shown = train(weights=True, validates=True)
    everyone, counts = hvd.allgather_object(own), hvd.allgather_object(shown)
    assert logs["val_loss"][0] == pytest.approx(np.average([e["val_loss"] for e in everyone], weights=counts))
    assert logs["loss"][0] == pytest.approx(np.mean([each["loss"] for each in everyone]))
    with pytest.raises(hvd.MismatchError, match="rank 0: loss; rank 1: loss, val_loss"):
        train(weights=False, validates=hvd.rank() == 1)


@case()
def one_rank_writes_the_best_model() -> None:
    import keras

    hvd = _hvd()
    with tempfile.TemporaryDirectory() as folder:
        callback = hvd.callbacks.BestModelCheckpoint(monitor="loss")
        model = _model()
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), loss="mse")
        data = _my_part()
        with pytest.raises(ValueError, match="give a path that ends with"):
            _fit(model, *data, callbacks=[callback])
        callback.filepath = Path(folder) / "best.keras"
        _fit(model, *data, callbacks=[hvd.callbacks.MetricAverageCallback(), callback])
        assert os.listdir(folder) == (["best.keras"] if hvd.rank() == 0 else [])
        if hvd.rank() == 0:
            _assert_close(keras.saving.load_model(callback.filepath), model)


@case()
def ranks_stop_together() -> None:
    import keras

    hvd = _hvd()

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = hvd.rank() == 1 and epoch == 1

    model = _model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), loss="mse")
    inputs, wanted = _my_part(1)
    history = _fit(model, inputs, wanted, epochs=4, callbacks=[Stop(), hvd.callbacks.StopTogetherCallback()])
    assert len(history.epoch) == 2


# -- verbs and layers ----------------------------------------------------------------------------------


@case()
def verbs_return_arrays_of_the_backend() -> None:
    import keras

    hvd = _hvd()
    ops = keras.ops
    mine = np.full((2, 2), float(hvd.rank()), "float32")
    for given in (mine, ops.convert_to_tensor(mine), keras.Variable(mine)):
        results = [
            (hvd.allreduce(given), [[0.5, 0.5], [0.5, 0.5]]),
            (hvd.allreduce(given, op=hvd.Sum, prescale_factor=2.0), [[2, 2], [2, 2]]),
            (hvd.allreduce(given, compression=hvd.Compression.fp16), [[0.5, 0.5], [0.5, 0.5]]),
            (hvd.allgather(given), [[0, 0], [0, 0], [1, 1], [1, 1]]),
            (hvd.broadcast(given, 1), [[1, 1], [1, 1]]),
            (hvd.reducescatter(given, op=hvd.Sum), [[1, 1]]),
        ]
        for result, wanted in results:
            assert ops.is_tensor(result)
            assert ops.convert_to_numpy(result).tolist() == wanted
    assert float(ops.convert_to_numpy(hvd.allreduce(float(hvd.rank())))) == 0.5
    variables = [keras.Variable(mine), keras.Variable(hvd.rank(), dtype="int32", trainable=False)]
    hvd.broadcast_variables(variables, root_rank=1)
    assert [keras.ops.convert_to_numpy(each).tolist() for each in variables] == [[[1, 1], [1, 1]], 1]
    with pytest.raises(RuntimeError, match=r"broadcast_variables\(model.variables, 1\)"):
        hvd.broadcast_global_variables(1)


@case()
def normalised_batches_are_those_of_all_ranks() -> None:
    import keras

    hvd = _hvd()

    def layers(kind: Any) -> Callable[[], list[Any]]:
        return lambda: [keras.layers.Dense(3), kind(), kind(momentum=0.5), keras.layers.Dense(1)]

    plain = layers(keras.layers.BatchNormalization)
    wanted = _alone(keras.optimizers.SGD(0.05), layers=plain)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05))
    trained = _together(optimizer, layers(hvd.SyncBatchNormalization))
    _assert_close(trained, wanted, atol=5e-5)


@case()
def a_layer_called_twice_keeps_its_calls_apart() -> None:
    import keras

    hvd = _hvd()

    def train(kind: Any, batch: int, data: Any, optimizer: Any) -> Any:
        inputs, wanted = data
        keras.utils.set_random_seed(1)
        shared, left, right = kind(), keras.Input((3,)), keras.Input((3,))
        both = keras.layers.Concatenate()([shared(left), shared(right)])
        model = keras.Model([left, right], keras.layers.Dense(1)(both))
        model.compile(optimizer, loss="mse", jit_compile="auto")
        _fit(model, [inputs, 2 * inputs + 1], wanted, batch=batch)
        return model

    plain = train(keras.layers.BatchNormalization, _SIZE * _BATCH, _data(), keras.optimizers.SGD(0.05))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05))
    _assert_close(train(hvd.SyncBatchNormalization, _BATCH, _my_part(), optimizer), plain, atol=5e-5)


@case()
def wrong_options_are_refused() -> None:
    import keras

    hvd = _hvd()
    sgd = keras.optimizers.SGD
    for options, text in (
        ({"op": hvd.Adasum}, "takes Average or Sum"),
        ({"backward_passes_per_step": 0}, "expected 1 or more"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "needs op=Average"),
        ({"groups": 0.5}, "expected a positive number, or lists"),
        ({"groups": [["a"], "b"]}, "expected a positive number, or lists"),
    ):
        with pytest.raises(ValueError, match=text):
            hvd.DistributedOptimizer(sgd(), **options)
    with pytest.raises(ValueError, match="gradient_accumulation_steps=3"):
        hvd.DistributedOptimizer(sgd(gradient_accumulation_steps=3), backward_passes_per_step=2)
    with pytest.raises(TypeError, match="expected an optimizer of Keras"):
        hvd.DistributedOptimizer("sgd")
    with pytest.raises(ValueError, match="has no variables yet"):
        hvd.PartialDistributedOptimizer(sgd(), local_layers=keras.layers.Dense(1))
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    with pytest.raises(TypeError, match="cannot be set"):
        _alone_with(sgd(rate), hvd.callbacks.LearningRateWarmupCallback(0.1))
    with pytest.warns(UserWarning, match="momentum_correction has no effect"):
        _alone_with(sgd(0.1, momentum=0.9), hvd.callbacks.LearningRateWarmupCallback(0.1))


def _alone_with(optimizer: Any, callback: Any) -> None:
    model = _model()
    model.compile(optimizer, loss="mse", jit_compile=False)
    _fit(model, *_data(1), callbacks=[callback])


@case("jax", "torch")
def rows_of_embeddings_are_joined() -> None:
    import keras

    hvd = _hvd()

    def make() -> Any:
        return [keras.layers.Embedding(5, 2), keras.layers.Flatten(), keras.layers.Dense(1)]

    def train(rows: Any, labels: Any, optimizer: Any, batch: int) -> Any:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((2,), dtype="int32"), *make()])
        model.compile(optimizer, loss="mse", jit_compile=False)
        _fit(model, rows, labels, batch=batch)
        return model

    rows = np.random.default_rng(2).integers(0, 5, (_STEPS * _SIZE * _BATCH, 2)).astype("int32")
    labels = rows.sum(1, keepdims=True).astype("float32")
    wanted = train(rows, labels, keras.optimizers.SGD(0.05), _SIZE * _BATCH)
    parts = [_part(each, hvd.rank()) for each in (rows, labels)]
    for dense in (False, True):
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), sparse_as_dense=dense)
        _assert_close(train(parts[0], parts[1], optimizer, _BATCH), wanted)


@case("jax", "torch")
def xla_is_refused_with_the_remedy() -> None:
    import keras

    hvd = _hvd()
    with pytest.raises(ValueError, match="jit_compile=False"):
        _together(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), jit_compile=True)


# -- elastic -------------------------------------------------------------------------------------------


@case()
def commits_come_after_all_callbacks() -> None:
    import keras

    hvd = _hvd()
    model = _model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
    state = hvd.elastic.KerasState(model, epoch=0, batch=0)
    seen: list[tuple[int, int, int]] = []
    own = state.commit

    def commit(*args: Any) -> None:
        own(*args)
        steps = int(keras.ops.convert_to_numpy(model.optimizer._iterations))
        seen.append((state.epoch, state.batch, steps))

    state.commit = commit
    callbacks = [
        hvd.elastic.CommitStateCallback(state, batches_per_commit=2),
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
    ]
    inputs, wanted = _my_part(3)
    _fit(model, inputs, wanted, epochs=2, callbacks=callbacks)
    assert seen == [(0, 2, 2), (1, 0, 3), (1, 2, 5), (2, 0, 6)]
    committed, slots = model.get_weights(), [np.asarray(each) for each in model.optimizer.variables[2:4]]
    _fit(model, inputs, wanted)
    state.epoch = 7
    state.restore()
    assert state.epoch == 2
    assert all((a == b).all() for a, b in zip(model.get_weights(), committed, strict=True))
    assert all((np.asarray(a) == b).all() for a, b in zip(model.optimizer.variables[2:4], slots, strict=True))


@case()
def states_begin_with_those_of_the_first_rank() -> None:
    import keras

    hvd = _hvd()
    model = _model(seed=hvd.rank())
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01 * (1 + hvd.rank()))), loss="mse")
    state = hvd.elastic.KerasState(model, epoch=hvd.rank())
    state.sync()
    state.sync_settings()
    _assert_alike(model)
    assert state.epoch == 0
    assert float(keras.ops.convert_to_numpy(model.optimizer.learning_rate)) == pytest.approx(0.01)
    with pytest.raises(ValueError, match="has no variables yet"):
        hvd.elastic.KerasState(keras.Sequential([keras.layers.Dense(1)]))
    with pytest.raises(ValueError, match="give the optimizer"):
        hvd.elastic.KerasState(_model())


@case("torch")  # its errors are pyhvd's own
def errors_of_steps_leave_elastic_run_as_those_of_pyhvd() -> None:
    from pyhvd.frameworks import failures
    from pyhvd.keras.backend import door

    hvd = _hvd()
    text = failures.keep(hvd.HorovodInternalError("rank 1 is lost"))
    (kind,) = door().errors()
    try:
        wrapped = kind(None, None, f"INTERNAL: {text}", 13)
    except TypeError:
        wrapped = kind(f"INTERNAL: {text}")

    @hvd.elastic.run
    def train(state: Any) -> None:
        raise wrapped

    with pytest.raises(hvd.HorovodInternalError, match="rank 1 is lost") as caught:
        train(hvd.elastic.ObjectState())
    assert caught.value.__cause__ is wrapped


@case()
def a_rank_that_leaves_ends_fit_of_the_others() -> None:
    import keras

    hvd = _hvd()
    steps: list[int] = []

    class Count(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            steps.append(batch)

    @hvd.elastic.run
    def train(state: Any, callback: Any) -> None:
        _fit(state.model, *_my_part(), callbacks=[callback, Count()])

    made: list[tuple[Any, Any]] = []
    for make in (
        lambda _: hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.elastic.UpdateBatchStateCallback,
        lambda state: hvd.elastic.CommitStateCallback(state, batches_per_commit=100),
    ):
        model = _model()
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), loss="mse")
        state = hvd.elastic.KerasState(model, batch=0)
        made.append((state, make(state)))
        train(*made[-1])
    if hvd.rank() == 0:
        steps.clear()
        for state, callback in made:
            state.begin = bool  # the ranks have begun together, above
            with pytest.raises(hvd.HorovodInternalError, match="rank 1"):
                train(state, callback)
            assert not steps
    hvd.shutdown()


# -- names ---------------------------------------------------------------------------------------------

# The parameters of Horovod 0.28.1's horovod.keras and horovod.tensorflow.keras, in their order.
_OF_OPTIMIZER = (
    "optimizer name device_dense device_sparse compression sparse_as_dense gradient_predivide_factor op"
    " backward_passes_per_step average_aggregated_gradients num_groups groups process_set"
)
_PARAMETERS = {
    "allreduce": "value name average prescale_factor postscale_factor op compression",
    "allgather": "value name",
    "broadcast": "value root_rank name",
    "reducescatter": "value name op",
    "DistributedOptimizer": f"{_OF_OPTIMIZER} scale_local_gradients",
    "PartialDistributedOptimizer": f"{_OF_OPTIMIZER} local_layers scale_local_gradients",
    "load_model": "filepath custom_optimizers custom_objects compression legacy_opts",
    "broadcast_global_variables": "root_rank",
    "callbacks.BroadcastGlobalVariablesCallback": "root_rank device local_variables",
    "callbacks.MetricAverageCallback": "device",
    "callbacks.LearningRateScheduleCallback": "initial_lr multiplier start_epoch end_epoch staircase"
    " momentum_correction steps_per_epoch",
    "callbacks.LearningRateWarmupCallback": "initial_lr warmup_epochs momentum_correction steps_per_epoch"
    " verbose",
    "callbacks.BestModelCheckpoint": "monitor verbose save_weights_only mode save_freq",
    "elastic.KerasState": "model optimizer",
    "elastic.CommitStateCallback": "state batches_per_commit",
    "elastic.UpdateBatchStateCallback": "state",
    "elastic.UpdateEpochStateCallback": "state",
}


@case()
def parameters_are_those_of_horovod() -> None:
    hvd = _hvd()
    for name, wanted in _PARAMETERS.items():
        function = operator.attrgetter(name)(hvd)
        assert list(inspect.signature(function).parameters)[: len(wanted.split())] == wanted.split(), name
    aliases = ["keras"]
    if os.environ["KERAS_BACKEND"] == "tensorflow":
        aliases.append("tensorflow.keras")
    for each in aliases:
        alias = importlib.import_module(f"pyhvd.aliases.as_horovod.{each}")
        for name in _PARAMETERS:
            assert operator.attrgetter(name)(alias) is operator.attrgetter(name)(hvd), (each, name)


@case()
def importing_it_imports_no_backend() -> None:
    _hvd()
    code = "import sys, keras; own = {*sys.modules}; import pyhvd.keras; print(*{*sys.modules} - own)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pyhvd.keras" in done.stdout.split()
    assert not {"jax", "tensorflow", "torch"} & set(done.stdout.split())
