"""The elastic store: a folder for fsspec, outside of the hosts, with the last two commits of an elastic job.

A commit is two files. ``pyhvd-<job>-<generation>-<number>-<random>.data`` has the bytes that
:func:`pyhvd.job.commits.vault.pack` wrote. A file of the same name with ``.json`` is the manifest; it is
written last.

Invariants
----------
1. A commit is valid only if its manifest has the job's signature, and its data has the manifest's size and
   digest. So no torn file is used, and no file that another program has written. What cannot be read is not
   valid either: an older commit counts then.
2. No file is written twice: each write takes a new random name.
3. Commits are ordered by generation, then by number. A write removes only commits that are older than the two
   newest, or, where there is no room for a third, than the newest valid one. So an agent that the job has
   given up cannot remove the commits of its successor.
4. Files of other jobs are neither read nor removed.

The store does not unpickle: only ranks do.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from pyhvd.common.text import describe_import_error
from pyhvd.common.urls import fsspec_url
from pyhvd.job.commits.vault import Seal
from pyhvd.job.messages import StoreOrder

EXTRA = "store"
_KEPT = 2
_DATA, _MANIFEST = ".data", ".json"
_LONGEST_MANIFEST = 4096


class StoreError(RuntimeError):
    """The store cannot be read or written, or no commit in it is valid."""


class _UnusableFileError(Exception):
    """What is wrong with a file of the store, as the rest of a sentence that begins with its name."""


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
    except ImportError as exc:
        raise StoreError(f"--elastic-store needs {describe_import_error(exc, 'fsspec', EXTRA)}") from None
    with _as_store_error(url, "cannot be opened"):
        files, folder = url_to_fs(fsspec_url(url))
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
        files = {path + _DATA: data, path + _MANIFEST: msgspec.json.encode(manifest)}
        with _as_store_error(self._order.url, f"commit {seal.number} cannot be stored"):
            self._files.makedirs(self._folder, exist_ok=True)
            try:
                self._put(files)
            except OSError as exc:
                if exc.errno not in (errno.ENOSPC, errno.EDQUOT) or not self._make_room():
                    raise
                self._put(files)
        with contextlib.suppress(Exception):  # old commits only take room: the next write tries again
            found, _ = self._manifests()
            if len(found) >= _KEPT:
                self._remove_older([path for _, path, _ in found[:_KEPT]])

    def newest(self) -> Seal | None:
        """Return the newest commit with a valid manifest, None if there is none; do not check its data."""
        with _as_store_error(self._order.url, "cannot be read"):
            found, problems = self._manifests()
        if problems and not found:
            raise self._no_commit(problems)
        return found[0][0] if found else None

    def read(self) -> tuple[Seal, bytes] | None:
        """Return the newest valid commit; None if the job has stored none.

        Raises
        ------
        StoreError
            The store cannot be read, or none of its commits is valid.
        """
        with _as_store_error(self._order.url, "cannot be read"):
            found, problems = self._manifests()
        if (valid := self._first_valid(found, problems)) is not None:
            seal, data, _ = valid
            return seal, data
        if problems:
            raise self._no_commit(problems)
        return None

    def _first_valid(
        self, found: Iterable[tuple[Seal, str, str]], problems: list[str]
    ) -> tuple[Seal, bytes, str] | None:
        """Return the first commit whose data is as its manifest says, and its path; add what others lack."""
        for seal, path, digest in found:
            try:
                data = self._fetch(path + _DATA, seal.size)
            except _UnusableFileError as exc:
                problems.append(f"{_name_of(path)}{_DATA} {exc}")
                continue
            if hashlib.sha256(data).hexdigest() == digest:
                return seal, data, path
            problems.append(f"{_name_of(path)}{_DATA} has another digest than its manifest")
        return None

    def _no_commit(self, problems: list[str]) -> StoreError:
        return StoreError(f"{self._order.url}: no commit is valid: {'; '.join(problems)}")

    def clear(self) -> None:
        """Remove all files of this job."""
        with _as_store_error(self._order.url, "cannot be cleared"):
            for path in self._list():
                self._files.rm_file(path)

    def _put(self, files: Mapping[str, bytes]) -> None:
        """Write files; if one cannot be written, remove what there is of them."""
        try:
            for path, data in files.items():
                self._files.pipe_file(path, data)
        except Exception:
            self._remove(reversed(list(files)))
            raise

    def _fetch(self, path: str, size: int | None = None) -> bytes:
        """Return the bytes of a file, which must have this size, or be as short as a manifest."""
        try:
            found = self._files.info(path)
            if found["type"] != "file":
                raise _UnusableFileError("is no file")
            self._check_size(found["size"], size)
            data: bytes = self._files.cat_file(path)
        except FileNotFoundError:
            raise _UnusableFileError("is missing") from None
        except _UnusableFileError:
            raise
        except Exception as exc:
            raise _UnusableFileError(f"cannot be read: {type(exc).__name__}: {exc}") from exc
        self._check_size(len(data), size)
        return data

    def _check_size(self, found: int | None, size: int | None) -> None:
        if found is None:  # some file systems do not say it
            return
        if size is not None and found != size:
            raise _UnusableFileError(f"has {found} bytes instead of {size}")
        if size is None and found > _LONGEST_MANIFEST:
            raise _UnusableFileError(f"has {found} bytes, more than a manifest")

    def _manifests(self) -> tuple[list[tuple[Seal, str, str]], list[str]]:
        """Return the job's commits with valid manifests, their paths and digests, the newest first.

        Also return what is wrong with the manifests that cannot be read. A torn one, or one with another
        signature, belongs to no commit.
        """
        found, problems = [], []
        for path in self._list():
            if not path.endswith(_MANIFEST):
                continue
            try:
                manifest = msgspec.json.decode(self._fetch(path), type=_Manifest)
            except msgspec.MsgspecError:
                continue
            except _UnusableFileError as exc:
                problems.append(f"{_name_of(path)} {exc}")
                continue
            seal = Seal(manifest.number, manifest.generation, manifest.size)
            if hmac.compare_digest(manifest.signature, self._sign(seal, manifest.digest)):
                found.append((seal, path.removesuffix(_MANIFEST), manifest.digest))
        return sorted(found, key=lambda each: (each[0].mark, each[1]), reverse=True), problems

    def _list(self) -> list[str]:
        self._files.invalidate_cache()
        try:
            paths = self._files.ls(self._folder, detail=False)
        except FileNotFoundError:
            return []
        return [path for path in paths if self._pattern.fullmatch(_name_of(path))]

    def _make_room(self) -> bool:
        """Remove what is older than the newest valid commit, of a store that is full; return as below."""
        valid = self._first_valid(self._manifests()[0], [])
        return valid is not None and self._remove_older([valid[2]])

    def _remove_older(self, kept: Sequence[str]) -> bool:
        """Remove all files that are older than these commits, also those of killed writers.

        Manifests go first: if this process is killed, no manifest without data is left. Return whether any
        file was removed.
        """
        oldest = min(map(_order_of, kept))
        old = [
            each for each in self._list() if each.rsplit(".", 1)[0] not in kept and _order_of(each) <= oldest
        ]
        return self._remove(sorted(old, key=lambda each: each.endswith(_DATA)))

    def _remove(self, paths: Iterable[str]) -> bool:
        """Remove those of the files that can be removed; return whether there were any."""
        removed = False
        for path in paths:
            with contextlib.suppress(Exception):
                self._files.rm_file(path)
                removed = True
        return removed

    def _sign(self, seal: Seal, digest: str) -> str:
        text = f"{self._order.job} {seal.number} {seal.generation} {seal.size} {digest}"
        return hmac.new(self._order.key, text.encode(), "sha256").hexdigest()


def _name_of(path: str) -> str:
    return path.rsplit("/", 1)[-1]


def _order_of(path: str) -> tuple[int, int]:
    """Return the generation and the number in a file's name, by which commits are ordered."""
    generation, number = _name_of(path).split("-")[2:4]
    return int(generation), int(number)


@contextlib.contextmanager
def _as_store_error(url: str, failure: str) -> Iterator[None]:
    """Turn any error of a file system into StoreError: fsspec's file systems raise errors of many classes."""
    try:
        yield
    except Exception as exc:
        raise StoreError(f"{url}: {failure}: {type(exc).__name__}: {exc}") from exc
