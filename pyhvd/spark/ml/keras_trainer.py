"""Training a Keras 3 model on any of its backends: ranks average the gradients inside the compiled step.

A model travels as the bytes of a ``.keras`` file: so a rank chooses the backend before it imports Keras. This
module does not import Keras before a rank trains or predicts.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np

from pyhvd.spark.errors import DataError
from pyhvd.spark.ml.training import Batch, Metric, Training, apply_metrics, means_over

_FILE = "model.keras"


@dataclass(frozen=True)
class SavedModel:
    """A Keras model without its optimizer, as bytes.

    Attributes
    ----------
    backend : str
        The backend of the process that saved it: that of a process that loads it, unless it has one already.
    content : bytes
        The ``.keras`` file.
    classes : bytes
        By name, the classes of its layers that are not Keras's own; pickled by value.
    """

    backend: str
    content: bytes
    classes: bytes

    @classmethod
    def of(cls, model: Any) -> SavedModel:
        """Return a copy of a built model."""
        import keras

        own = {type(each).__name__: type(each) for each in model._flatten_layers()}
        classes = {name: kind for name, kind in own.items() if not kind.__module__.startswith("keras.")}
        return cls(keras.backend.backend(), file_of(model), cloudpickle.dumps(classes))

    def load(self) -> Any:
        """Return the model, not compiled."""
        use_backend(self.backend)
        import keras

        with tempfile.TemporaryDirectory(prefix="pyhvd-keras-") as folder:
            path = Path(folder, _FILE)
            path.write_bytes(self.content)
            classes = cloudpickle.loads(self.classes)
            return keras.saving.load_model(path, custom_objects=classes, compile=False)


class KerasTrainer:
    """A train_fn for a Keras model; for its arguments see :class:`pyhvd.spark.Estimator`."""

    def __init__(self, model: Any, loss: Any, optimizer: Any, metrics: Mapping[str, Metric]) -> None:
        import keras

        check_model(model)
        chosen = keras.optimizers.get(optimizer)
        self._model = SavedModel.of(model)
        # Pickled apart: a rank chooses the backend before it imports Keras.
        self._compiled_with = cloudpickle.dumps((loss, keras.optimizers.serialize(chosen)))
        self._metrics = dict(metrics)

    def __call__(self, training: Training) -> KerasPredictor:
        """Train on this rank; return the function that predicts."""
        model = self._model.load()
        import keras

        import pyhvd.keras as hvd

        keras.utils.set_random_seed(training.seed + hvd.rank())
        loss, optimizer = cloudpickle.loads(self._compiled_with)
        distributed = hvd.DistributedOptimizer(keras.optimizers.deserialize(optimizer))
        # XLA in TensorFlow refuses collectives.
        jit = False if keras.backend.backend() == "tensorflow" else "auto"
        model.compile(distributed, loss, jit_compile=jit)
        distributed.build(model.trainable_variables)
        _restore(training, model)
        for epoch in training.epochs():
            measures = means_over(training, training.batches(epoch), lambda batch: _step(model, batch))
            # For example the running means of a batch normalisation.
            hvd.broadcast_variables(model.non_trainable_weights, root_rank=0)
            measures |= training.validate(lambda batch: self._measure(model, batch))
            training.end_epoch({_FILE: file_of(model)} if hvd.rank() == 0 else None, measures)
        return KerasPredictor(SavedModel.of(model))

    def _measure(self, model: Any, batch: Batch) -> dict[str, float]:
        model.reset_metrics()
        features, labels = _columns(batch.features), _columns(batch.labels)
        loss = {"loss": float(model.test_on_batch(features, labels, return_dict=True)["loss"])}
        if not self._metrics:
            return loss
        return loss | apply_metrics(self._metrics, _arrays(model.predict_on_batch(features)), batch.labels)


class KerasPredictor:
    """Predicts with a trained model, from arrays to arrays.

    Attributes
    ----------
    model : keras.Model
        The model, loaded when it is first used.
    """

    def __init__(self, saved: SavedModel) -> None:
        self._saved = saved
        self._model: Any = None

    @property
    def model(self) -> Any:
        """The Keras model."""
        if self._model is None:
            self._model = self._saved.load()
        return self._model

    def __call__(self, features: Any) -> Any:
        """Return the model's output for each row: an array, or a tuple of arrays."""
        return _arrays(self.model.predict_on_batch(_columns(features)))

    def __getstate__(self) -> dict[str, Any]:
        return {"_saved": self._saved, "_model": None}


def use_backend(name: str) -> None:
    """Let this process use a backend of Keras, if it has chosen none."""
    os.environ.setdefault("KERAS_BACKEND", name)


def check_model(model: Any) -> None:
    """Refuse a model that this trainer cannot train.

    Raises
    ------
    ValueError
        It is not built, or has nothing to train.
    """
    if not model.built:
        raise ValueError(
            "the Keras model is not built, so its weights do not exist yet: begin it with keras.Input(shape),"
            " or call model.build(shape)"
        )
    if not model.trainable_variables:
        raise ValueError("the Keras model has no trainable variable: there is nothing to train")


def file_of(model: Any) -> bytes:
    """Return the ``.keras`` file of a model, with its optimizer if it is compiled."""
    with tempfile.TemporaryDirectory(prefix="pyhvd-keras-") as folder:
        path = Path(folder, _FILE)
        model.save(path)
        return path.read_bytes()


def _restore(training: Training, model: Any) -> None:
    """Put the last checkpoint's weights and optimizer state into a compiled model."""
    state = training.state
    if state is None:
        return
    if not isinstance(state, dict) or state.keys() != {_FILE}:
        raise DataError(f"the checkpoint of {training.run} is of no Keras model: choose another run_id")
    with tempfile.TemporaryDirectory(prefix="pyhvd-keras-") as folder:
        path = Path(folder, _FILE)
        path.write_bytes(state[_FILE])
        try:
            model.load_weights(path)
        except (ValueError, KeyError) as exc:
            raise DataError(
                f"the checkpoint of {training.run} is of another model or optimizer ({exc}): choose another"
                " run_id"
            ) from exc


def _step(model: Any, batch: Batch) -> dict[str, float]:
    """Update the weights; return the loss of this rank's rows."""
    model.reset_metrics()  # else Keras returns the mean since the first batch
    logs = model.train_on_batch(_columns(batch.features), _columns(batch.labels), return_dict=True)
    return {"loss": float(logs["loss"])}


def _columns(given: Any) -> Any:
    """Return one column, or a list of several, as Keras takes them."""
    return list(given) if isinstance(given, tuple) else given


def _arrays(output: Any) -> Any:
    if isinstance(output, (tuple, list)):
        return tuple(np.asarray(each) for each in output)
    return np.asarray(output)
