"""tf_keras, Keras 2 under another name: its optimizers of both families, callbacks, a Horovod program."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.frameworks.doors import on_doors
from tests.mpi.launch import ROOT, horovodrun

if any(importlib.util.find_spec(name) is None for name in ("tensorflow", "keras", "tf_keras")):
    pytest.skip("needs TensorFlow and tf_keras: run `make test-frameworks`", allow_module_level=True)

_PROGRAM = Path(__file__).with_name("keras_legacy_mnist.py")
_BATCH, _STEPS = 8, 6


def _hvd() -> Any:
    import pyhvd.keras as hvd

    hvd.init()
    return hvd


def _model(seed: int) -> Any:
    import tf_keras

    tf_keras.utils.set_random_seed(seed)
    return tf_keras.Sequential(
        [
            tf_keras.Input((3,)),
            tf_keras.layers.Dense(4, activation="tanh"),
            tf_keras.layers.Dense(1),
        ]
    )


def _data(size: int) -> tuple[Any, Any]:
    """Return joined batches, in which the ranks' parts follow one another."""
    inputs = np.random.default_rng(0).normal(size=(_STEPS * size * _BATCH, 3)).astype("float32")
    return inputs, inputs @ np.array([[1], [2], [3]], "float32")


def _part(array: Any, rank: int, size: int) -> Any:
    parts = array.reshape(_STEPS, size, _BATCH, -1)
    return parts[:, rank].reshape(_STEPS * _BATCH, -1)


def _fit(model: Any, inputs: Any, wanted: Any, batch: int, **options: Any) -> Any:
    return model.fit(
        inputs, wanted, batch_size=batch, epochs=options.pop("epochs", 2), shuffle=False, verbose=0, **options
    )


def _optimizers() -> dict[str, Callable[[], Any]]:
    from tf_keras import optimizers

    return {
        "SGD": lambda: optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5),
        "Adam": lambda: optimizers.Adam(0.05),
        "legacy SGD": lambda: optimizers.legacy.SGD(0.05, momentum=0.9, clipnorm=0.5),
        "legacy Adam": lambda: optimizers.legacy.Adam(0.05),
    }


@on_doors(TF_USE_LEGACY_KERAS="1")
def test_fit_equals_one_process_on_the_joined_batch() -> None:
    hvd = _hvd()
    inputs, wanted = _data(hvd.size())
    mine = [_part(each, hvd.rank(), hvd.size()) for each in (inputs, wanted)]
    for name, make in _optimizers().items():
        alone, model = _model(1), _model(1 + hvd.rank())
        alone.compile(make(), loss="mse")
        _fit(alone, inputs, wanted, _BATCH * hvd.size())
        optimizer = make()
        kind = type(optimizer)
        assert hvd.DistributedOptimizer(optimizer) is optimizer
        assert (type(optimizer).__name__, type(optimizer).__module__) == (kind.__name__, kind.__module__)
        model.compile(optimizer, loss="mse", experimental_run_tf_function=False)
        _fit(model, mine[0], mine[1], _BATCH, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
        for one, other in zip(model.get_weights(), alone.get_weights(), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5, err_msg=name)


@on_doors(TF_USE_LEGACY_KERAS="1")
def test_local_layers_and_eager_steps() -> None:
    hvd = _hvd()
    from tf_keras import optimizers

    inputs, wanted = _data(hvd.size())
    mine = [_part(each, hvd.rank(), hvd.size()) for each in (inputs, wanted)]
    for kind in (optimizers.SGD, optimizers.legacy.SGD):
        model = _model(1)
        optimizer = hvd.PartialDistributedOptimizer(kind(0.05), local_layers=model.layers[-1])
        model.compile(optimizer, loss="mse", run_eagerly=True)
        _fit(model, mine[0], mine[1], _BATCH, epochs=1)
        (first, *_), (second, *_) = (every := hvd.allgather_object(model.get_weights()))
        np.testing.assert_array_equal(first, second)
        assert not np.array_equal(every[0][-2], every[1][-2])


@on_doors("native", TF_USE_LEGACY_KERAS="1")
def test_callbacks() -> None:
    import tempfile

    hvd = _hvd()
    from tf_keras import optimizers

    inputs, wanted = (_part(each, hvd.rank(), hvd.size()) for each in _data(hvd.size()))
    for kind in (optimizers.SGD, optimizers.legacy.SGD):
        with tempfile.TemporaryDirectory() as folder:
            model = _model(1 + hvd.rank())
            model.compile(hvd.DistributedOptimizer(kind(0.4)), loss="mse")
            path = Path(folder) / "best.keras"
            logs = _fit(
                model,
                inputs,
                wanted,
                _BATCH,
                epochs=3,
                callbacks=[
                    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
                    hvd.callbacks.MetricAverageCallback(),
                    hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2),
                    hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5, start_epoch=2),
                    hvd.callbacks.BestModelCheckpoint("loss", filepath=path),
                ],
            ).history
            rates = logs["lr"]
            np.testing.assert_allclose(rates, [0.075, 0.1, 0.1], rtol=1e-5)
            first, second = hvd.allgather_object(logs["loss"])
            assert first == second
            assert path.exists() == (hvd.rank() == 0)
            loaded_rates = None
            if hvd.rank() == 0:
                import tf_keras

                alone = tf_keras.models.load_model(path)  # a plain one
                assert not hasattr(alone.optimizer, "register_local_var")
                loaded_rates = float(alone.optimizer.learning_rate.numpy())
            assert hvd.broadcast_object(loaded_rates) == pytest.approx(0.1)


@on_doors("native", TF_USE_LEGACY_KERAS="1")
def test_refusals_have_a_remedy() -> None:
    hvd = _hvd()
    import tf_keras

    with pytest.raises(ValueError, match="leave it out, or use Keras 3"):
        hvd.DistributedOptimizer(tf_keras.optimizers.SGD(0.1), backward_passes_per_step=2)
    scaled = tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.SGD(0.1))
    with pytest.raises(ValueError, match="use Keras 3 for loss scaling"):
        hvd.DistributedOptimizer(scaled)
    schedule = tf_keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    inputs, wanted = (_part(each, hvd.rank(), hvd.size()) for each in _data(hvd.size()))
    for kind in (tf_keras.optimizers.SGD, tf_keras.optimizers.legacy.SGD):
        model = _model(1)
        model.compile(hvd.DistributedOptimizer(kind(schedule)), loss="mse")
        with pytest.raises(TypeError, match="cannot be set"):
            _fit(model, inputs, wanted, _BATCH, callbacks=[hvd.callbacks.LearningRateWarmupCallback(0.1)])
    tf_keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = _model(1)
        model.compile(hvd.DistributedOptimizer(tf_keras.optimizers.SGD(0.1)), loss="mse")
        with pytest.raises(ValueError, match="each rank skips other steps"):
            _fit(model, inputs, wanted, _BATCH)
    finally:
        tf_keras.mixed_precision.set_global_policy("float32")


@pytest.mark.timeout(320)
def test_a_program_of_horovod_runs_unchanged(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "compat" / "horovod")])
    own = {"TF_USE_LEGACY_KERAS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    env = {**os.environ, **own, "PYTHONPATH": paths}
    command = [*horovodrun(tmp_path), "-np", "2", sys.executable, str(_PROGRAM), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert all(f"rank {rank} ended" in done.stdout for rank in range(2))
    assert "finished gradual learning rate warmup to 0.01" in done.stdout
