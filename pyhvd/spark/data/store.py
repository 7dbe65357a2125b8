"""Where a training job keeps its data, checkpoints and logs: one folder, with the same layout everywhere."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from pyhvd.spark.data import manifest
from pyhvd.spark.data.folder import Folder
from pyhvd.spark.errors import DataError

_RUN_ID = re.compile(r"[A-Za-z0-9][\w.=-]*")


class Store:
    """Data, checkpoints and logs of training jobs, below one folder; :meth:`create` makes one.

    Paths are Horovod's: ``intermediate_train_data``, ``intermediate_val_data``, ``runs/<run
    id>/checkpoint`` and ``runs/<run id>/logs``. A store can be pickled, so that ranks use it too.

    Attributes
    ----------
    path : str
        The folder: absolute, or a URL.
    storage_options : dict
        What its file system takes: the argument of the same name of `prepare` and `shard`.
    """

    def __init__(
        self, path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
    ) -> None:
        self._folder = Folder(path, storage_options)
        self.path = self._folder.path
        self.storage_options = dict(storage_options or {})

    @classmethod
    def create(
        cls, path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
    ) -> Store:
        """Return the store of this folder; nothing is read or written yet.

        Parameters
        ----------
        path : str or path
            A local path, or any URL that fsspec knows: ``hdfs://name:8020/x``, ``s3://bucket/x``,
            ``dbfs:/x``,
            ... Driver and executors must all reach it.
        storage_options : mapping, optional
            What the file system takes, e.g. keys. It travels to the executors, and is never shown.

        Raises
        ------
        DataError
            The path is empty.

        Examples
        --------
        >>> import pyhvd.spark
        >>> store = pyhvd.spark.Store.create("/tmp/digits")
        >>> store.get_checkpoint_path("first")
        '/tmp/digits/runs/first/checkpoint'
        """
        return cls(path, storage_options)

    def __repr__(self) -> str:
        return f"Store.create({self.path!r})"

    def get_train_data_path(self, idx: int | None = None) -> str:
        """Return the folder of the data to train on; of one of several data sets with `idx`."""
        return self._folder.at(_numbered("intermediate_train_data", idx))

    def get_val_data_path(self, idx: int | None = None) -> str:
        """Return the folder of the data to validate with."""
        return self._folder.at(_numbered("intermediate_val_data", idx))

    def get_test_data_path(self, idx: int | None = None) -> str:
        """Return the folder of the data to test with."""
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
        return f"{self.get_run_path(run_id)}/checkpoint"

    def get_logs_path(self, run_id: str) -> str:
        """Return the folder of a run's logs."""
        return f"{self.get_run_path(run_id)}/logs"

    def get_checkpoints(self, run_id: str, suffix: str = "") -> list[str]:
        """Return the paths of a run's checkpoints whose names end so, in the order of their names."""
        folder = self.get_checkpoint_path(run_id)
        return [f"{folder}/{name}" for name in self.names(folder) if name.endswith(suffix)]

    def is_parquet_dataset(self, path: str) -> bool:
        """Return whether there is a dataset that :func:`pyhvd.spark.prepare` has written to its end."""
        return self.exists(f"{path}/{manifest.NAME}")

    def get_parquet_dataset(self, path: str) -> manifest.Dataset:
        """Return columns and row counts of a prepared dataset.

        Raises
        ------
        DataError
            There is none.
        """
        return manifest.load(Folder(path, self.storage_options))

    def exists(self, path: str) -> bool:
        """Return whether there is such a file or folder of the store."""
        return self._folder.exists(self._within(path))

    def names(self, path: str) -> list[str]:
        """Return the names of what lies in a folder of the store, in order; none if it is not there."""
        return self._folder.names(self._within(path))

    def read(self, path: str) -> bytes:
        """Return what is in a file of the store.

        Raises
        ------
        FileNotFoundError
            There is none.
        """
        return self._folder.read(self._within(path))

    def write(self, path: str, data: bytes) -> None:
        """Write a file of the store, as a whole: who reads it meanwhile sees the old one or the new one."""
        self._folder.write(self._within(path), data)

    def write_text(self, path: str, text: str) -> None:
        """Write a file of the store, in UTF-8."""
        self.write(path, text.encode())

    def remove(self, path: str) -> None:
        """Remove a file of the store, or a folder with all that is in it; nothing if it is not there."""
        self._folder.remove(self._within(path))

    def _within(self, path: str) -> str:
        """Return the part of a path that lies below the store's folder."""
        inside = path.removeprefix(self.path).lstrip("/") if path.startswith(self.path + "/") else ""
        if not inside or ".." in inside.split("/"):
            raise DataError(f"{path!r} is not below the store's folder {self.path}")
        return inside


def _numbered(name: str, idx: int | None) -> str:
    return name if idx is None else f"{name}.{idx}"
