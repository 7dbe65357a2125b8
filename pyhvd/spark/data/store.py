"""The folder of a training job: paths of its data, checkpoints and logs, and access to its files."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from pyhvd.spark.data import manifest
from pyhvd.spark.data.folder import Folder
from pyhvd.spark.errors import DataError

_CHECKPOINTS, _LOGS = "checkpoint", "logs"
_ABSENT = {"get_local_output_dir_fn", "sync_fn", "to_remote"}
_IN_RANKS = "a store can be pickled, so ranks use it themselves: write() stores a file"
_RUN_ID = re.compile(r"[A-Za-z0-9][\w.=-]*")


class Store:
    """Data, checkpoints and logs of training jobs, in one folder; :meth:`create` returns one.

    Its paths are Horovod's: ``intermediate_train_data``, ``intermediate_val_data``,
    ``runs/<run id>/checkpoint`` and ``runs/<run id>/logs``. A store can be pickled, so that ranks use it too.

    Attributes
    ----------
    path : str
        The folder: absolute, or a URL.
    storage_options : dict
        Options of its file system, as for `prepare` and `shard`.
    """

    def __init__(
        self,
        prefix_path: str | os.PathLike[str],
        *places: object,
        storage_options: Mapping[str, Any] | None = None,
        **others: object,
    ) -> None:
        if places or others:  # Horovod's
            given = ", ".join([*map(repr, places), *(f"{name}={value!r}" for name, value in others.items())])
            raise TypeError(
                f"Store({str(prefix_path)!r}, {given}): expected no option but storage_options. A store has"
                " all its folders below prefix_path: make another store for other folders"
            )
        self._folder = Folder(prefix_path, storage_options)
        self.path = self._folder.path
        self.storage_options = dict(storage_options or {})

    @classmethod
    def create(
        cls,
        prefix_path: str | os.PathLike[str],
        *places: object,
        storage_options: Mapping[str, Any] | None = None,
        **others: object,
    ) -> Store:
        """Return the store of a folder, without reading or writing.

        Parameters
        ----------
        prefix_path : str or path
            A local path, or any URL that fsspec knows: ``hdfs://name:8020/x``, ``s3://bucket/x``,
            ``dbfs:/x``, ... Driver and executors must share it.
        storage_options : mapping, optional
            Options of the file system, e.g. keys. The executors get them; they are never shown.

        Raises
        ------
        DataError
            The path is empty.
        TypeError
            Another option of Horovod's was given, such as ``train_path``: a store has one folder.

        Examples
        --------
        >>> import pyhvd.spark
        >>> store = pyhvd.spark.Store.create("/tmp/digits")
        >>> store.get_checkpoint_path("first")
        '/tmp/digits/runs/first/checkpoint'
        """
        return cls(prefix_path, *places, storage_options=storage_options, **others)

    def __repr__(self) -> str:
        return f"Store.create({self.path!r})"

    def __getattr__(self, name: str) -> NoReturn:
        remedy = f": {_IN_RANKS}" if name in _ABSENT else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{remedy}")

    @property
    def prefix_path(self) -> str:
        """The folder, as ``path`` has it."""
        return self.path

    def saving_runs(self) -> bool:
        """Return whether runs are saved: always."""
        return True

    def get_checkpoint_filename(self) -> str:
        """Return the name of a run's folder of checkpoints."""
        return _CHECKPOINTS

    def get_logs_subdir(self) -> str:
        """Return the name of a run's folder of logs."""
        return _LOGS

    def get_train_data_path(self, idx: int | None = None) -> str:
        """Return the folder of the training data; `idx` numbers several."""
        return self._folder.at(_numbered("intermediate_train_data", idx))

    def get_val_data_path(self, idx: int | None = None) -> str:
        """Return the folder of the validation data; `idx` numbers several."""
        return self._folder.at(_numbered("intermediate_val_data", idx))

    def get_test_data_path(self, idx: int | None = None) -> str:
        """Return the folder of the test data; `idx` numbers several."""
        return self._folder.at(_numbered("intermediate_test_data", idx))

    def get_runs_path(self) -> str:
        """Return the folder of all runs."""
        return self._folder.at("runs")

    def get_run_path(self, run_id: str) -> str:
        """Return the folder of one run.

        Raises
        ------
        DataError
            `run_id` cannot be the name of a folder.
        """
        if not _RUN_ID.fullmatch(run_id):
            raise DataError(
                f"run_id={run_id!r}: expected letters, digits and '._=-', a letter or digit first"
            )
        return self._folder.at(f"runs/{run_id}")

    def get_checkpoint_path(self, run_id: str) -> str:
        """Return the folder of a run's checkpoints."""
        return f"{self.get_run_path(run_id)}/{_CHECKPOINTS}"

    def get_logs_path(self, run_id: str) -> str:
        """Return the folder of a run's logs."""
        return f"{self.get_run_path(run_id)}/{_LOGS}"

    def get_checkpoints(self, run_id: str, suffix: str = "") -> list[str]:
        """Return the sorted paths of a run's checkpoints whose names end with `suffix`."""
        folder = self.get_checkpoint_path(run_id)
        return [f"{folder}/{name}" for name in self.names(folder) if name.endswith(suffix)]

    def is_parquet_dataset(self, path: str) -> bool:
        """Return whether a path is a complete dataset of :func:`pyhvd.spark.prepare`."""
        return self.exists(f"{path}/{manifest.NAME}")

    def get_parquet_dataset(self, path: str) -> manifest.Dataset:
        """Return the description of a prepared dataset.

        Raises
        ------
        DataError
            There is no dataset, or it is damaged.
        """
        return manifest.load(Folder(path, self.storage_options))

    def exists(self, path: str) -> bool:
        """Return whether a file or folder of the store exists."""
        return self._folder.exists(self._within(path))

    def names(self, path: str) -> list[str]:
        """Return the sorted names in a folder of the store; none if it does not exist."""
        return self._folder.names(self._within(path))

    def read(self, path: str) -> bytes:
        """Return the content of a file of the store.

        Raises
        ------
        FileNotFoundError
            The file does not exist.
        """
        return self._folder.read(self._within(path))

    def write(self, path: str, data: bytes) -> None:
        """Write a file of the store atomically: readers see the old content or the new."""
        self._folder.write(self._within(path), data)

    def write_text(self, path: str, text: str) -> None:
        """Write a file of the store, in UTF-8."""
        self.write(path, text.encode())

    def remove(self, path: str) -> None:
        """Remove a file of the store, or a folder and its content, if it exists."""
        self._folder.remove(self._within(path))

    def _within(self, path: str) -> str:
        """Return a path relative to the store's folder."""
        inside = path.removeprefix(self.path).lstrip("/") if path.startswith(self.path + "/") else ""
        if not inside or ".." in inside.split("/"):
            raise DataError(f"{path!r} is not below the store's folder {self.path}")
        return inside


def _numbered(name: str, idx: int | None) -> str:
    return name if idx is None else f"{name}.{idx}"
