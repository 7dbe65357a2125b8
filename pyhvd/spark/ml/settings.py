"""Checks of an Estimator's arguments, and the train_fn that they describe. Does not need pyspark."""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pyhvd.spark.data.manifest import Column
from pyhvd.spark.data.schema import holds_numbers
from pyhvd.spark.data.store import Store
from pyhvd.spark.errors import DataError
from pyhvd.spark.ml.numpy_trainer import SGD, NumpyModel, NumpyTrainer, check_takes
from pyhvd.spark.ml.training import Metric, TrainFn

_OWN = ("fn", "args", "kwargs", "num_proc", "verbose")


def check(values: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError for an invalid argument of an Estimator, and say what is expected."""
    if not isinstance(values["store"], Store):
        raise TypeError(f"store={values['store']!r}: expected a Store, pyhvd.spark.Store.create(path)")
    if values["run_id"] is not None:
        values["store"].get_run_path(values["run_id"])  # raises if it cannot name a folder
    for name in ("feature_cols", "label_cols"):
        _check_columns(name, values[name])
    for name, least in (("batch_size", 1), ("epochs", 1), ("num_proc", 1), ("seed", 0)):
        value = values[name]
        fits = isinstance(value, int) and not isinstance(value, bool) and value >= least
        if not fits and not (name == "num_proc" and value is None):
            raise ValueError(f"{name}={value!r}: expected a number, {least} at least")
    _check_validation(values["validation"], [*values["feature_cols"], *values["label_cols"]])
    taken = [name for name in values["run_options"] if name in _OWN]
    if taken:
        raise ValueError(
            f"run_options: {taken[0]!r} is not allowed: the Estimator passes it to pyhvd.spark.run itself"
        )
    trainer_of(values)


def check_columns(values: Mapping[str, Any], kinds: Mapping[str, str], features: Sequence[Column]) -> None:
    """Raise DataError for columns that the model cannot be trained on, by name; a train_fn takes any.

    Parameters
    ----------
    values : mapping
        The arguments of the Estimator.
    kinds : mapping of str to str
        The types of the columns, as Spark or numpy names them.
    features : sequence of Column
        The feature columns, or none if the shapes of their rows are not known yet.
    """
    if values["train_fn"] is not None:
        return
    for name in ("feature_cols", "label_cols"):
        for column in values[name]:
            if not holds_numbers(kinds.get(column, "double")):  # a missing column is refused elsewhere
                raise DataError(
                    f"{name}: column {column!r} is of type {kinds[column]}, and a model needs numbers:"
                    " encode it (pyspark.ml.feature.StringIndexer, OneHotEncoder), or cast it"
                )
    if len(features) > 1 and isinstance(trainer_of(values), NumpyTrainer):
        check_takes(values["model"], features)


def check_metrics(values: Mapping[str, Any], *, validating: bool) -> None:
    """Raise ValueError if there are metrics, but no validation data to measure them on."""
    if values["metrics"] and not validating:
        raise ValueError("metrics are measured on validation data, and there are none: give validation")


def trainer_of(values: Mapping[str, Any]) -> TrainFn:
    """Return the function that trains on a rank: the user's train_fn, or the trainer of the model.

    Raises
    ------
    TypeError, ValueError
        Model, loss and optimizer do not fit together.
    """
    train_fn, model = values["train_fn"], values["model"]
    if (train_fn is None) == (model is None):
        raise ValueError("give either model or train_fn")
    if train_fn is not None:
        if not callable(train_fn):
            raise TypeError(f"train_fn={train_fn!r}: expected a function of one argument, a Training")
        given = [name for name in ("loss", "optimizer", "metrics") if values[name]]
        if given:
            raise ValueError(f"{given[0]} goes with model; a train_fn has its own")
        chosen: TrainFn = train_fn
        return chosen
    terms = model, values["loss"], values["optimizer"], values["metrics"]
    if _is_a(model, "keras", "Model"):  # with the backend torch it is a module too
        return _keras_trainer(*terms)
    if _is_a(model, "torch", "nn.Module"):
        return _torch_trainer(*terms)
    return _numpy_trainer(*terms)


def _is_a(model: Any, module: str, name: str) -> bool:
    """Return whether a model is of a library's class; one whose library was never imported is not."""
    library = sys.modules.get(module)
    return library is not None and isinstance(model, operator.attrgetter(name)(library))


def _torch_trainer(model: Any, loss: Any, optimizer: Any, metrics: Mapping[str, Metric]) -> TrainFn:
    if not callable(loss) or not callable(optimizer):
        raise ValueError(
            "a torch module needs loss, e.g. torch.nn.functional.cross_entropy, and optimizer, a function"
            " of the parameters, e.g. functools.partial(torch.optim.SGD, lr=0.1)"
        )
    from pyhvd.spark.ml.torch_trainer import TorchTrainer

    return TorchTrainer(model, loss, optimizer, metrics)


def _keras_trainer(model: Any, loss: Any, optimizer: Any, metrics: Mapping[str, Metric]) -> TrainFn:
    if loss is None or optimizer is None:
        raise ValueError(
            'a Keras model needs loss and optimizer, as compile() takes them, e.g. loss="mse" and'
            " optimizer=keras.optimizers.SGD(0.1)"
        )
    from pyhvd.spark.ml.keras_trainer import KerasTrainer

    return KerasTrainer(model, loss, optimizer, metrics)


def _numpy_trainer(model: Any, loss: Any, optimizer: Any, metrics: Mapping[str, Metric]) -> TrainFn:
    if not isinstance(model, NumpyModel):
        raise TypeError(
            f"model={type(model).__name__}: expected a torch.nn.Module, a keras.Model, or an object with"
            " parameters (a dict of arrays), gradients(features, labels) and predict(features); see"
            " pyhvd.spark.NumpyModel"
        )
    _check_parameters(model.parameters)
    if loss is not None:
        raise ValueError(
            "loss goes with a torch module or a Keras model: another model's gradients() has its loss in it"
        )
    optimizer = SGD() if optimizer is None else optimizer
    if not callable(getattr(optimizer, "step", None)):
        raise TypeError(
            f"optimizer={optimizer!r}: expected one with step(parameters, gradients), e.g. SGD(0.1)"
        )
    return NumpyTrainer(model, optimizer, metrics)


def _check_parameters(parameters: Any) -> None:
    if not isinstance(parameters, dict) or not parameters:
        raise TypeError(
            f"model.parameters is {type(parameters).__name__}: expected a dict of arrays, not empty"
        )
    for name, value in parameters.items():
        if not isinstance(value, np.ndarray) or value.dtype.kind != "f":
            kind = getattr(value, "dtype", type(value).__name__)
            raise TypeError(f"model.parameters[{name!r}] is {kind}: expected a numpy array of real numbers")


def _check_columns(name: str, value: Any) -> None:
    fits = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    if not fits or not all(isinstance(each, str) for each in value):
        raise ValueError(f"{name}={value!r}: expected a list of names of columns, one at least")
    if len(set(value)) < len(value):
        raise ValueError(f"{name}={value!r}: a column is there twice")


def _check_validation(value: Any, columns: Sequence[str]) -> None:
    if value is None:
        return
    if isinstance(value, str):
        if value in columns:
            raise ValueError(f"validation={value!r} is a feature or a label: expected a column of its own")
    elif not isinstance(value, (int, float)) or not 0 < value < 1:
        raise ValueError(
            f"validation={value!r}: expected a fraction between 0 and 1, or the name of a column that is true"
            " for rows to validate with"
        )
