"""Prediction: adds a trained model's outputs to record batches of Arrow.

It runs in Spark tasks. Rank 0 also runs it once after training, to describe the outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import numpy.typing as npt

from pyhvd.spark.data.columns import to_array
from pyhvd.spark.data.manifest import Column
from pyhvd.spark.errors import DataError, needed

Array = npt.NDArray[Any]

# Types that Spark lacks, and the next larger type that it has.
_WIDER = {"float16": "float32", "uint8": "int16", "uint16": "int32", "uint32": "int64"}
_SPARK_TYPES = {
    "bool": "boolean", "int8": "tinyint", "int16": "smallint", "int32": "int", "int64": "bigint",
    "float32": "float", "float64": "double",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Predictor:
    """Adds a model's outputs to record batches; a function for DataFrame.mapInArrow.

    Each of `features` is the index of its column in the record batches, and the column of the training data.
    The results have the first columns of the record batches, by `names`, then the outputs.
    """

    predict: bytes
    features: Sequence[tuple[int, Column]]
    outputs: Sequence[Column]
    names: Sequence[str]
    batch_size: int

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield every record batch with its outputs."""
        pa = needed("pyarrow")
        predict = cloudpickle.loads(self.predict)
        names = [*self.names, *(column.name for column in self.outputs)]
        for batch in batches:
            for start in range(0, batch.num_rows, self.batch_size):
                part = batch.slice(start, self.batch_size)
                features = tuple(
                    as_trained(to_array(part.column(source), column.name), column)
                    for source, column in self.features
                )
                outputs = as_tuple(predict(features[0] if len(features) == 1 else features))
                added = [
                    to_arrow(self._as_described(output, column, part.num_rows))
                    for output, column in zip(outputs, self.outputs, strict=True)
                ]
                columns = [*part.columns[: len(self.names)], *added]
                yield pa.RecordBatch.from_arrays(columns, names=names)

    def _as_described(self, output: Any, column: Column, rows: int) -> Array:
        array = widened(np.asarray(output))
        if array.shape != (rows, *column.shape):
            raise DataError(
                f"the model's output {column.name!r} has shape {array.shape} for {rows} rows, and had rows of"
                f" shape {column.shape} after training"
            )
        return array.astype(column.dtype, copy=False)


def as_trained(array: Array, column: Column) -> Array:
    """Return a feature in the dtype of the training data.

    Raises
    ------
    DataError
        Its rows have another shape, or its numbers are of another kind.
    """
    if array.shape[1:] != column.shape or not np.can_cast(array.dtype, column.dtype, "same_kind"):
        raise DataError(
            f"column {column.name!r} has rows of {array.dtype} and shape {array.shape[1:]}; the model was"
            f" trained on {column.dtype} and shape {column.shape}"
        )
    return array.astype(column.dtype, copy=False)


def describe_outputs(outputs: Any, rows: int) -> tuple[Column, ...]:
    """Return descriptions of a model's outputs for some rows, named ``"0"``, ``"1"``, ...

    Raises
    ------
    DataError
        An output does not have one number, or array of numbers, per row.
    """
    described = []
    for number, output in enumerate(as_tuple(outputs)):
        array = widened(np.asarray(output))
        if array.shape[:1] != (rows,):
            raise DataError(
                f"the model's output {number} has shape {array.shape} for {rows} rows: the first dimension"
                " must be the rows"
            )
        if array.dtype.name not in _SPARK_TYPES:
            known = ", ".join(_SPARK_TYPES)
            raise DataError(f"the model's output {number} is {array.dtype}: Spark's columns hold {known}")
        described.append(Column(str(number), array.dtype.name, array.shape[1:]))
    return tuple(described)


def spark_type(column: Column) -> str:
    """Return the type of the DataFrame's column: numbers, or flat lists of numbers."""
    name = _SPARK_TYPES[column.dtype]
    return f"array<{name}>" if column.shape else name


def plain_columns(kinds: Mapping[str, str], names: Sequence[str]) -> list[Column]:
    """Return the columns of a DataFrame that the batches have, or none if one has no plain numbers."""
    dtypes = {kind: dtype for dtype, kind in _SPARK_TYPES.items()}
    columns = [Column(name, dtypes[kinds[name]]) for name in names if kinds.get(name) in dtypes]
    return columns if len(columns) == len(names) else []


def to_arrow(array: Array) -> Any:
    """Return rows as an Arrow array: of numbers, or of flat lists of numbers."""
    pa = needed("pyarrow")
    if array.ndim == 1:
        return pa.array(array)
    length = math.prod(array.shape[1:])
    offsets = np.arange(len(array) + 1, dtype=np.int32) * length
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(array.reshape(-1)))


def widened(array: Array) -> Array:
    """Return the array in a dtype that Spark has and that holds all its values, if there is one."""
    return array.astype(_WIDER.get(array.dtype.name, array.dtype), copy=False)


def as_tuple(outputs: Any) -> tuple[Any, ...]:
    """Return a model's result as a tuple of outputs."""
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)
