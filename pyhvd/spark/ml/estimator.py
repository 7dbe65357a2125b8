"""``Estimator``: Spark ML's fit(df), which trains on ranks inside the executors.

It is imported on first use, as it needs pyspark.
"""

from __future__ import annotations

import logging
import posixpath
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pyspark.ml import Estimator as SparkEstimator

from pyhvd.spark.api import active_context, run
from pyhvd.spark.data.folder import Folder
from pyhvd.spark.data.prepare import prepare
from pyhvd.spark.data.schema import named
from pyhvd.spark.data.store import Store
from pyhvd.spark.errors import DataError
from pyhvd.spark.ml.model import Model, param
from pyhvd.spark.ml.model_metadata import ModelDescription
from pyhvd.spark.ml.prediction import plain_columns
from pyhvd.spark.ml.runs import Run
from pyhvd.spark.ml.settings import check, check_columns, check_metrics, trainer_of
from pyhvd.spark.ml.training import FitPlan, Fitted, Metric, TrainFn, fit_on_rank
from pyhvd.spark.slots import EXECUTORS_START_S, count_slots, require_slots

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = logging.getLogger("pyhvd")


class Estimator(SparkEstimator):
    """Trains a model on a DataFrame, data-parallel: one rank per Spark task; pyhvd averages the gradients.

    Use it like any Estimator of Spark ML: in a Pipeline, in a CrossValidator, or with
    ``fit(df, {estimator.epochs: 3})``, as every argument is a Param.

    Parameters
    ----------
    model : torch.nn.Module, keras.Model or NumpyModel, optional
        A torch module, called with one tensor per feature column; a built model of Keras 3, on any backend;
        or an object with `parameters`, `gradients` and `predict`, see :class:`NumpyModel`. Give either this
        or `train_fn`.
    train_fn : callable, optional
        Your own training loop. Every rank calls it with a :class:`Training`; it returns a function from
        features to outputs.
    store : Store
        Holds the run's data, checkpoint and model; driver and executors share it.
    feature_cols, label_cols : list of str
        Columns of numbers, vectors, or lists of equal length. The model gets an array of shape
        ``(rows, ...)``, or a tuple of arrays for several columns.
    num_proc : int, optional
        The number of ranks; by default one per slot of the cluster.
    batch_size : int
        Rows per step and rank.
    epochs : int
        Passes over the data.
    validation : float or str, optional
        The fraction of the rows for validation, or a column that is true (or above 0) for those rows.
    loss : callable or str, optional
        For a torch module: a function from its output and the labels to the mean loss of the rows. For a
        Keras model: what its ``compile()`` takes.
    optimizer : optional
        For a torch module: a function from its parameters to a torch.optim.Optimizer. For a Keras model: what
        its ``compile()`` takes. Otherwise an object with ``step(parameters, gradients)``; ``SGD()`` by
        default.
    metrics : mapping of str to callable, optional
        Functions from outputs and labels (numpy arrays) to a number, measured on the validation data.
    run_id : str, optional
        The run's name in the store; a new name by default. A run with a checkpoint continues from it, with
        the optimizer's state. Do not set it for several fits at once, as in a CrossValidator.
    shuffle : bool
        Whether each epoch has its own order of the rows.
    seed : int
        The seed of the shuffling, and of the split into training and validation data.
    cache : bool
        Whether to keep each rank's data in memory.
    verbose : int
        0: show nothing; 1: show a line per epoch and the ranks' output; 2: also log where the ranks ran.
    run_options : mapping, optional
        Other arguments of :func:`pyhvd.spark.run`: `env`, `start_timeout`, `nics`, ...

    Raises
    ------
    TypeError, ValueError
        An argument is invalid; :meth:`fit` checks them again.

    Examples
    --------
    >>> estimator = pyhvd.spark.Estimator(                              # doctest: +SKIP
    ...     model=torch.nn.Linear(64, 10),
    ...     loss=torch.nn.functional.cross_entropy,
    ...     optimizer=functools.partial(torch.optim.SGD, lr=0.1),
    ...     store=pyhvd.spark.Store.create("/shared/digits"),
    ...     feature_cols=["pixels"], label_cols=["digit"], epochs=10, validation=0.2, num_proc=4,
    ... )
    >>> model = estimator.fit(df)                                       # doctest: +SKIP
    """

    model = param("model", "a torch module, a Keras model, or a NumpyModel")
    train_fn = param("train_fn", "a training loop: from a Training to a function that predicts")
    store = param("store", "holds the run's data, checkpoint and model")
    feature_cols = param("feature_cols", "columns that are the model's input")
    label_cols = param("label_cols", "columns that the model learns")
    num_proc = param("num_proc", "number of ranks; None: one per slot of the cluster")
    batch_size = param("batch_size", "rows per step and rank")
    epochs = param("epochs", "passes over the data")
    validation = param("validation", "fraction of the rows for validation, or a column that is true for them")
    loss = param("loss", "of a torch module or a Keras model: from output and labels to the mean loss")
    optimizer = param(
        "optimizer",
        "for a torch module: function from parameters to an optimizer; for a Keras model: what compile()"
        " takes; else an object with step()",
    )
    metrics = param(
        "metrics", "functions from outputs and labels to a number, measured on the validation data"
    )
    run_id = param("run_id", "the run's name in the store; None: a new name")
    shuffle = param("shuffle", "whether each epoch has its own order of the rows")
    seed = param("seed", "seed of the orders and of the split")
    cache = param("cache", "whether to keep each rank's data in memory")
    verbose = param("verbose", "0: show nothing; 1: a line per epoch; 2: also where the ranks ran")
    run_options = param("run_options", "other arguments of pyhvd.spark.run")

    def __init__(
        self,
        *,
        model: Any = None,
        train_fn: TrainFn | None = None,
        store: Store,
        feature_cols: Sequence[str],
        label_cols: Sequence[str],
        num_proc: int | None = None,
        batch_size: int = 32,
        epochs: int = 1,
        validation: float | str | None = None,
        loss: Callable[[Any, Any], Any] | str | None = None,
        optimizer: Any = None,
        metrics: Mapping[str, Metric] | None = None,
        run_id: str | None = None,
        shuffle: bool = True,
        seed: int = 0,
        cache: bool = False,
        verbose: int = 1,
        run_options: Mapping[str, Any] | None = None,
    ) -> None:
        given = dict(locals())
        super().__init__()
        values = {param.name: given[param.name] for param in self.params}
        values |= {"metrics": dict(metrics or {}), "run_options": dict(run_options or {})}
        check(values)
        for name, value in values.items():
            # Not Params._set, which ignores None.
            self.set(self.getParam(name), value)

    def fit_on_prepared(self, train_path: str, validation_path: str | None = None) -> Model:
        """Train like `fit`, on data that :func:`prepare` wrote, which may serve many fits.

        Parameters
        ----------
        train_path, validation_path : str
            Folders, as given to :func:`prepare`; with the store's `storage_options`.

        Raises
        ------
        DataError
            The data or a column are missing.
        RankFailedError, StartTimeoutError, SparkError
            As :func:`pyhvd.spark.run`.
        """
        values = self._values()
        check_metrics(values, validating=validation_path is not None)
        if values["validation"] is not None:
            raise ValueError(
                "validation splits a DataFrame: with prepared data, give validation_path instead"
            )
        self._require_slots(values)
        return self._train(values, self._run(values), train_path, validation_path)

    def fitMultiple(self, dataset: DataFrame, paramMaps: Sequence[Any]) -> Any:  # noqa: N802, N803
        """Fit once for each of several maps of Params; CrossValidator and the like call it.

        Raises
        ------
        ValueError
            `run_id` is set: each fit would continue from the checkpoint of the previous one.
        """
        for given in [{}, *paramMaps]:
            name = given.get(self.run_id, self.getOrDefault(self.run_id))
            if name is not None:
                raise ValueError(
                    f"run_id={name!r} names one run, and several fits would continue from each other's"
                    " checkpoints: leave it out, or call fit for each with its own run_id"
                )
        return super().fitMultiple(dataset, paramMaps)

    def _fit(self, dataset: DataFrame) -> Model:
        values = self._values()
        validation = values["validation"]
        check_metrics(values, validating=validation is not None)
        kinds = {field.name: field.dataType.simpleString() for field in dataset.schema.fields}
        check_columns(values, kinds, plain_columns(kinds, values["feature_cols"]))
        current = self._run(values)
        paths = [current.data_path("train"), current.data_path("validation")]
        parts = split(dataset, validation, values["seed"])
        self._require_slots(values)
        try:
            for rows, path in zip(parts, paths, strict=False):
                self._prepare(values, rows, path)
            return self._train(values, current, paths[0], None if validation is None else paths[1])
        finally:
            current.remove_data()

    @staticmethod
    def _prepare(values: Mapping[str, Any], rows: DataFrame, path: str) -> None:
        try:
            prepare(
                rows,
                path,
                columns=list(dict.fromkeys([*values["feature_cols"], *values["label_cols"]])),
                shuffle=values["shuffle"],
                seed=values["seed"],
                overwrite=True,
                storage_options=values["store"].storage_options,
            )
        except DataError as exc:
            raise DataError(f"{posixpath.basename(path)} data: {exc}") from None

    def _values(self) -> dict[str, Any]:
        values = {param.name: self.getOrDefault(param) for param in self.params}
        check(values)
        return values

    @staticmethod
    def _require_slots(values: Mapping[str, Any]) -> None:
        if values["num_proc"] is not None:
            require_slots(active_context(), values["num_proc"], EXECUTORS_START_S)

    @staticmethod
    def _run(values: Mapping[str, Any]) -> Run:
        name = values["run_id"] or f"run-{datetime.now():%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:6]}"
        return Run(values["store"], name)

    def _train(self, values: Mapping[str, Any], current: Run, train: str, validation: str | None) -> Model:
        dataset = current.store.get_parquet_dataset(train)
        features = dataset.choose(values["feature_cols"])
        labels = values["label_cols"]
        kinds = {column.name: column.dtype for column in (*features, *dataset.choose(labels))}
        check_columns(values, kinds, features)
        ranks = values["num_proc"] or count_slots(active_context())
        if dataset.rows < ranks:
            raise DataError(
                f"train data: there are {dataset.rows} rows for {ranks} ranks, and each needs at least one:"
                f" set num_proc to {dataset.rows} or fewer, or give more rows"
            )
        names = ("feature_cols", "label_cols", "batch_size", "epochs", "shuffle", "seed", "cache")
        plan = FitPlan(
            current,
            train,
            validation,
            verbose=bool(values["verbose"]),
            **{name: values[name] for name in names},
        )
        results: list[Fitted | None] = run(
            fit_on_rank,
            (plan, trainer_of(values)),
            num_proc=values["num_proc"],
            verbose=values["verbose"],
            **values["run_options"],
        )
        (fitted,) = (each for each in results if each is not None)
        description = ModelDescription(
            features,
            fitted.outputs,
            output_names(labels, len(fitted.outputs)),
            values["batch_size"],
            fitted.history,
            current.id,
        )
        trained = Model(description, fitted.predict)
        trained.store_in(Folder(current.model_path(), current.store.storage_options))
        if values["verbose"]:
            _log.info("the model of run %r is in %s", current.id, current.model_path())
        return trained


