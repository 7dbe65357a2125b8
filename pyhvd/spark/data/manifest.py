"""The description of a prepared dataset: the JSON file beside its Parquet files.

The JSON file is written last, and lists the dataset's files; files of failed or repeated tasks are not in the
list. This module owns the format, and imports neither Spark nor Arrow.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pyhvd.spark.data.folder import Folder
from pyhvd.spark.errors import DataError, require_columns

NAME = "_pyhvd_metadata.json"
"""The JSON file's name. Spark ignores names that begin with an underscore."""

VERSION = 1
"""The newest version of the format that this pyhvd reads, and the one that it writes."""


class Column(msgspec.Struct, frozen=True):
    """A column of the batches.

    Attributes
    ----------
    name : str
        Its name in the DataFrame.
    dtype : str
        numpy's name of its dtype: ``"float32"``, ``"datetime64[us]"``; ``"object"`` for str and bytes.
    shape : tuple of int
        The shape of one row's value: ``()`` for one number, ``(64,)`` for a vector or list of 64 numbers.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] = ()


class DataFile(msgspec.Struct, frozen=True):
    """One Parquet file of the dataset's folder, and the number of rows of each of its row groups."""

    name: str
    groups: tuple[int, ...]

    @property
    def rows(self) -> int:
        """The number of rows in the file."""
        return sum(self.groups)


class Dataset(msgspec.Struct, frozen=True):
    """A prepared dataset: its columns and its files.

    Attributes
    ----------
    columns : tuple of Column
        In the order of the DataFrame.
    parts : tuple of DataFile
        The files, in the order of their rows.
    version : int
        The version of the format.
    """

    columns: tuple[Column, ...]
    parts: tuple[DataFile, ...]
    version: int = VERSION

    @property
    def rows(self) -> int:
        """The number of rows in all files."""
        return sum(part.rows for part in self.parts)

    def choose(self, names: Sequence[str] | None) -> tuple[Column, ...]:
        """Return the columns with these names, in the order of `names`; all columns for None.

        Raises
        ------
        DataError
            The dataset has no column of a name; the text lists its columns.
        """
        if names is None:
            return self.columns
        known = {column.name: column for column in self.columns}
        require_columns(names, known)
        return tuple(known[name] for name in names)


def encode(dataset: Dataset) -> bytes:
    """Return the dataset as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(dataset), indent=1) + b"\n"


def decode(text: bytes, where: str) -> Dataset:
    """Return the dataset that `text` describes.

    Raises
    ------
    DataError
        The text describes no dataset, or has a later version; the error names `where`, the file's path.
    """
    try:
        dataset = msgspec.json.decode(text, type=Dataset)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise DataError(f"{where} is damaged ({exc}): prepare the data again") from None
    if dataset.version > VERSION:
        raise DataError(
            f"{where} was written by a newer pyhvd (format {dataset.version}; this one reads {VERSION}):"
            " install that pyhvd here, or prepare the data again"
        )
    if (
        any(count <= 0 for part in dataset.parts for count in part.groups)
        or any(size < 0 for column in dataset.columns for size in column.shape)
        or any("/" in part.name or part.name.startswith(".") for part in dataset.parts)
    ):
        raise DataError(f"{where} is damaged (an invalid count, shape or file name): prepare the data again")
    return dataset


def load(folder: Folder) -> Dataset:
    """Return the dataset of a folder.

    Raises
    ------
    DataError
        The folder has no dataset, or a damaged one, or one of a newer pyhvd.
    """
    try:
        text = folder.read(NAME)
    except FileNotFoundError:
        raise DataError(
            f"{folder.path} is no prepared dataset: there is no {NAME} in it; pyhvd.spark.prepare writes one"
        ) from None
    return decode(text, folder.at(NAME))
