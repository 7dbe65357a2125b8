"""Commits of an elastic job outside of its hosts: two at most, in a folder that fsspec reaches.

A commit is two files: ``commit-<number>-<letters>.data``, the bytes of a slot as they lie
(:func:`pyhvd.job.vault.pack`), and a manifest, ``.json``, which is written last.

Invariants
----------
1. A commit counts only with a whole manifest, and if its data have the size and the digest that this names.
2. No file is written twice: each write has letters of its own.
3. A commit is removed only after two others have been written, or it and a newer one were there before.

Knows nothing of pickles: only ranks look into the bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from collections.abc import Iterator


import msgspec

from pyhvd.job.vault import Seal

_KEPT = 2
_DATA, _MANIFEST = ".data", ".json"


class StoreError(RuntimeError):
    """The store cannot be read or written, or no commit in it is whole."""


class Manifest(msgspec.Struct, frozen=True):
    """What a commit in the store must be; `digest` is the SHA-256 of its data."""

    number: int
    generation: int
    size: int
    digest: str
    format: int = 1


class Store:
    """A folder of commits, of one job at a time.

    Parameters
    ----------
    url : str
        The folder; it is made if it does not exist.

    Raises
    ------
    StoreError
        fsspec does not know such folders, or is not installed.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._own: list[str] = []  # the names to keep, without their ends; the newest is last
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise StoreError(
                '--elastic-store needs fsspec, which is not installed: pip install "pyhvd[store]"'
            ) from None
        with self._explained("cannot be opened"):
            self._files, self._folder = url_to_fs(url)

    def write(self, seal: Seal, data: bytes) -> None:
        """Add a commit, and remove older ones; raise StoreError if it is not there then."""
        name = f"commit-{seal.number}-{secrets.token_hex(4)}"
        digest = hashlib.sha256(data).hexdigest()
        manifest = Manifest(seal.number, seal.generation, seal.size, digest)
        with self._explained(f"cannot be written to, commit {seal.number} is not there"):
            if not self._own:
                self._own = [before for before, _ in self._manifests()[:1]]
            self._files.makedirs(self._folder, exist_ok=True)
            self._files.pipe_file(self._path(name + _DATA), data)
            self._files.pipe_file(self._path(name + _MANIFEST), msgspec.json.encode(manifest))
        self._own = [*self._own, name][-_KEPT:]
        with contextlib.suppress(Exception):  # they are only too many: the next write tries again
            self._remove_others()

    def read(self) -> tuple[Seal, bytes] | None:
        """Return the newest commit that is whole; None if none was ever written.

        Raises
        ------
        StoreError
            The store cannot be read, or has commits of which none is whole.
        """
        problems = []
        with self._explained("cannot be read"):
            for name, manifest in self._manifests():
                try:
                    data = self._files.cat_file(self._path(name + _DATA))
                except FileNotFoundError:
                    problems.append(f"{name}{_DATA} is missing")
                    continue
                if len(data) != manifest.size:
                    problems.append(f"{name}{_DATA} has {len(data)} bytes instead of {manifest.size}")
                elif hashlib.sha256(data).hexdigest() != manifest.digest:
                    problems.append(f"{name}{_DATA} has another digest than its manifest")
                else:
                    return Seal(manifest.number, manifest.generation, manifest.size), data
        if problems:
            raise StoreError(
                f"{self._url}: no commit is whole: {'; '.join(problems)}; empty the folder to begin anew"
            )
        return None

    def _manifests(self) -> list[tuple[str, Manifest]]:
        """Return the names of commits with whole manifests, the newest first."""
        found = []
        for path in self._list():
            if path.endswith(_MANIFEST):
                with contextlib.suppress(msgspec.MsgspecError, FileNotFoundError):  # its writer was killed
                    manifest = msgspec.json.decode(self._files.cat_file(path), type=Manifest)
                    if manifest.format == 1:
                        found.append((path.rsplit("/", 1)[-1].removesuffix(_MANIFEST), manifest))
        return sorted(found, key=lambda each: (each[1].number, each[1].generation), reverse=True)

    def _list(self) -> list[str]:
        self._files.invalidate_cache()
        try:
            paths = self._files.ls(self._folder, detail=False)
        except FileNotFoundError:
            return []
        return [path for path in paths if path.rsplit("/", 1)[-1].startswith("commit-")]

    def _remove_others(self) -> None:
        """Remove all commits but the newest two, and what killed writers have left; manifests go first."""
        paths = [path for path in self._list() if path.endswith((_DATA, _MANIFEST))]
        names = {path: path.rsplit("/", 1)[-1].rpartition(".")[0] for path in paths}
        for path in sorted(paths, key=lambda each: each.endswith(_DATA)):
            if names[path] not in self._own:
                self._files.rm_file(path)

    def _path(self, name: str) -> str:
        return f"{self._folder.rstrip('/')}/{name}"

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Turn any error of a file system, which may be of any class, into StoreError."""
        try:
            yield
        except StoreError:
            raise
        except Exception as exc:
            raise StoreError(f"{self._url} {what}: {type(exc).__name__}: {exc}") from exc


def is_installed() -> bool:
    """Return whether fsspec is installed here."""
    import importlib.util

    return importlib.util.find_spec("fsspec") is not None


