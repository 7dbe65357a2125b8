"""Commits of an elastic job outside of its hosts: two at most, in a folder that fsspec reaches.

A commit is two files: ``pyhvd-<job>-<generation>-<number>-<letters>.data``, the bytes of a slot as they lie
(:func:`pyhvd.job.commits.vault.pack`), and a manifest, ``.json``, which is written last.

Invariants
----------
1. A commit counts only if its manifest has the job's signature, and its data the size and the digest that
   the manifest names. So a torn file is never used, nor one that another has written.
2. No file is written twice: each write has letters of its own.
3. Commits are in the order of their generations, and then of their numbers. A write removes only commits that
   are older than two others: an agent that the job has given up cannot remove what its successor writes.
4. Files of other jobs are neither read nor removed.

Knows nothing of pickles: only ranks look into the bytes.
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
    """The store cannot be read or written, or no commit in it is whole."""


class _Manifest(msgspec.Struct, frozen=True):
    """What a stored commit is; `digest` is the SHA-256 of its data, `signature` covers all other fields."""

    number: int
    generation: int
    size: int
    digest: str
    signature: str


def open_folder(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a folder, and the folder's path there.

    Raises
    ------
    StoreError
        fsspec does not know such folders, or is not installed.
    """
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise StoreError(
            f'--elastic-store needs fsspec, which is not installed here: pip install "pyhvd[{EXTRA}]"'
        ) from None
    with _explained(url, "cannot be opened"):
        files, folder = url_to_fs(url)
    return files, str(folder).rstrip("/")


class CommitStore:
    """The commits of one job in a folder, which is made if it does not exist.

    Parameters
    ----------
    order : StoreOrder
        Where.

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
        """Add a commit, and remove older ones; raise StoreError if it is not there then."""
        path = self._path(f"pyhvd-{self._order.job}-{seal.generation}-{seal.number}-{secrets.token_hex(4)}")
        digest = hashlib.sha256(data).hexdigest()
        signature = self._sign(seal, digest)
        manifest = _Manifest(seal.number, seal.generation, seal.size, digest, signature)
        with self._explained(f"cannot be written to, commit {seal.number} is not there"):
            self._files.makedirs(self._folder, exist_ok=True)
            self._files.pipe_file(path + _DATA, data)
            self._files.pipe_file(path + _MANIFEST, msgspec.json.encode(manifest))
        with contextlib.suppress(Exception):  # they are only too many: the next write tries again
            self._remove_old()

    def newest(self) -> Seal | None:
        """Return the newest commit with a whole manifest, if there is one; its data are not looked at."""
        with self._explained("cannot be read"):
            return next((seal for seal, _, _ in self._manifests()), None)

    def read(self) -> tuple[Seal, bytes] | None:
        """Return the newest commit that is whole; None if the job has stored none.

        Raises
        ------
        StoreError
            The store cannot be read, or has commits of which none is whole.
        """
        problems = []
        with self._explained("cannot be read"):
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
            raise StoreError(f"{self._order.url}: no commit is whole: {'; '.join(problems)}")
        return None

    def clear(self) -> None:
        """Remove all files of this job."""
        with self._explained("cannot be cleared"):
            for path in self._list():
                self._files.rm_file(path)

    def _manifests(self) -> list[tuple[Seal, str, str]]:
        """Return the commits with whole manifests of this job, their paths and digests; the newest first."""
        found = []
        for path in self._list():
            if not path.endswith(_MANIFEST):
                continue
            with contextlib.suppress(msgspec.MsgspecError, FileNotFoundError):  # its writer was killed
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
        """Remove what is older than the newest two commits, also what killed writers have left.

        Manifests go first: no manifest without data is left if this process is killed.
        """
        kept = [path for _, path, _ in self._manifests()[:_KEPT]]
        if len(kept) < _KEPT:
            return
        oldest = min(map(self._age, kept))
        for path in sorted(self._list(), key=lambda each: each.endswith(_DATA)):
            if path.rsplit(".", 1)[0] not in kept and self._age(path) <= oldest:
                self._files.rm_file(path)

    def _age(self, path: str) -> tuple[int, int]:
        """Return the generation and the number in a file's name."""
        generation, number = path.rsplit("/", 1)[-1].split("-")[2:4]
        return int(generation), int(number)

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}"

    def _sign(self, seal: Seal, digest: str) -> str:
        text = f"{self._order.job} {seal.number} {seal.generation} {seal.size} {digest}"
        return hmac.new(self._order.key, text.encode(), "sha256").hexdigest()

    def _explained(self, what: str) -> contextlib.AbstractContextManager[None]:
        return _explained(self._order.url, what)


@contextlib.contextmanager
def _explained(url: str, what: str) -> Iterator[None]:
    """Turn any error of a file system, which may be of any class, into StoreError."""
    try:
        yield
    except StoreError:
        raise
    except Exception as exc:
        raise StoreError(f"{url} {what}: {type(exc).__name__}: {exc}") from exc