def split(df: DataFrame, validation: float | str | None, seed: int) -> list[DataFrame]:
    """Return the training rows, and, with validation, the validation rows."""
    if validation is None:
        return [df]
    if not isinstance(validation, str):
        return list(df.randomSplit([1 - validation, validation], seed))
    from pyspark.sql import functions

    if validation not in df.columns:
        raise ValueError(
            f"validation={validation!r}: there is no such column; there are {', '.join(df.columns)}"
        )
    kind = df.schema[validation].dataType.simpleString()
    if not (plain_columns({validation: kind}, [validation]) or kind.startswith("decimal")):
        raise DataError(
            f"validation={validation!r}: that column is of type {kind}; expected booleans or numbers, true or"
            f" above 0 for rows to validate with, as df.withColumn('held', df[{validation!r}] == 'test') adds"
        )
    chosen = named(validation).cast("double") > 0
    held = functions.coalesce(chosen, functions.lit(False))
    return [df.where(~held), df.where(held)]


def output_names(labels: Sequence[str], outputs: int) -> tuple[str, ...]:
    """Return the names of the outputs' columns: from the labels, if their number is the same."""
    if outputs == len(labels):
        return tuple(f"{label}__output" for label in labels)
    return tuple(f"output_{number}" for number in range(outputs))
