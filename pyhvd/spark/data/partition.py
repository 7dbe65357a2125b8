"""A rank's own partition of a DataFrame, which the rank's Spark task passes to it without shared files.

The task writes the rows into an unnamed Arrow file on a local disk. The rank inherits the file's descriptor
and maps the file. So the rows may exceed the memory, and the disk space is freed when the rank ends.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Any

from pyhvd.common.text import describe_ranks
from pyhvd.spark.data.columns import describe, to_batch
from pyhvd.spark.data.schema import Selection, select
from pyhvd.spark.data.shard import BatchPlan, Shard
from pyhvd.spark.errors import DataError, needed, require_columns
from pyhvd.spark.task_body import TaskBody

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from pyhvd.spark.data.columns import Batch

_VARIABLE = "PYHVD_SPARK_PARTITION"
"""The variable with the descriptor of a rank's partition."""


def deal(df: DataFrame, size: int) -> Selection:
    """Return the rows of a DataFrame in one partition per rank; row by row, the next rank gets the next row.

    Raises
    ------
    DataError
        A column has a type that arrays do not have.
    """
    rows = select(df, None)
    return replace(rows, df=rows.df.repartition(size))


def run_with_rows(rows: Selection, body: TaskBody, *, barrier: bool) -> list[tuple[int, bytes]]:
    """Run a rank for each partition, with its rows; return the number and the pickled result of each rank."""

    def work(number: int, batches: Iterable[Any]) -> Iterator[Any]:
        pa = needed("pyarrow")
        with spill(batches) as file:
            result = body.run(number, {_VARIABLE: file.fileno()})
        if result is not None:
            rank, pickled = result
            columns = [pa.array([rank], pa.int32()), pa.array([pickled], pa.binary())]
            yield pa.RecordBatch.from_arrays(columns, names=["rank", "result"])

    results = rows.collect(work, "rank int, result binary", barrier=barrier)
    return [(row[0], bytes(row[1])) for row in results]


def spill(batches: Iterable[Any]) -> IO[bytes]:
    """Return an unnamed file with these record batches, in Spark's directory for spilled data."""
    pa = needed("pyarrow")
    folders = [path for path in os.environ.get("SPARK_LOCAL_DIRS", "").split(",") if os.path.isdir(path)]
    file = tempfile.TemporaryFile(dir=folders[0] if folders else None)  # noqa: SIM115 - the caller closes it
    try:
        writer = None
        for batch in batches:
            writer = writer or pa.ipc.new_file(file, batch.schema)
            if batch.num_rows:
                writer.write_batch(batch)
        if writer is not None:
            writer.close()
        file.flush()
    except BaseException:
        file.close()
        raise
    return file


class SpilledPieces:
    """The record batches of a rank's partition; a source for :class:`pyhvd.spark.data.shard.Shard`.

    `descriptor` is that of the file from :func:`spill`; it stays open. If `columns` is None, all are read.
    """

    def __init__(self, descriptor: int, columns: Sequence[str] | None) -> None:
        pa = needed("pyarrow")
        self._names = columns
        self._batches: list[Any] = []
        if os.fstat(descriptor).st_size:
            reader = pa.ipc.open_file(pa.memory_map(f"/proc/self/fd/{descriptor}"))
            self._batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        self.lengths = [batch.num_rows for batch in self._batches]

    def load(self, number: int) -> Batch:
        """Return a record batch as arrays."""
        table = needed("pyarrow").Table.from_batches([self._batches[number]])
        if self._names is None:
            return to_batch(table)
        require_columns(self._names, table.column_names)
        return to_batch(table.select(list(self._names)))


def partition(
    *,
    batch_size: int = 32,
    columns: Sequence[str] | None = None,
    shuffle: bool = True,
    seed: int = 0,
    equal_steps: bool = True,
) -> Shard:
    """Return this rank's rows of the DataFrame that was passed to :func:`pyhvd.spark.run`.

    ``run(fn, df=df)`` distributes the rows to the ranks in turn, about as many to each. Every rank must call
    this, after :func:`pyhvd.init`: the ranks exchange their numbers of rows.

    Parameters
    ----------
    batch_size : int
        Rows per batch on this rank; the last batch of an epoch may have fewer.
    columns : sequence of str, optional
        The columns to read; all by default.
    shuffle : bool
        Whether each epoch has its own order: pieces of about 10,000 rows are shuffled, and then the rows
        within each four pieces.
    seed : int
        The seed of the shuffling.
    equal_steps : bool
        Whether every rank uses as many rows as the rank with the fewest. With `shuffle`, a rank with more
        leaves out different rows in each epoch. With False, ranks may have different numbers of steps, and
        must call :func:`pyhvd.join` after each epoch.

    Raises
    ------
    DataError
        ``run`` got no DataFrame, a rank has no rows, a column is missing, or a column has nulls or lists of
        different lengths.

    Examples
    --------
    >>> def train():
    ...     hvd.init()
    ...     for batch in pyhvd.spark.partition(batch_size=64).epoch(0):
    ...         step(batch["pixels"], batch["label"])
    >>> pyhvd.spark.run(train, df=df, num_proc=4)                   # doctest: +SKIP
    """
    plan = BatchPlan(batch_size, shuffle, seed)
    descriptor = os.environ.get(_VARIABLE)
    if descriptor is None:
        raise DataError("this rank has no partition: start it by pyhvd.spark.run(fn, df=...)")
    return _share(SpilledPieces(int(descriptor), columns), plan, equal_steps=equal_steps)


def _share(source: SpilledPieces, plan: BatchPlan, *, equal_steps: bool) -> Shard:
    import numpy as np

    from pyhvd.api import collectives, topology

    rank, own = topology.rank(), np.array([sum(source.lengths)])
    counts = collectives.allgather(own, name="pyhvd.spark.partition").tolist()
    empty = [index for index, count in enumerate(counts) if not count]
    if empty:
        raise DataError(
            f"{describe_ranks(empty)} of {len(counts)} would have no rows, as the DataFrame has"
            f" {sum(counts)}: use fewer ranks"
        )
    rows = min(counts) if equal_steps else counts[rank]
    columns = describe(source.load(0))
    return Shard(source, columns, rank=rank, total_rows=sum(counts), rows=rows, plan=plan)
