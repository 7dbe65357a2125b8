"""pyhvd.spark.Estimator with Keras models, where Keras 3 and one of its backends are installed."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyhvd as hvd
import pyhvd.spark
from tests.spark.test_estimator import ROWS, descend, make, points, rows

__all__ = ["make", "rows"]  # fixtures

BACKENDS = [name for name in ("jax", "tensorflow", "torch") if importlib.util.find_spec(name)]
if not BACKENDS or importlib.util.find_spec("keras") is None:
    pytest.skip("make test-frameworks installs Keras and its backends", allow_module_level=True)

# Four ranks import Keras and its backend for every fit, and the first test starts the cluster.
pytestmark = [
    pytest.mark.timeout(280),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # of Keras 3.15
]


@pytest.fixture(scope="module")
def keras() -> Any:
    """Return Keras, with KERAS_BACKEND or the first backend that there is."""
    os.environ.setdefault("KERAS_BACKEND", BACKENDS[0])
    return importlib.import_module("keras")


def linear(keras: Any) -> Any:
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros")])


def weights(model: Any) -> list[Any]:
    return [np.asarray(each) for each in model.predictor().model.get_weights()]


def test_a_model_trains_as_one_process_does(keras: Any, rows: Any, make: Callable[..., Any]) -> None:
    chosen = {
        "model": linear(keras),
        "loss": "mse",
        "optimizer": keras.optimizers.SGD(0.1, momentum=0.5),
        "run_id": "keras",
    }
    make(epochs=2, **chosen).fit(rows)
    model = make(epochs=5, **chosen).fit(rows)  # goes on, with the optimizer's momentum
    x, y = points()
    expected = descend(x, y, 5, 0.1, 0.5)
    kernel, bias = weights(model)
    assert np.allclose(kernel[:, 0], expected.parameters["weights"], rtol=1e-5)
    assert np.allclose(bias, expected.parameters["bias"], rtol=1e-5)
    assert model.history[0]["loss"] == pytest.approx(float((y**2).mean()), rel=1e-5)
    out = {row.id: row.y__output for row in model.transform(rows).collect()}
    assert np.allclose([out[i] for i in range(ROWS)], expected.predict(x)[:, None], atol=1e-5)


def absolute(outputs: Any, labels: Any) -> float:
    assert isinstance(outputs, np.ndarray)
    return float(abs(outputs[:, 0] - labels).mean())


def test_own_layers_two_inputs_and_a_saved_model(
    keras: Any, rows: Any, make: Callable[..., Any], tmp_path: Path
) -> None:
    class Halved(keras.layers.Layer):  # type: ignore[misc, name-defined, unused-ignore]
        def call(self, inputs: Any) -> Any:
            return inputs / 2

    x, number = keras.Input((2,)), keras.Input((), dtype="int32")
    out = keras.layers.Dense(1)(Halved()(keras.layers.BatchNormalization(momentum=0.5)(x)))
    model = make(
        model=keras.Model([x, number], out),
        loss=keras.losses.MeanSquaredError(),
        optimizer=keras.optimizers.Adam(0.05),
        feature_cols=["x", "id"],
        epochs=10,
        batch_size=8,
        validation="held",
        metrics={"absolute": absolute},
    ).fit(rows)
    assert set(model.history[-1]) == {"loss", "val_loss", "val_absolute"}
    assert model.history[-1]["val_absolute"] < model.history[0]["val_absolute"]
    held = np.arange(ROWS) % 4 == 0
    mean = model.predictor().model.layers[1].moving_mean
    assert np.allclose(np.asarray(mean), points()[0][~held].mean(axis=0), atol=0.3)
    loaded = pyhvd.spark.Model.load(tmp_path / "runs" / model.run_id / "model")
    assert [row.y__output for row in loaded.transform(rows).orderBy("id").take(3)] == [
        row.y__output for row in model.transform(rows).orderBy("id").take(3)
    ]


def test_another_models_checkpoint_is_refused(keras: Any, rows: Any, make: Callable[..., Any]) -> None:
    chosen = {"loss": "mse", "optimizer": "sgd", "run_id": "one"}
    make(model=linear(keras), **chosen).fit(rows)
    other = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    with pytest.raises(
        hvd.RankFailedError, match="the checkpoint of run 'one' is of another model or optimizer"
    ):
        make(model=other, epochs=2, **chosen).fit(rows)


def test_models_that_cannot_be_trained(keras: Any, make: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"a Keras model needs loss and optimizer, as compile\(\) takes"):
        make(model=linear(keras), optimizer=None)
    chosen = {"loss": "mse", "optimizer": "sgd"}
    with pytest.raises(ValueError, match="the Keras model is not built"):
        make(model=keras.Sequential([keras.layers.Dense(1)]), **chosen)
    still = linear(keras)
    still.trainable = False
    with pytest.raises(ValueError, match="no trainable variable"):
        make(model=still, **chosen)
