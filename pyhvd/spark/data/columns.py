"""Conversion of Arrow columns to numpy arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyhvd.spark.data.manifest import Column
from pyhvd.spark.errors import DataError, needed

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]
    Batch = dict[str, Array]


def to_batch(table: Any) -> Batch:
    """Return the columns of a pyarrow.Table as arrays, without copies where possible.

    Raises
    ------
    DataError
        A column has nulls, lists of different lengths, or a type that arrays do not have.
    """
    return {name: to_array(table.column(name), name) for name in table.column_names}


def to_array(values: Any, name: str) -> Array:
    """Return a pyarrow Array or ChunkedArray of n rows as an array of shape ``(n, ...)``."""
    pa = needed("pyarrow")
    if isinstance(values, pa.ChunkedArray):
        values = values.chunk(0) if values.num_chunks == 1 else pa.concat_arrays(values.chunks)
    if values.null_count:
        raise DataError(
            f"column {name!r} holds {values.null_count} nulls among {len(values)} rows or elements, which no"
            " array can hold: fill them, or drop the rows (df.na.fill, df.na.drop)"
        )
    kind = pa.types
    if kind.is_list(values.type) or kind.is_large_list(values.type):
        return _from_lists(values, name)
    plain = (kind.is_integer, kind.is_floating, kind.is_boolean, kind.is_date, kind.is_timestamp)
    texts = (kind.is_string, kind.is_large_string, kind.is_binary, kind.is_large_binary)
    if not any(fits(values.type) for fits in plain + texts):
        raise DataError(
            f"column {name!r} is of type {values.type}, which no array has: cast it, or leave it out"
        )
    array: Array = values.to_numpy(zero_copy_only=False)
    return array


def _from_lists(values: Any, name: str) -> Array:
    compute = needed("pyarrow.compute")
    lengths = compute.unique(compute.list_value_length(values)).to_pylist()
    if len(lengths) > 1:
        raise DataError(
            f"column {name!r} has lists of {lengths[0]} and of {lengths[1]} elements, and an array needs all"
            " of one length: pad them"
        )
    inner = to_array(values.flatten(), name)
    return inner.reshape(len(values), *lengths, *inner.shape[1:])


def describe(batch: Batch) -> tuple[Column, ...]:
    """Return the descriptions of a batch's columns."""
    return tuple(Column(name, array.dtype.name, array.shape[1:]) for name, array in batch.items())


def check_alike(one: tuple[Column, ...], other: tuple[Column, ...]) -> None:
    """Raise DataError if two descriptions of the same columns differ."""
    for a, b in zip(one, other, strict=True):
        if a != b:
            raise DataError(
                f"column {a.name!r} has rows of shape {a.shape} and of shape {b.shape}: pad its lists"
            )
