"""Which columns of a DataFrame can become arrays, said before any work is done; and how tasks get them."""

from __future__ import annotations

import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyhvd.spark.data.optional_imports import needed
from pyhvd.spark.errors import DataError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_PLAIN = {
    "byte", "short", "integer", "long", "float", "double", "boolean", "date", "timestamp", "timestamp_ntz",
    "string", "varchar", "char", "binary",
}  # fmt: skip


@dataclass(frozen=True)
class Selection:
    """Columns of a DataFrame for tasks that take record batches of Arrow.

    Attributes
    ----------
    df : DataFrame
        The columns, by names of this module's own: mapInArrow does not find a name that has a dot.
    names : list of str
        The names that they had.
    """

    df: DataFrame
    names: list[str]

    def collect(
        self, work: Callable[[Iterable[Any]], Iterator[Any]], schema: str, barrier: bool = False
    ) -> list[Any]:
        """Have each partition's task call `work` with its record batches; return the rows that it yields."""
        names = self.names

        def renamed(batches: Iterator[Any]) -> Iterator[Any]:
            make = needed("pyarrow").RecordBatch.from_arrays
            return work(make(batch.columns, names=names) for batch in batches)

        rows: list[Any] = self.df.mapInArrow(renamed, schema, barrier=barrier).collect()
        return rows


def check_frame(df: Any) -> None:
    """Refuse what is no DataFrame of Spark.

    Raises
    ------
    DataError
        The text shows the value.
    """
    if not hasattr(df, "mapInArrow"):
        raise DataError(f"df={reprlib.repr(df)}: expected a DataFrame of Spark")


def select(df: DataFrame, names: Sequence[str] | None) -> Selection:
    """Return these columns of a DataFrame, vectors of Spark ML as lists; all columns for None.

    Raises
    ------
    DataError
        It is no DataFrame; a column is not there, is there twice, or is of a type that no array has.
    SparkError
        A package is missing.
    """
    check_frame(df)
    for module in ("pandas", "pyarrow"):  # mapInArrow insists on both
        needed(module)
    if isinstance(names, str):
        raise DataError(f"columns={names!r}: expected a list of names")
    fields = {field.name: field for field in df.schema.fields}
    chosen = list(fields if names is None else names)
    missing = [name for name in chosen if name not in fields]
    if missing or not chosen:
        raise DataError(f"there is no column {', '.join(map(repr, missing))}; there are {', '.join(fields)}")
    twice = [name for name, count in Counter(df.columns).items() if count > 1 and name in chosen]
    twice += [name for name, count in Counter(chosen).items() if count > 1]
    if twice:
        raise DataError(f"column {twice[0]!r} is there twice: rename one, or leave it out")
    columns = [expression(name, fields[name].dataType) for name in chosen]
    return Selection(df.select([column.alias(f"c{n}") for n, column in enumerate(columns)]), chosen)


def named(name: str) -> Column:
    """Return the column of exactly this name, whatever characters it has."""
    from pyspark.sql import functions

    return functions.col("`" + name.replace("`", "``") + "`")


def expression(name: str, kind: Any) -> Column:
    """Return what is in a column of this type; vectors of Spark ML as lists.

    Raises
    ------
    DataError
        It is of a type that no array has.
    """
    column = named(name)
    if type(kind).__name__ == "VectorUDT":
        from pyspark.ml.functions import vector_to_array

        return vector_to_array(column)
    inner = kind
    while inner.typeName() == "array":
        inner = inner.elementType
    if inner.typeName() not in _PLAIN:
        raise DataError(
            f"column {name!r} is of type {kind.simpleString()}, which no array has: cast it, or leave it out"
        )
    return column
