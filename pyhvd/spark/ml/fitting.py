"""The function that ``pyhvd.spark.run`` runs for a fit, and its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle

import pyhvd as hvd
from pyhvd.spark.data.manifest import Column
from pyhvd.spark.ml.prediction import describe_outputs
from pyhvd.spark.ml.training import FitPlan, Training

TrainFn = Callable[[Training], Callable[[Any], Any]]


@dataclass(frozen=True, slots=True)
class Fitted:
    """The result of rank 0: the pickled function from features to outputs, and each epoch's measures."""

    predict: bytes
    outputs: tuple[Column, ...]
    history: list[dict[str, float]]


def fit_on_rank(plan: FitPlan, train_fn: TrainFn) -> Fitted | None:
    """Train; return the result on rank 0, None on other ranks."""
    hvd.init()
    training = Training(plan)
    predict = train_fn(training)
    if not callable(predict):
        raise TypeError(
            f"train_fn returned {type(predict).__name__}: it must return a function from features to outputs"
        )
    if hvd.rank() != 0:
        return None
    sample = training.sample()
    outputs = describe_outputs(predict(sample.features), sample.rows)
    return Fitted(cloudpickle.dumps(predict), outputs, training.history)
