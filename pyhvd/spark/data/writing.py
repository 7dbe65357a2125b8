"""``prepare``: a DataFrame becomes Parquet files, written by its tasks, and a manifest, written by the driver."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyhvd.spark.data.manifest import Dataset

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def prepare(
    df: DataFrame,
    path: str | os.PathLike[str],
    *,
    columns: Sequence[str] | None = None,
    shuffle: bool = True,
    seed: int = 0,
    num_files: int | None = None,
    rows_per_group: int | None = None,
    compression: str = "snappy",
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Dataset:
    """Write a DataFrame as Parquet files from which ranks read their shares with :func:`shard`.

    The tasks of the DataFrame write the files, each a number of row groups; then the driver writes columns and row
    counts beside them. Without that file there is no dataset: what a failed job leaves is no data.

    Columns may hold numbers, booleans, dates and timestamps, texts and bytes, vectors of Spark ML (sparse ones are
    filled up), and lists, also nested, of numbers or booleans. Vectors and lists must be of one length in all rows.
    There may be no nulls.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
        The rows. It is evaluated once.
    path : str or path
        The folder, new or empty: a local path, or any URL that fsspec knows (``hdfs://name:8020/x``,
        ``s3://bucket/x``, ...). Driver and executors must all reach it.
    columns : sequence of str, optional
        The columns to write; all by default.
    shuffle : bool
        Bring the rows into random order, so that every rank's share is a sample of all. Otherwise they stay in the
        order of the partitions.
    seed : int
        Of that order.
    num_files : int, optional
        How many files at most: one per slot of the cluster by default; without `shuffle` one per partition.
    rows_per_group : int, optional
        Rows per row group at most; by default as many as take 16 MiB as arrays.
    compression : str
        Parquet's: ``"snappy"``, ``"zstd"``, ``"gzip"``, ``"lz4"``, ``"none"``.
    overwrite : bool
        Take the place of a dataset that was prepared in this folder before. Its files are removed at the end, so
        that `df` may read from them. A folder with any other files is refused.
    storage_options : mapping, optional
        What the file system takes, e.g. keys. It travels to the executors, and is never shown.

    Returns
    -------
    Dataset
        Columns and row counts.

    Raises
    ------
    DataError
        The folder is not empty; a column holds what cannot become an array, a null, or lists of different lengths;
        there are no rows; the executors have written where the driver does not look.
    SparkError
        Spark ended the job, or a package is missing.

    Examples
    --------
    >>> dataset = pyhvd.spark.prepare(df, "/shared/digits")         # doctest: +SKIP
    >>> dataset.rows, dataset.columns[0]                            # doctest: +SKIP
    (1797, Column(name='pixels', dtype='float64', shape=(64,)))
    """
    raise NotImplementedError
