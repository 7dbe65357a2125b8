"""Writing one partition as one Parquet file, in a Spark task.

A task returns faults of the data as its result: Spark would retry a failed task three times.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from pyhvd.spark.data.columns import check_alike, describe, to_batch
from pyhvd.spark.data.folder import Folder
from pyhvd.spark.data.manifest import Column, DataFile
from pyhvd.spark.errors import DataError, needed

GROUP_BYTES = 16 << 20

PART_NAME = re.compile(r"part-\d{5,}-[0-9a-f]{12}-[0-9a-f]{8}\.parquet")
"""Names of the files that jobs write: number of the partition, job, attempt."""


class Written(msgspec.Struct, frozen=True):
    """The result of a task: the file, None without rows, and its columns; or why there can be no file."""

    partition: int
    part: DataFile | None = None
    columns: tuple[Column, ...] = ()
    fault: str = ""


class PartWriter:
    """Writes the partition of the task that calls it, into a folder; PART_NAME says what `job` looks like.

    By default a row group has as many rows as take GROUP_BYTES, by the first rows.
    """

    def __init__(self, folder: Folder, job: str, rows_per_group: int | None, compression: str) -> None:
        self.folder = folder
        self.job = job
        self._rows_per_group = rows_per_group
        self._compression = compression

    def write(self, partition: int, batches: Iterable[Any]) -> Written:
        """Write record batches of Arrow into a file with a new name."""
        name = f"part-{partition:05d}-{self.job}-{uuid.uuid4().hex[:8]}.parquet"
        groups = self._groups(batches)
        first = next(groups, None)
        if first is None:
            return Written(partition)
        try:
            columns, counts = self._write_groups(name, first, groups)
        except BaseException as exc:
            self.folder.remove(name)
            if isinstance(exc, DataError):
                return Written(partition, fault=str(exc))
            raise
        return Written(partition, DataFile(name, tuple(counts)), columns)

    def _write_groups(
        self, name: str, first: Any, rest: Iterable[Any]
    ) -> tuple[tuple[Column, ...], list[int]]:
        columns = describe(to_batch(first))
        counts = [first.num_rows]
        parquet = needed("pyarrow.parquet")
        with (
            self.folder.open(name, "wb") as file,
            parquet.ParquetWriter(file, first.schema, compression=self._compression) as writer,
        ):
            writer.write_table(first, row_group_size=first.num_rows)
            for table in rest:
                check_alike(columns, describe(to_batch(table)))
                writer.write_table(table, row_group_size=table.num_rows)
                counts.append(table.num_rows)
        return columns, counts

    def _groups(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield tables, each with the rows of one row group."""
        pa = needed("pyarrow")
        limit = self._rows_per_group or 0
        held: list[Any] = []
        rows = 0
        for batch in batches:
            if not batch.num_rows:
                continue
            limit = limit or max(1, GROUP_BYTES * batch.num_rows // max(1, batch.nbytes))
            held.append(batch)
            rows += batch.num_rows
            while rows >= limit:
                table = pa.Table.from_batches(held)
                yield table.slice(0, limit)
                held = table.slice(limit).to_batches()
                rows -= limit
        if rows:
            yield pa.Table.from_batches(held)
