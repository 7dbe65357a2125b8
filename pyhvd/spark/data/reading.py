"""``shard``: a rank's share of a prepared dataset, as batches of numpy arrays."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyhvd.spark.data.manifest import Column

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Batch = dict[str, npt.NDArray[np.generic]]


class Shard:
    """One rank's share of some rows, as batches of numpy arrays; made by :func:`shard` and :func:`partition`.

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

    columns: dict[str, Column]
    rows: int
    total_rows: int
    steps: int

    def epoch(self, number: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch: dicts of column name to array, of up to `batch_size` rows.

        An array of n rows has shape ``(n, *column.shape)``. The next row groups are read while a batch is used.

        Parameters
        ----------
        number : int
            Which epoch: with `shuffle`, each has another order, the same whenever it is asked for.
        """
        raise NotImplementedError

    def read(self) -> Batch:
        """Return all rows of this rank as one batch, in the dataset's order; none is left out."""
        raise NotImplementedError


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
    """Return a rank's share of a dataset that :func:`prepare` has written.

    The rows are cut into `size` stretches, which differ by one row at most; of a row group that two ranks share, each
    uses its part. No Spark is needed, and nothing is sent between the ranks.

    Parameters
    ----------
    path : str or path
        As for :func:`prepare`.
    rank, size : int, optional
        Which share of how many; by default those of :func:`pyhvd.rank` and :func:`pyhvd.size`.
    batch_size : int
        Rows per batch on this rank; the last of an epoch may have fewer.
    columns : sequence of str, optional
        The columns to read; all by default.
    shuffle : bool
        Another order in each epoch: of the row groups, and of the rows of each few row groups.
    seed : int
        Of these orders.
    equal_steps : bool
        Every rank has batches of the same sizes: where shares differ, the larger ones leave one row out, with
        `shuffle` another one in each epoch. With False all rows are used, a rank may have a step more than others,
        and the ranks have to call :func:`pyhvd.join` after each epoch.
    cache : bool
        Keep the share in memory once it was read.
    storage_options : mapping, optional
        As for :func:`prepare`.

    Returns
    -------
    Shard
        The share.

    Raises
    ------
    DataError
        There is no prepared dataset, or it is damaged; no such column; fewer rows than ranks.
    ValueError
        `rank`, `size` or `batch_size` are out of range.

    Examples
    --------
    >>> data = pyhvd.spark.shard("/shared/digits", batch_size=64)   # doctest: +SKIP
    >>> for epoch in range(10):                                     # doctest: +SKIP
    ...     for batch in data.epoch(epoch):
    ...         step(batch["pixels"], batch["label"])
    """
    raise NotImplementedError
