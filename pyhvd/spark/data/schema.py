"""Which columns of a DataFrame can become arrays, said before any work is done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pyhvd.spark.errors import DataError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_PLAIN = {
    "byte", "short", "integer", "long", "float", "double", "boolean", "date", "timestamp", "timestamp_ntz",
    "string", "varchar", "char", "binary",
}  # fmt: skip


def select(df: DataFrame, names: Sequence[str] | None) -> DataFrame:
    """Return these columns of a DataFrame, vectors of Spark ML as lists; all columns for None.

    Raises
    ------
    DataError
        A column is not there, is there twice, or is of a type that no array has.
    """
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
    return df.select([expression(name, fields[name].dataType) for name in chosen])


def expression(name: str, kind: Any) -> Column:
    """Return a column of this name and type; vectors of Spark ML as lists.

    Raises
    ------
    DataError
        It is of a type that no array has.
    """
    from pyspark.sql import functions

    column = functions.col("`" + name.replace("`", "``") + "`")
    if type(kind).__name__ == "VectorUDT":
        from pyspark.ml.functions import vector_to_array

        return vector_to_array(column).alias(name)
    inner = kind
    while inner.typeName() == "array":
        inner = inner.elementType
    if inner.typeName() not in _PLAIN:
        raise DataError(
            f"column {name!r} is of type {kind.simpleString()}, which no array has: cast it, or leave it out"
        )
    return column
