"""``shard``: a rank's share of a prepared dataset, as batches of numpy arrays."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pyhvd.spark.data import manifest
from pyhvd.spark.data.folder import Folder
from pyhvd.spark.data.manifest import Column
from pyhvd.spark.data.parquet import ParquetPieces
from pyhvd.spark.data.shares import draw, pieces, read_order, share
from pyhvd.spark.errors import DataError

if TYPE_CHECKING:
    from pyhvd.spark.data.columns import Batch


class Source(Protocol):
    """A source of a shard's rows, in pieces."""

    @property
    def lengths(self) -> Sequence[int]:
        """Rows of each piece."""

    def load(self, number: int) -> Batch:
        """Return a piece as arrays, which callers must not write to."""


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """How a shard makes batches of its rows; for the fields see the arguments of :func:`shard`."""

    batch_size: int
    shuffle: bool
    seed: int
    cache: bool = False

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size}: expected a number of rows, 1 at least")


class Shard:
    """One rank's share of some rows, as batches of numpy arrays.

    :func:`shard` and :func:`partition` return one.

    Attributes
    ----------
    columns : dict of str to Column
        The columns of the batches: numpy dtype, and shape of one row.
    rows : int
        This rank's rows per epoch; the same on every rank if steps are equal.
    total_rows : int
        The rows of all ranks.
    steps : int
        This rank's batches per epoch; the same on every rank if steps are equal.
    """

    def __init__(
        self,
        source: Source,
        columns: Sequence[Column],
        *,
        rank: int,
        total_rows: int,
        rows: int,
        plan: BatchPlan,
    ) -> None:
        self.columns = {column.name: column for column in columns}
        self.rows = rows
        self.total_rows = total_rows
        self.steps = -(-rows // plan.batch_size)
        self._source = source
        self._cached: dict[int, Batch] = {}
        self._rank = rank
        self._plan = plan

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the cached pieces: another process reads its own."""
        return self.__dict__ | {"_cached": {}}

    def epoch(self, number: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch: dicts of column name to array, of up to `batch_size` rows.

        An array of n rows has shape ``(n, *column.shape)``; the caller may keep and change it. A thread reads
        the next row groups while the caller uses a batch.

        Parameters
        ----------
        number : int
            The epoch. With `shuffle`, each epoch has its own order, the same at each call.

        Raises
        ------
        DataError
            A file is missing or damaged.
        """
        import numpy as np

        size, left = self._plan.batch_size, self.rows
        held: Batch = {}
        for fresh in self._mixed_rows(number):
            held = {
                name: np.concatenate([held[name], values]) if held else values
                for name, values in fresh.items()
            }
            rows = len(next(iter(held.values())))
            begin = 0
            while left and rows - begin >= min(size, left):
                end = begin + min(size, left)
                yield {name: values[begin:end] for name, values in held.items()}
                left -= end - begin
                begin = end
            held = {name: values[begin:] for name, values in held.items()}

    def read(self) -> Batch:
        """Return all rows of this rank as one batch, in the dataset's order."""
        return self._gather(range(len(self._source.lengths)))

    def _mixed_rows(self, epoch: int) -> Iterator[Batch]:
        """Yield the rows of a few pieces at a time, mixed if shuffled; read the next pieces meanwhile."""
        generator = draw(self._plan.seed, epoch, self._rank) if self._plan.shuffle else None
        order = read_order(len(self._source.lengths), generator)
        if not order:
            return
        with ThreadPoolExecutor(1, "pyhvd-shard") as pool:
            future = pool.submit(self._gather, order[0])
            for following in [*order[1:], []]:
                batch = future.result()
                if following:
                    future = pool.submit(self._gather, following)
                if generator is not None:
                    mixed = generator.permutation(len(next(iter(batch.values()))))
                    batch = {name: values[mixed] for name, values in batch.items()}
                yield batch

    def _load(self, number: int) -> Batch:
        found = self._cached.get(number)
        if found is None:
            found = self._source.load(number)
            if self._plan.cache:
                self._cached[number] = found
        return found

    def _gather(self, numbers: Sequence[int]) -> Batch:
        """Return a copy of several pieces as one batch."""
        import numpy as np

        batches = [self._load(number) for number in numbers]
        if not batches:
            return {
                column.name: np.empty((0, *column.shape), column.dtype) for column in self.columns.values()
            }
        return {name: np.concatenate([batch[name] for batch in batches]) for name in self.columns}


def shard(
    path: str | os.PathLike[str],
    rank: int | None = None,
    size: int | None = None,
    *,
    batch_size: int = 32,
    columns: Sequence[str] | None = None,
    shuffle: bool = True,
    seed: int = 0,
    equal_steps: bool = True,
    cache: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Shard:
    """Return a rank's share of a dataset that :func:`prepare` wrote.

    The rows are cut into `size` consecutive shares, which differ by at most one row. Two ranks may read parts
    of the same row group. This needs no Spark, and the ranks do not communicate.

    Parameters
    ----------
    path : str or path
        As for :func:`prepare`.
    rank, size : int, optional
        The share, and the number of shares; by default :func:`pyhvd.rank` and :func:`pyhvd.size`.
    batch_size : int
        Rows per batch on this rank; the last batch of an epoch may have fewer.
    columns : sequence of str, optional
        The columns to read; all by default.
    shuffle : bool
        Whether each epoch has its own order: the row groups are shuffled, and then the rows within each four
        row groups.
    seed : int
        The seed of the shuffling.
    equal_steps : bool
        Whether all ranks have batches of the same sizes. Then a share with an extra row leaves one row out;
        with `shuffle`, a different one in each epoch. With False, a rank may have one step more than others,
        and the ranks must call :func:`pyhvd.join` after each epoch.
    cache : bool
        Whether to keep the share in memory after reading it.
    storage_options : mapping, optional
        As for :func:`prepare`.

    Raises
    ------
    DataError
        The dataset is missing or damaged, a column is missing, or there are fewer rows than ranks.

    Examples
    --------
    >>> data = pyhvd.spark.shard("/shared/digits", batch_size=64)   # doctest: +SKIP
    >>> for epoch in range(10):                                     # doctest: +SKIP
    ...     for batch in data.epoch(epoch):
    ...         step(batch["pixels"], batch["label"])
    """
    plan = BatchPlan(batch_size, shuffle, seed, cache)
    folder = Folder(path, storage_options)
    return _open(folder, *_rank_and_size(rank, size), columns, plan, equal_steps=equal_steps)


def _open(
    folder: Folder, rank: int, size: int, columns: Sequence[str] | None, plan: BatchPlan, *, equal_steps: bool
) -> Shard:
    dataset = manifest.load(folder)
    chosen = dataset.choose(columns)
    if equal_steps and dataset.rows < size:
        raise DataError(
            f"{folder.path} has {dataset.rows} rows for {size} ranks: use fewer ranks, or equal_steps=False"
        )
    begin, end = share(dataset.rows, rank, size)
    groups = [rows for part in dataset.parts for rows in part.groups]
    source = ParquetPieces(folder, dataset, chosen, pieces(groups, begin, end))
    rows = dataset.rows // size if equal_steps else end - begin
    return Shard(source, chosen, rank=rank, total_rows=dataset.rows, rows=rows, plan=plan)


def _rank_and_size(rank: int | None, size: int | None) -> tuple[int, int]:
    """Return the given rank and size; by default this process's own."""
    if rank is None or size is None:
        from pyhvd.api import topology

        rank = topology.rank() if rank is None else rank
        size = topology.size() if size is None else size
    if not 0 <= rank < size:
        raise ValueError(f"rank={rank}, size={size}: expected a rank from 0 up to below the size")
    return rank, size
