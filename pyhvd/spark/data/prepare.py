"""``prepare``: Spark's tasks write a DataFrame as Parquet files, and the driver writes the manifest."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from pyhvd.spark.data import manifest
from pyhvd.spark.data.columns import check_alike
from pyhvd.spark.data.folder import Folder
from pyhvd.spark.data.manifest import Dataset
from pyhvd.spark.data.schema import Selection, select
from pyhvd.spark.data.write_partition import PART_NAME, PartWriter, Written
from pyhvd.spark.errors import DataError, SparkError, needed, reason_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = logging.getLogger("pyhvd")

_COMPRESSIONS = ("snappy", "zstd", "gzip", "lz4", "brotli", "none")


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
    """Write a DataFrame as Parquet files; ranks read their shares of them with :func:`shard`.

    Columns may hold numbers, booleans, dates, timestamps, texts, bytes, vectors of Spark ML, and lists of
    equal length, without nulls. The dataset exists only after everything has been written.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
        The rows. Spark evaluates it once.
    path : str or path
        A new or empty folder: a local path, or any URL that fsspec knows (``hdfs://name:8020/x``,
        ``s3://bucket/x``, ...). Driver and executors must share it.
    columns : sequence of str, optional
        The columns to write; all by default.
    shuffle, seed : bool, int
        Whether to put the rows in random order, so that every rank's share is a sample of all rows.
    num_files, rows_per_group : int, optional
        The number of files, and most rows of a row group. By default one file per slot of the cluster
        (without `shuffle` one per partition), and row groups of 16 MiB.
    compression : str
        Parquet's: ``"snappy"``, ``"zstd"``, ``"gzip"``, ``"lz4"``, ``"brotli"``, ``"none"``.
    overwrite : bool
        Whether to replace a dataset; `df` may read from it. A folder with other files is refused.
    storage_options : mapping, optional
        Options of the file system, e.g. keys. The executors get them; they are never shown.

    Raises
    ------
    DataError
        The folder is not empty, a column cannot become an array, there are no rows, or driver and executors
        do not share the folder.
    SparkError
        Spark ended the job, or a package is missing.
    """
    _check(num_files=num_files, rows_per_group=rows_per_group)
    if compression not in _COMPRESSIONS:
        raise ValueError(f"compression={compression!r}: expected one of {', '.join(_COMPRESSIONS)}")
    folder = Folder(path, storage_options)
    _refuse_others(folder, overwrite=overwrite)
    rows = _arrange(select(df, columns), seed, num_files, shuffle=shuffle)
    return _carry_out(rows, PartWriter(folder, uuid.uuid4().hex[:12], rows_per_group, compression))


def _carry_out(rows: Selection, writer: PartWriter) -> Dataset:
    """Write files and manifest; remove files that the manifest does not name."""
    folder = writer.folder
    names: set[str] = set()
    try:
        dataset = _assemble(_write(rows, writer), folder)
        folder.write(manifest.NAME, manifest.encode(dataset))
        names = {part.name for part in dataset.parts}
    finally:
        _remove_others(folder, names, writer.job)
    return dataset


def _remove_others(folder: Folder, current: Container[str], job: str) -> None:
    """Remove files of failed or duplicate attempts, and after a success those of the previous dataset.

    Raise nothing: the dataset exists, or there is an error already. Remaining files do no harm.
    """
    try:
        for name in folder.names():
            if PART_NAME.fullmatch(name) and name not in current and (current or f"-{job}-" in name):
                folder.remove(name)
    except Exception as exc:
        _log.warning("files in %s that are not of the dataset could not be removed: %s", folder.path, exc)


def _check(**counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name}={value!r}: expected a number of 1 at least")


def _refuse_others(folder: Folder, *, overwrite: bool) -> None:
    """Raise DataError if the folder holds files that may not be removed."""
    names = folder.names()
    others = [name for name in names if name != manifest.NAME and not PART_NAME.fullmatch(name)]
    if others:
        raise DataError(
            f"{folder.path} holds other files ({others[0]!r}): choose a folder that is new or empty"
        )
    if names and not overwrite:
        what = "a prepared dataset" if manifest.NAME in names else "what an unfinished prepare has left"
        raise DataError(f"{folder.path} holds {what}: choose another folder, or overwrite=True")


def _arrange(rows: Selection, seed: int, num_files: int | None, *, shuffle: bool) -> Selection:
    df = rows.df
    if shuffle:
        from pyspark.sql import functions

        count = num_files or df.sparkSession.sparkContext.defaultParallelism
        # Drawn before the rows move, because they arrive in another order each time. Two numbers: one selects
        # the file, the other the place in it.
        drawn = df.select("*", functions.rand(seed).alias("file"), functions.rand(seed + 1).alias("place"))
        df = drawn.repartition(count, "file").sortWithinPartitions("place").drop("file", "place")
    elif num_files is not None:
        df = df.coalesce(num_files)
    return replace(rows, df=df)


def _write(rows: Selection, writer: PartWriter) -> list[Written]:
    """Make the tasks write; return their results in the order of the partitions."""

    def write(number: int, batches: Iterable[Any]) -> Iterator[Any]:
        written = writer.write(number, batches)
        yield needed("pyarrow").RecordBatch.from_pydict({"written": [msgspec.json.encode(written).decode()]})

    try:
        results = rows.collect(write, "written string")
    except Exception as exc:
        raise SparkError(f"Spark ended the job: {reason_of(exc)}") from exc
    return sorted(
        (msgspec.json.decode(row[0], type=Written) for row in results), key=lambda each: each.partition
    )


def _assemble(written: Sequence[Written], folder: Folder) -> Dataset:
    for each in written:
        if each.fault:
            raise DataError(each.fault)
    parts = [(each.part, each.columns) for each in written if each.part is not None]
    if not parts:
        raise DataError("the DataFrame has no rows")
    columns = parts[0][1]
    for _, others in parts:
        check_alike(columns, others)
    dataset = Dataset(columns, tuple(part for part, _ in parts))
    found = folder.sizes()
    missing = [part.name for part in dataset.parts if part.name not in found]
    if missing:
        raise DataError(
            f"the driver does not find {len(missing)} of {len(parts)} files that the executors wrote in"
            f" {folder.path}: give a folder that driver and executors share"
        )
    return dataset
