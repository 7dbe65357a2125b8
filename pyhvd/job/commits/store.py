"""The elastic store: a folder for fsspec, outside of the hosts, with the last two commits of an elastic job.

A commit is two files. ``pyhvd-<job>-<generation>-<number>-<random>.data`` has the bytes that
:func:`pyhvd.job.commits.vault.pack` wrote. A file of the same name with ``.json`` is the manifest; it is
written last.

Invariants
----------
1. A commit is valid only if its manifest has the job's signature, and its data has the manifest's size and
   digest. So no torn file is used, and no file that another program has written.
2. No file is written twice: each write takes a new random name.
3. Commits are ordered by generation, then by number. A write removes only commits that are older than the two
   newest. So an agent that the job has given up cannot remove the commits of its successor.
4. Files of other jobs are neither read nor removed.

The store does not unpickle: only ranks do.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import re
import secrets
from collections.abc import Iterator
from typing import Any

import msgspec

from pyhvd.job.commits.vault import Seal
from pyhvd.job.messages import StoreOrder

EXTRA = "store"
_KEPT = 2
_DATA, _MANIFEST = ".data", ".json"


class StoreError(RuntimeError):
    """The store cannot be read or written, or no commit in it is valid."""


class _Manifest(msgspec.Struct, frozen=True):
    """Describes a stored commit: `digest` is the SHA-256 of its data, `signature` covers all other fields."""

    number: int
    generation: int
    size: int
    digest: str
    signature: str


def open_folder(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the folder's path in that file system.

    Raises
    ------
    StoreError
        fsspec is not installed, or cannot open the URL.
    """
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise StoreError(
            f'--elastic-store needs fsspec, which is not installed here: pip install "pyhvd[{EXTRA}]"'
        ) from None
    with _as_store_error(url, "cannot be opened"):
        files, folder = url_to_fs(url)
    return files, str(folder).rstrip("/")


class CommitStore:
    """The commits of one job in a folder; the first write makes the folder.

    Parameters
    ----------
    order : StoreOrder
        The folder, the job and the job's key.

    Raises
    ------
    StoreError
        See :func:`open_folder`.
    """

    def __init__(self, order: StoreOrder) -> None:
        self._order = order
        self._pattern = re.compile(
            rf"pyhvd-{order.job}-(\d+)-(\d+)-[0-9a-f]+({re.escape(_DATA)}|{re.escape(_MANIFEST)})"
        )
        self._files, self._folder = open_folder(order.url)

    def write(self, seal: Seal, data: bytes) -> None:
        """Add a commit, and remove older ones; raise StoreError if the commit could not be written."""
        name = f"pyhvd-{self._order.job}-{seal.generation}-{seal.number}-{secrets.token_hex(4)}"
        path = f"{self._folder}/{name}"
        digest = hashlib.sha256(data).hexdigest()
        signature = self._sign(seal, digest)
        manifest = _Manifest(seal.number, seal.generation, seal.size, digest, signature)
        with _as_store_error(self._order.url, f"commit {seal.number} cannot be stored"):
            self._files.makedirs(self._folder, exist_ok=True)
            self._files.pipe_file(path + _DATA, data)
            self._files.pipe_file(path + _MANIFEST, msgspec.json.encode(manifest))
        with contextlib.suppress(Exception):  # old commits only take room: the next write tries again
            self._remove_old()

    def newest(self) -> Seal | None:
        """Return the newest commit with a valid manifest, None if there is none; do not check its data."""
        with _as_store_error(self._order.url, "cannot be read"):
            return next((seal for seal, _, _ in self._manifests()), None)

    def read(self) -> tuple[Seal, bytes] | None:
        """Return the newest valid commit; None if the job has stored none.

        Raises
        ------
        StoreError
            The store cannot be read, or none of its commits is valid.
        """
        problems = []
        with _as_store_error(self._order.url, "cannot be read"):
            for seal, path, digest in self._manifests():
                name = path.rsplit("/", 1)[-1] + _DATA
                try:
                    data = self._files.cat_file(path + _DATA)
                except FileNotFoundError:
                    problems.append(f"{name} is missing")
                    continue
                if len(data) != seal.size:
                    problems.append(f"{name} has {len(data)} bytes instead of {seal.size}")
                elif hashlib.sha256(data).hexdigest() != digest:
                    problems.append(f"{name} has another digest than its manifest")
                else:
                    return seal, data
        if problems:
            raise StoreError(f"{self._order.url}: no commit is valid: {'; '.join(problems)}")
        return None

    def clear(self) -> None:
        """Remove all files of this job."""
        with _as_store_error(self._order.url, "cannot be cleared"):
            for path in self._list():
                self._files.rm_file(path)

    def _manifests(self) -> list[tuple[Seal, str, str]]:
        """Return the job's commits with valid manifests, their paths and their digests; the newest first."""
        found = []
        for path in self._list():
            if not path.endswith(_MANIFEST):
                continue
            with contextlib.suppress(msgspec.MsgspecError, FileNotFoundError):  # torn, or removed meanwhile
                manifest = msgspec.json.decode(self._files.cat_file(path), type=_Manifest)
                seal = Seal(manifest.number, manifest.generation, manifest.size)
                if hmac.compare_digest(manifest.signature, self._sign(seal, manifest.digest)):
                    found.append((seal, path.removesuffix(_MANIFEST), manifest.digest))
        return sorted(found, key=lambda each: (each[0].mark, each[1]), reverse=True)

    def _list(self) -> list[str]:
        self._files.invalidate_cache()
        try:
            paths = self._files.ls(self._folder, detail=False)
        except FileNotFoundError:
            return []
        return [path for path in paths if self._pattern.fullmatch(path.rsplit("/", 1)[-1])]

    def _remove_old(self) -> None:
        """Remove all files that are older than the two newest commits, also those of killed writers.

        Manifests go first: if this process is killed, no manifest without data is left.
        """
        kept = [path for _, path, _ in self._manifests()[:_KEPT]]
        if len(kept) < _KEPT:
            return
        oldest = min(map(_order_of, kept))
        for path in sorted(self._list(), key=lambda each: each.endswith(_DATA)):
            if path.rsplit(".", 1)[0] not in kept and _order_of(path) <= oldest:
                self._files.rm_file(path)

    def _sign(self, seal: Seal, digest: str) -> str:
        text = f"{self._order.job} {seal.number} {seal.generation} {seal.size} {digest}"
        return hmac.new(self._order.key, text.encode(), "sha256").hexdigest()


def _order_of(path: str) -> tuple[int, int]:
    """Return the generation and the number in a file's name, by which commits are ordered."""
    generation, number = path.rsplit("/", 1)[-1].split("-")[2:4]
    return int(generation), int(number)


@contextlib.contextmanager
def _as_store_error(url: str, failure: str) -> Iterator[None]:
    """Turn any error of a file system into StoreError: fsspec's file systems raise errors of many classes."""
    try:
        yield
    except Exception as exc:
        raise StoreError(f"{url}: {failure}: {type(exc).__name__}: {exc}") from exc
