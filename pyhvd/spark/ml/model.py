"""``Model``: what an Estimator's fit returns, a transformer of Spark ML.

It is imported on first use, as it needs pyspark.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import cloudpickle
import msgspec
from pyspark import SparkContext
from pyspark.ml import Model as SparkModel
from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.util import DefaultParamsWriter, MLReadable, MLReader, MLWritable, MLWriter

from pyhvd.common.urls import is_url
from pyhvd.spark.data.folder import Folder
from pyhvd.spark.data.manifest import Column
from pyhvd.spark.data.schema import expression, holds_numbers, named
from pyhvd.spark.errors import DataError, require_columns
from pyhvd.spark.ml.model_metadata import ModelDescription
from pyhvd.spark.ml.prediction import Predictor, spark_type

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_DESCRIPTION = "model.json"
_PREDICT = "predict.pkl"


def param(name: str, text: str, convert: Callable[[Any], Any] | None = None) -> Param[Any]:
    """Return a Param for the body of a class."""
    return Param(Params._dummy(), name, text, convert)


class Model(SparkModel, MLWritable, MLReadable["Model"]):
    """A trained model, which adds its outputs to a DataFrame; :meth:`Estimator.fit` returns one.

    Spark ML can write and read it, alone and as a stage of a PipelineModel: ``model.write().save(path)``.

    Attributes
    ----------
    history : list of dict
        The measures of each epoch, by name: ``loss``; with validation also ``val_loss``, and a ``val_`` value
        for every metric. A train_fn passes its own measures to ``end_epoch``.
    run_id : str
        The run that trained it.
    output_cols : Param
        The names of the new columns, one per output; by default ``<label>__output``, or ``output_0``, ... if
        the numbers of labels and outputs differ.
    batch_size : Param
        The number of rows of one call of the model.

    Examples
    --------
    >>> model = estimator.fit(train_df)                               # doctest: +SKIP
    >>> model.history[-1]                                             # doctest: +SKIP
    {'loss': 0.12, 'val_loss': 0.15, 'val_accuracy': 0.96}
    >>> model.transform(test_df).select("label", "label__output")     # doctest: +SKIP
    """

    output_cols = param(
        "output_cols", "names of the new columns, one per output", TypeConverters.toListString
    )
    batch_size = param("batch_size", "number of rows of one call of the model", TypeConverters.toInt)

    def __init__(self, description: ModelDescription, predict: bytes) -> None:
        super().__init__()
        if description.uid:
            self._resetUid(description.uid)
        self._description = description
        self._predict = predict
        self.history = [dict(measures) for measures in description.history]
        self.run_id = description.run_id
        self._setDefault(output_cols=list(description.output_cols), batch_size=description.batch_size)

    @property
    def feature_cols(self) -> list[str]:
        """The columns that :meth:`transform` reads."""
        return [column.name for column in self._description.features]

    def predictor(self) -> Callable[[Any], Any]:
        """Return the function from features to outputs, to use it without Spark.

        It takes and returns an array of shape ``(rows, ...)``, or a tuple of arrays for several columns. For
        a torch module it has an attribute `module`, for a Keras model `model`; for a numpy model it is the
        model's method `predict`.
        """
        loaded: Callable[[Any], Any] = cloudpickle.loads(self._predict)
        return loaded

    def save(self, path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> None:
        """Write the model into a new folder; this needs no Spark session.

        Parameters
        ----------
        path : str or path
            A local path, or any URL that fsspec knows. With a session, a path without a scheme is on Hadoop's
            default file system, as for Spark's own models.
        storage_options : mapping, optional
            Options of the file system, e.g. keys.

        Raises
        ------
        DataError
            The path exists. ``model.write().overwrite().save(path)`` replaces it.
        """
        folder = _folder(path, storage_options)
        if folder.exists():
            raise DataError(
                f"{folder.path} exists: save into a new folder, or replace it with"
                " model.write().overwrite().save(path)"
            )
        self.store_in(folder)

    def store_in(self, folder: Folder) -> None:
        """Write the model's files into a folder, over those of an older model."""
        description = msgspec.structs.replace(
            self._description,
            output_cols=tuple(self.getOrDefault(self.output_cols)),
            batch_size=self.getOrDefault(self.batch_size),
            uid=self.uid,
        )
        folder.write(_PREDICT, self._predict)
        folder.write(_DESCRIPTION, description.encode())

    def write(self) -> MLWriter:
        """Return Spark ML's writer, which a PipelineModel uses too.

        It writes the files of :meth:`save`, and Spark's ``metadata`` beside them.
        """
        return ModelWriter(self)

    @classmethod
    def read(cls) -> MLReader[Model]:
        """Return Spark ML's reader; its ``load(path)`` is :meth:`load`."""
        return ModelReader()

    @classmethod
    def load(cls, path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> Model:
        """Return the model of a folder that :meth:`save` or :meth:`write` wrote; each fit saves its model so.

        The model's function is unpickled when it predicts, not here. Load only models that you
        trust, as with torch.load: unpickling can run any code.

        Raises
        ------
        DataError
            The folder has no model, or the model is damaged.
        """
        folder = _folder(path, storage_options)
        try:
            description = ModelDescription.decode(folder.read(_DESCRIPTION))
            predict = folder.read(_PREDICT)
        except FileNotFoundError:
            raise DataError(f"{folder.path} holds no model: Model.save writes one") from None
        except msgspec.DecodeError as exc:
            raise DataError(f"{folder.at(_DESCRIPTION)} is damaged: {exc}") from None
        if description.version != 1:
            raise DataError(f"{folder.path} holds a model of a newer pyhvd (format {description.version})")
        return cls(description, predict)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        from pyspark.sql.types import StructField, StructType, _parse_datatype_string

        outputs = self._outputs(dataset.columns)
        kinds = {field.name: field.dataType for field in dataset.schema.fields}
        columns = [named(name) for name in dataset.columns]
        features = []
        for column in self._description.features:
            made = expression(column.name, kinds[column.name])
            kind = kinds[column.name].simpleString()
            if holds_numbers(column.dtype) and not holds_numbers(kind):
                raise DataError(
                    f"column {column.name!r} is of type {kind}, and the model was trained on {column.dtype}:"
                    " cast it, or encode it as for the training"
                )
            source = dataset.columns.index(column.name)
            if type(kinds[column.name]).__name__ == "VectorUDT":
                source = len(columns)
                columns.append(made)
            features.append((source, column))
        predict = Predictor(
            self._predict, features, outputs, dataset.columns, self.getOrDefault(self.batch_size)
        )
        added = [StructField(each.name, _parse_datatype_string(spark_type(each))) for each in outputs]
        schema = StructType([*dataset.schema.fields, *added])
        # Renamed, as mapInArrow does not find names with a dot.
        chosen = dataset.select([column.alias(f"c{number}") for number, column in enumerate(columns)])
        return chosen.mapInArrow(predict, schema)

    def _outputs(self, columns: Sequence[str]) -> list[Column]:
        """Return the outputs, named as their columns."""
        names = self.getOrDefault(self.output_cols)
        described = self._description.outputs
        if len(names) != len(described):
            raise ValueError(f"output_cols={names!r}: the model has {len(described)} outputs")
        require_columns(self.feature_cols, columns)
        taken = [name for name, count in Counter([*columns, *names]).items() if count > 1]
        if taken:
            raise DataError(
                f"there would be two columns {taken[0]!r}: drop or rename one, or choose output_cols"
            )
        return [
            msgspec.structs.replace(column, name=name) for name, column in zip(names, described, strict=True)
        ]


class ModelWriter(MLWriter):
    """Writes a Model as Spark ML does; see :meth:`Model.write`."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self._model = model

    def saveImpl(self, path: str) -> None:  # noqa: N802 - Spark's
        """Write the files; with ``overwrite()``, Spark has removed older ones.

        Raises
        ------
        DataError
            The path exists.
        """
        # Spark's file comes last: without it a reader of Spark ML finds no model.
        self._model.save(path)
        DefaultParamsWriter.saveMetadata(self._model, path, self.sc)


class ModelReader(MLReader["Model"]):
    """Reads a Model as Spark ML does; see :meth:`Model.read`."""

    def load(self, path: str) -> Model:
        """Return the model of a folder; see :meth:`Model.load`."""
        return Model.load(path)


def _folder(path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None) -> Folder:
    """Return the folder that Spark means by a path: one without a scheme is on its default file system."""
    context = SparkContext._active_spark_context
    if context is not None and storage_options is None and not is_url(os.fspath(path)):
        hadoop: Any = context._jvm.org.apache.hadoop.fs.Path(os.fspath(path))
        system = hadoop.getFileSystem(context._jsc.hadoopConfiguration())
        if system.getScheme() != "file":
            path = system.makeQualified(hadoop).toString()
    return Folder(path, storage_options)
