"""Training a model of numpy arrays: gradients are averaged over the ranks, then the optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

import pyhvd as hvd
from pyhvd.spark.data.manifest import Column
from pyhvd.spark.errors import DataError
from pyhvd.spark.ml.prediction import describe_outputs
from pyhvd.spark.ml.training import Batch, Metric, Training, apply_metrics, means_over

Array = npt.NDArray[Any]
Arrays = dict[str, Array]


@runtime_checkable
class NumpyModel(Protocol):
    """A model for an Estimator that is not a torch module.

    Attributes
    ----------
    parameters : dict of str to numpy.ndarray
        The trained arrays. The optimizer changes them in place.
    """

    parameters: Arrays

    def gradients(self, features: Any, labels: Any) -> tuple[float, Mapping[str, Array]]:
        """Return the loss of these rows, and its gradient for each parameter, by name.

        Both are means over the rows. `features` and `labels` are arrays with one row per example, or tuples
        of arrays for several columns.
        """

    def predict(self, features: Any) -> Any:
        """Return the output for each row: an array, or a tuple of arrays, one per label column."""


class Optimizer(Protocol):
    """Updates parameters by averaged gradients; checkpoints contain its pickle."""

    def step(self, parameters: Arrays, gradients: Arrays) -> None:
        """Change the parameters in place."""


class SGD:
    """Gradient descent with momentum: ``v = momentum * v + gradient; parameter -= learning_rate * v``.

    Parameters
    ----------
    learning_rate : float
        Above 0.
    momentum : float
        From 0 to below 1; Polyak's heavy ball.
    """

    def __init__(self, learning_rate: float = 0.01, momentum: float = 0.0) -> None:
        if not learning_rate > 0:
            raise ValueError(f"learning_rate={learning_rate!r}: expected a number above 0")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum={momentum!r}: expected a number from 0 to below 1")
        self.learning_rate = learning_rate
        self.momentum = momentum
        self.velocity: Arrays = {}

    def step(self, parameters: Arrays, gradients: Arrays) -> None:
        """Change the parameters in place."""
        for name, gradient in gradients.items():
            velocity = self.velocity.setdefault(name, np.zeros_like(parameters[name]))
            velocity *= self.momentum
            velocity += gradient
            parameters[name] -= self.learning_rate * velocity

    def __repr__(self) -> str:
        return f"SGD(learning_rate={self.learning_rate}, momentum={self.momentum})"


class NumpyTrainer:
    """A train_fn for a :class:`NumpyModel`, which it trains in place.

    The optimizer must be the same on every rank, so that the parameters stay the same.
    """

    def __init__(self, model: NumpyModel, optimizer: Optimizer, metrics: Mapping[str, Metric]) -> None:
        self._model = model
        self._optimizer = optimizer
        self._metrics = metrics

    def __call__(self, training: Training) -> Callable[[Any], Any]:
        """Train on this rank; return the function that predicts."""
        self._restore(training)
        for epoch in training.epochs():
            measures = means_over(training, training.batches(epoch), self._step)
            measures |= training.validate(self._measure)
            state = {"parameters": self._model.parameters, "optimizer": self._optimizer}
            training.end_epoch(state, measures)
        return self._model.predict

    def _restore(self, training: Training) -> None:
        state = training.state
        if state is None:
            return
        fits = isinstance(state, dict) and state.keys() == {"parameters", "optimizer"}
        if not fits or _shapes(state["parameters"]) != _shapes(self._model.parameters):
            raise DataError(
                f"the checkpoint of {training.run} is of another model, which has parameters of other names"
                " or shapes: choose another run_id"
            )
        self._optimizer = state["optimizer"]
        for name, value in state["parameters"].items():
            self._model.parameters[name][...] = value

    def _step(self, batch: Batch) -> dict[str, float]:
        """Update the parameters; return the loss of this rank's rows."""
        parameters = self._model.parameters
        loss, gradients = self._model.gradients(batch.features, batch.labels)
        _check_gradients(parameters, gradients)
        # The ranks' batches have the same size, so the mean of their means is the mean of all rows.
        handles = {
            name: hvd.allreduce_async(
                np.asarray(gradients[name], dtype=value.dtype), name=f"gradient.{name}", op=hvd.Average
            )
            for name, value in parameters.items()
        }
        self._optimizer.step(parameters, {name: handle.result() for name, handle in handles.items()})
        return {"loss": loss}

    def _measure(self, batch: Batch) -> dict[str, float]:
        loss, _ = self._model.gradients(batch.features, batch.labels)
        outputs = self._model.predict(batch.features) if self._metrics else None
        return {"loss": loss} | apply_metrics(self._metrics, outputs, batch.labels)


def _shapes(arrays: Mapping[str, Array]) -> dict[str, tuple[int, ...]]:
    return {name: np.shape(value) for name, value in arrays.items()}


def _check_gradients(parameters: Arrays, gradients: Mapping[str, Array]) -> None:
    wanted, given = _shapes(parameters), _shapes(gradients)
    for name in sorted(wanted.keys() | given.keys()):
        if wanted.get(name) != given.get(name):
            raise ValueError(
                f"model.gradients must return an array of each parameter's name and shape: {name!r} is"
                f" {wanted.get(name, 'no parameter')}, its gradient {given.get(name, 'missing')}"
            )


def check_takes(model: NumpyModel, columns: Sequence[Column]) -> None:
    """Predict rows of ones, to see whether a model takes several columns.

    Raises
    ------
    DataError
        It does not: it expects one array, and gets a tuple.
    """
    rows = len(columns) + 1  # so that a row is not taken for a column
    try:
        outputs = model.predict(tuple(np.ones((rows, *each.shape), each.dtype) for each in columns))
        describe_outputs(outputs, rows)
    except Exception as exc:
        names = ", ".join(repr(each.name) for each in columns)
        raise DataError(
            f"feature_cols: the model's predict gets columns {names} as a tuple of {len(columns)} arrays, and"
            f" fails for it ({type(exc).__name__}: {exc}): assemble them into one vector column"
            " (pyspark.ml.feature.VectorAssembler), or let predict and gradients take a tuple"
        ) from exc
