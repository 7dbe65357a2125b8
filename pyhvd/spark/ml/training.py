"""One rank's side of a fit: its batches, its epochs, rank 0's checkpoints, and what it returns.

It knows neither models nor pyspark: ranks have no Spark session.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import numpy.typing as npt

import pyhvd as hvd
from pyhvd.spark.data.manifest import Column
from pyhvd.spark.data.shard import Shard, shard
from pyhvd.spark.ml.prediction import describe_outputs
from pyhvd.spark.ml.runs import History, Run

Array = npt.NDArray[Any]

Metric = Callable[[Any, Any], float]
"""Returns a number for the outputs and labels of some rows; results are averaged over all rows."""


@dataclass(frozen=True, slots=True)
class FitPlan:
    """A fit, as every rank gets it: the prepared datasets, and the Estimator's arguments of the same names.

    ``validation_path`` is None without validation. ``epochs`` includes those of earlier fits of this run.
    """

    run: Run
    train_path: str
    validation_path: str | None
    feature_cols: Sequence[str]
    label_cols: Sequence[str]
    batch_size: int
    epochs: int
    shuffle: bool
    seed: int
    cache: bool
    verbose: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """Some rows.

    Attributes
    ----------
    features, labels : numpy.ndarray or tuple of numpy.ndarray
        The column, of shape ``(rows, ...)``; a tuple for several columns.
    rows : int
        The number of rows, at least one.
    """

    features: Any
    labels: Any
    rows: int


class Training:
    """The argument of a ``train_fn``, on every rank; :func:`pyhvd.init` has been called.

    Attributes
    ----------
    run : str
        The run's name, for messages.
    seed : int
        The Estimator's.
    state : object
        The state in this run's last checkpoint, the same on every rank; None in a new run.
    history : list of dict
        The measures of each finished epoch, including those of earlier fits of this run.
    """

    def __init__(self, plan: FitPlan) -> None:
        self._plan = plan
        self._train = self._open(plan.train_path, shuffle=plan.shuffle, equal_steps=True)
        self._validation: Shard | None = None
        if plan.validation_path is not None:
            self._validation = self._open(plan.validation_path, shuffle=False, equal_steps=False)
        saved = plan.run.checkpoint() if hvd.rank() == 0 else None
        self.run = f"run {plan.run.id!r}"
        self.seed = plan.seed
        self.history: History
        self.history, self.state = hvd.broadcast_object(saved, name="checkpoint")
        self._since = time.monotonic()

    def epochs(self) -> Iterator[int]:
        """Yield the numbers of the remaining epochs, counted from 0; call :meth:`end_epoch` in each."""
        for epoch in range(len(self.history), self._plan.epochs):
            self._since = time.monotonic()
            yield epoch
            if len(self.history) != epoch + 1:
                raise RuntimeError(
                    f"train_fn must call training.end_epoch once per epoch; it did not in epoch {epoch}"
                )

    def batches(self, epoch: int) -> Iterator[Batch]:
        """Yield this rank's batches of an epoch; all ranks have the same number and sizes of batches."""
        return map(self._batch, self._train.epoch(epoch))

    def validation_batches(self) -> Iterator[Batch]:
        """Yield this rank's batches of the validation data, if any; ranks may have different numbers."""
        if self._validation is not None:
            yield from map(self._batch, self._validation.epoch())

    def averages(self, sums: Mapping[str, float], rows: int) -> dict[str, float]:
        """Return means over the rows of all ranks; every rank must call it.

        Parameters
        ----------
        sums : mapping of str to float
            Sums over this rank's rows.
        rows : int
            The number of these rows.
        """
        everything = hvd.allgather_object((dict(sums), rows), name="averages")
        total = sum(count for _, count in everything)
        names = dict.fromkeys(name for given, _ in everything for name in given)
        return {name: sum(given.get(name, 0.0) for given, _ in everything) / total for name in names}

    def validate(self, measure: Callable[[Batch], Mapping[str, float]]) -> dict[str, float]:
        """Return the means of `measure` over the validation data, with ``val_`` before each name.

        Every rank must call it. Without validation data, return nothing.

        Parameters
        ----------
        measure : callable
            Returns means over the rows of a batch, by name.
        """
        if self._validation is None:
            return {}
        means = means_over(self, self.validation_batches(), measure)
        return {f"val_{name}": value for name, value in means.items()}

    def end_epoch(self, state: Any, measures: Mapping[str, float]) -> None:
        """Add to the history, and on rank 0 write a checkpoint. Every rank must call it once per epoch.

        Parameters
        ----------
        state : object
            The state from which training can continue; cloudpickle pickles that of rank 0.
        measures : mapping of str to float
            The measures of this epoch, the same on every rank.
        """
        self.history.append({name: float(value) for name, value in measures.items()})
        if hvd.rank() != 0:
            return
        self._plan.run.save(self.history, state)
        if self._plan.verbose:
            shown = "  ".join(f"{name} {value:.4g}" for name, value in self.history[-1].items())
            took = time.monotonic() - self._since
            print(f"epoch {len(self.history)} of {self._plan.epochs}  {shown}  {took:.1f} s", flush=True)

    def sample(self) -> Batch:
        """Return a batch of this rank's rows."""
        return next(self.batches(0))

    def _open(self, path: str, *, shuffle: bool, equal_steps: bool) -> Shard:
        plan = self._plan
        return shard(
            path,
            batch_size=plan.batch_size,
            columns=list(dict.fromkeys([*plan.feature_cols, *plan.label_cols])),
            shuffle=shuffle,
            seed=plan.seed,
            equal_steps=equal_steps,
            cache=plan.cache,
            storage_options=plan.run.store.storage_options,
        )

    def _batch(self, columns: Mapping[str, Array]) -> Batch:
        features = picked(columns, self._plan.feature_cols)
        return Batch(
            features, picked(columns, self._plan.label_cols), len(columns[self._plan.feature_cols[0]])
        )


TrainFn = Callable[[Training], Callable[[Any], Any]]
"""Trains on a rank, and returns a function from features to outputs."""


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


def means_over(
    training: Training, batches: Iterable[Batch], measure: Callable[[Batch], Mapping[str, float]]
) -> dict[str, float]:
    """Return the means of `measure` over all rows of all ranks' batches; every rank must call it."""
    sums: dict[str, float] = {}
    rows = 0
    for batch in batches:
        rows += batch.rows
        for name, value in measure(batch).items():
            sums[name] = sums.get(name, 0.0) + float(value) * batch.rows
    return training.averages(sums, rows)


def picked(columns: Mapping[str, Array], names: Sequence[str]) -> Any:
    """Return one column as an array, or several as a tuple."""
    return columns[names[0]] if len(names) == 1 else tuple(columns[name] for name in names)


def apply_metrics(metrics: Mapping[str, Metric], outputs: Any, labels: Any) -> dict[str, float]:
    """Return the value of each metric for some rows."""
    return {name: float(np.asarray(metric(outputs, labels))) for name, metric in metrics.items()}
