"""Reading one rank's pieces of row groups from a dataset's Parquet files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pyhvd.spark.data.columns import to_batch
from pyhvd.spark.data.folder import Folder
from pyhvd.spark.data.manifest import Column, Dataset
from pyhvd.spark.data.shares import Piece
from pyhvd.spark.errors import DataError, needed

if TYPE_CHECKING:
    from pyhvd.spark.data.columns import Batch


class ParquetPieces:
    """Reads pieces of a prepared dataset; a source for :class:`pyhvd.spark.data.shard.Shard`."""

    def __init__(
        self, folder: Folder, dataset: Dataset, columns: Sequence[Column], pieces: Sequence[Piece]
    ) -> None:
        self.lengths = [piece.rows for piece in pieces]
        self._folder = folder
        self._columns = columns
        self._pieces = pieces
        self._groups = [(part, own) for part in dataset.parts for own in range(len(part.groups))]
        self._footers: dict[str, Any] = {}

    def load(self, number: int) -> Batch:
        """Return a piece as arrays.

        Raises
        ------
        DataError
            The file is missing or damaged, or does not match the dataset's description.
        """
        piece = self._pieces[number]
        part, own = self._groups[piece.group]
        pa = needed("pyarrow")
        try:
            table = self._read(part.name, own)
        except (OSError, pa.ArrowException, IndexError) as exc:
            raise DataError(
                f"row group {own} of {self._folder.at(part.name)} cannot be read"
                f" ({type(exc).__name__}: {exc}): prepare the data again"
            ) from exc
        batch = to_batch(table.slice(piece.begin, piece.rows))
        for column in self._columns:
            found = batch[column.name]
            if (
                table.num_rows != part.groups[own]
                or found.dtype.name != column.dtype
                or found.shape[1:] != column.shape
            ):
                raise DataError(
                    f"row group {own} of {self._folder.at(part.name)} does not match the dataset's"
                    " description: prepare the data again"
                )
        return batch

    def _read(self, name: str, group: int) -> Any:
        parquet = needed("pyarrow.parquet")
        names = [column.name for column in self._columns]
        local = self._folder.local(name)
        # A local file needs no file object of Python, which would take the GIL at every read.
        with (
            needed("pyarrow").OSFile(local) if local else self._folder.open(name) as file,
            parquet.ParquetFile(file, metadata=self._footers.get(name), pre_buffer=True) as opened,
        ):
            self._footers[name] = opened.metadata
            table = opened.read_row_group(group, columns=names)
            return table.select(names)  # in this order, without columns of which a name is a prefix
