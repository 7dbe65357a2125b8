"""Checks whether a DataFrame's columns can become arrays, and passes them to tasks."""

from __future__ import annotations

import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyhvd.spark.errors import DataError, needed, require_columns

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_PLAIN = {
    "byte", "short", "integer", "long", "float", "double", "boolean", "date", "timestamp", "timestamp_ntz",
    "string", "varchar", "char", "binary",
}  # fmt: skip
# Of Spark, then of numpy where its name is another.
_NUMBERS = {
    "boolean", "tinyint", "smallint", "int", "bigint", "float", "double", "vector",
    "bool", "int8", "int16", "int32", "int64", "float16", "float32", "float64",
}  # fmt: skip


@dataclass(frozen=True)
class Selection:
    """Columns of a DataFrame, for tasks that process record batches of Arrow.

    `df` has them renamed, as mapInArrow does not find names with a dot; `names` are the original ones.
    """

    df: DataFrame
    names: list[str]

    def collect(
        self, work: Callable[[int, Iterable[Any]], Iterator[Any]], schema: str, *, barrier: bool = False
    ) -> list[Any]:
        """Call `work` in each partition's task; return the rows that it yields.

        It gets the partition's number and its record batches.
        """
        names = self.names

        def renamed(batches: Iterator[Any]) -> Iterator[Any]:
            from pyspark import TaskContext

            context = TaskContext.get()
            assert context is not None
            make = needed("pyarrow").RecordBatch.from_arrays
            return work(context.partitionId(), (make(batch.columns, names=names) for batch in batches))

        return list(self.df.mapInArrow(renamed, schema, barrier=barrier).collect())


def check_frame(df: Any) -> None:
    """Raise DataError for what is no DataFrame of Spark."""
    if not hasattr(df, "mapInArrow"):
        raise DataError(f"df={reprlib.repr(df)}: expected a DataFrame of Spark")


def select(df: DataFrame, names: Sequence[str] | None) -> Selection:
    """Return some columns of a DataFrame, or all for None; vectors of Spark ML become lists.

    Raises
    ------
    DataError
        Not a DataFrame, or a column is missing, occurs twice, or has a type that arrays do not have.
    SparkError
        A package is not installed.
    """
    check_frame(df)
    for module in ("pandas", "pyarrow"):  # mapInArrow needs both
        needed(module)
    if isinstance(names, str):
        raise DataError(f"columns={names!r}: expected a list of names")
    fields = {field.name: field for field in df.schema.fields}
    chosen = list(fields if names is None else names)
    require_columns(chosen, fields)
    twice = [name for name, count in Counter(df.columns).items() if count > 1 and name in chosen]
    twice += [name for name, count in Counter(chosen).items() if count > 1]
    if twice:
        raise DataError(f"column {twice[0]!r} is there twice: rename one, or leave it out")
    columns = [expression(name, fields[name].dataType) for name in chosen]
    return Selection(df.select([column.alias(f"c{n}") for n, column in enumerate(columns)]), chosen)


def named(name: str) -> Column:
    """Return the column of exactly this name; the name may have any characters."""
    from pyspark.sql import functions

    return functions.col("`" + name.replace("`", "``") + "`")


def holds_numbers(kind: str) -> bool:
    """Return whether a type, by Spark's or numpy's name, is of numbers or booleans, or arrays of them."""
    return re.sub("array<|>", "", kind) in _NUMBERS


def expression(name: str, kind: Any) -> Column:
    """Return the values of a column of type `kind`; vectors of Spark ML become lists, null stays null.

    Raises
    ------
    DataError
        Arrays do not have this type.
    """
    column = named(name)
    if type(kind).__name__ == "VectorUDT":
        from pyspark.ml.functions import vector_to_array
        from pyspark.sql import functions

        # Spark's function fails at a null, and names no column.
        return functions.when(column.isNotNull(), vector_to_array(column))
    inner = kind
    while inner.typeName() == "array":
        inner = inner.elementType
    if inner.typeName() not in _PLAIN:
        raise DataError(
            f"column {name!r} is of type {kind.simpleString()}, which no array has: cast it, or leave it out"
        )
    return column
