"""A folder on a local disk, or on any file system of fsspec: HDFS, S3, Google Storage, Azure, ...

Decides how paths are written. Knows nothing about the files' content.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import uuid
from collections.abc import Mapping
from typing import Any

from pyhvd.common.urls import fsspec_url
from pyhvd.spark.errors import DataError, needed


class Folder:
    """The files of one folder, by names relative to it. Pickling omits the connection.

    `options` are those of fsspec's file system, such as keys and endpoints. No text shows them. The attribute
    `path` is valid in every process: see :func:`pyhvd.common.urls.fsspec_url`.

    Raises
    ------
    DataError
        The path is empty.
    """

    def __init__(self, path: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> None:
        text = os.fspath(path)
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"path={text!r}: expected a folder, as a path or a URL")
        self.path = fsspec_url(text)
        self._options = dict(options or {})
        self._found: tuple[Any, str] | None = None

    def __repr__(self) -> str:
        return f"Folder({self.path!r})"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_found": None}

    def at(self, name: str) -> str:
        """Return the path of a file, for messages; the folder's own path for ``""``."""
        return posixpath.join(self.path, name) if name else self.path

    def local(self, name: str) -> str | None:
        """Return the file's path on a local disk; None if the folder is not local."""
        return self.at(name) if os.path.isabs(self.path) else None

    def open(self, name: str, mode: str = "rb") -> Any:
        """Open a file; create its parent folders for writing."""
        fs, path = self._resolve(name)
        if "r" not in mode:
            fs.makedirs(posixpath.dirname(path), exist_ok=True)
        return fs.open(path, mode)

    def read(self, name: str) -> bytes:
        """Return the content of a file.

        Raises
        ------
        FileNotFoundError
            The file does not exist.
        """
        fs, path = self._resolve(name)
        return bytes(fs.cat_file(path))

    def write(self, name: str, data: bytes) -> None:
        """Write a file atomically: readers see either the old content or the new.

        The data goes into a temporary file, which is then moved; object stores such as S3 copy it. WebHDFS
        and Databricks' API do not replace a file by a move: there the file is missing for a moment.
        """
        fs, path = self._resolve(name)
        fs.makedirs(posixpath.dirname(path), exist_ok=True)
        local = self.local(name)
        other = posixpath.join(posixpath.dirname(path), f".{posixpath.basename(path)}-{uuid.uuid4().hex}")
        try:
            fs.pipe_file(other, data)
            if local is not None:
                with open(other, "rb") as file:
                    os.fsync(file.fileno())
                os.replace(other, local)
            else:
                if _refuses_to_replace(fs) and fs.exists(path):
                    fs.rm_file(path)
                fs.mv(other, path)
        except BaseException:
            with contextlib.suppress(Exception):  # the error above is the cause
                fs.rm_file(other)
            raise

    def exists(self, name: str = "") -> bool:
        """Return whether a file or folder exists."""
        fs, path = self._resolve(name)
        return bool(fs.exists(path))

    def names(self, below: str = "") -> list[str]:
        """Return the sorted names in the folder, or in its subfolder `below`; none if it does not exist."""
        return sorted(name for name, _ in self._list(below))

    def sizes(self) -> dict[str, int]:
        """Return the sizes in bytes of the files in the folder; none if it does not exist."""
        return {name: entry["size"] for name, entry in self._list("") if entry["type"] == "file"}

    def remove(self, name: str) -> None:
        """Remove a file, or a folder and its content, if it exists."""
        fs, path = self._resolve(name)
        with contextlib.suppress(FileNotFoundError):
            fs.rm(path, recursive=True)

    def _list(self, below: str) -> list[tuple[str, dict[str, Any]]]:
        fs, path = self._resolve(below)
        fs.invalidate_cache(path)  # other processes write too
        try:
            entries = fs.ls(path, detail=True)
        except FileNotFoundError:
            return []
        # Object stores also list the marker of an empty folder.
        named = [(posixpath.basename(str(entry["name"]).rstrip("/")), entry) for entry in entries]
        return [(name, entry) for name, entry in named if str(entry["name"]).rstrip("/") != path]

    def _resolve(self, name: str) -> tuple[Any, str]:
        if self._found is None:
            self._found = self._connect()
        fs, root = self._found
        return fs, posixpath.join(root, name) if name else root

    def _connect(self) -> tuple[Any, str]:
        try:
            fs, root = needed("fsspec.core").url_to_fs(self.path, **self._options)
        except (ValueError, ImportError) as exc:
            raise DataError(f"{self.path}: {exc}") from None
        return fs, str(root).rstrip("/") or "/"


def _refuses_to_replace(fs: Any) -> bool:
    """Return whether a move does not replace a file on this file system; WebHDFS raises no error then."""
    protocols = (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol
    return not {"webhdfs", "dbfs"}.isdisjoint(protocols)
