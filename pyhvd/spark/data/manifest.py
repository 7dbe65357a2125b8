"""What a prepared dataset says of itself: the JSON file beside its Parquet files.

It is written last, and names every file that counts: what a failed or repeated task has left behind is not in
it. Owns the format; knows nothing of Spark and Arrow.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pyhvd.spark.data.folder import Folder
from pyhvd.spark.errors import DataError

NAME = "_pyhvd_metadata.json"
"""The file's name; Spark passes over names that begin with an underscore."""

VERSION = 1


class Column(msgspec.Struct, frozen=True):
    """A column, as batches have it.

    Attributes
    ----------
    name : str
        Its name in the DataFrame.
    dtype : str
        numpy's name of its dtype: ``"float32"``, ``"datetime64[us]"``; ``"object"`` for texts (str) and
        bytes.
    shape : tuple of int
        Of one row: ``()`` for a number, ``(64,)`` for a vector or list of 64.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] = ()


class Part(msgspec.Struct, frozen=True):
    """One Parquet file.

    Attributes
    ----------
    name : str
        Its name in the dataset's folder.
    groups : tuple of int
        Rows of each of its row groups.
    """

    name: str
    groups: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Rows in the file."""
        return sum(self.groups)


class Dataset(msgspec.Struct, frozen=True):
    """A prepared dataset: its columns, and how many rows are in which row group of which file.

    Attributes
    ----------
    columns : tuple of Column
        In the order of the DataFrame.
    parts : tuple of Part
        The files, in the order of their rows.
    version : int
        Of the format.
    """

    columns: tuple[Column, ...]
    parts: tuple[Part, ...]
    version: int = VERSION

    @property
    def rows(self) -> int:
        """Rows in all files."""
        return sum(part.rows for part in self.parts)

    def choose(self, names: Sequence[str] | None) -> tuple[Column, ...]:
        """Return the columns of these names, in the order of the names; all of them for None.

        Raises
        ------
        DataError
            There is no such column; the text lists what there is.
        """
        if names is None:
            return self.columns
        known = {column.name: column for column in self.columns}
        missing = [name for name in names if name not in known]
        if missing or not names:
            raise DataError(
                f"there is no column {', '.join(map(repr, missing))}; there are {', '.join(known)}"
            )
        return tuple(known[name] for name in names)


def encode(dataset: Dataset) -> bytes:
    """Return the dataset's JSON, in lines."""
    return msgspec.json.format(msgspec.json.encode(dataset), indent=1) + b"\n"


def decode(text: bytes, where: str) -> Dataset:
    """Return the dataset that `text` describes.

    Raises
    ------
    DataError
        It is no description of a dataset, or one of a later version; the text names `where`.
    """
    try:
        dataset = msgspec.json.decode(text, type=Dataset)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise DataError(f"{where} is damaged ({exc}): prepare the data again") from None
    if dataset.version > VERSION:
        raise DataError(
            f"{where} was written by a newer pyhvd (format {dataset.version}, known is {VERSION})"
        )
    counts = [count for part in dataset.parts for count in part.groups]
    sizes = [size for column in dataset.columns for size in column.shape]
    escaping = [part.name for part in dataset.parts if "/" in part.name or part.name.startswith(".")]
    if not all(count > 0 for count in counts) or min(sizes, default=0) < 0 or escaping:
        raise DataError(f"{where} is damaged (a count or a name is impossible): prepare the data again")
    return dataset


def load(folder: Folder) -> Dataset:
    """Return what the manifest of a folder says.

    Raises
    ------
    DataError
        There is none, or it is damaged.
    """
    try:
        text = folder.read(NAME)
    except FileNotFoundError:
        raise DataError(
            f"{folder.path} is no prepared dataset: there is no {NAME} in it; pyhvd.spark.prepare writes one"
        ) from None
    return decode(text, folder.at(NAME))
