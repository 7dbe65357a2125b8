"""Commits in a store: writers that are killed, files that are cut or changed, folders that are full or away."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fsspec")

from pyhvd.job.store import Store, StoreError
from pyhvd.job.vault import Seal


def write(store: Store, number: int, generation: int = 0) -> bytes:
    data = os.urandom(100 + number)
    store.write(Seal(number, generation, len(data)), data)
    return data


def names(folder: Path, end: str) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in folder.glob(f"*{end}"))


@pytest.mark.parametrize("form", ["{}", "file://{}", "{}/", "local://{}"])
def test_the_newest_commit_is_read_and_two_are_kept(tmp_path: Path, form: str) -> None:
    folder = tmp_path / "a" / "store"
    url = form.format(folder)
    store = Store(url)
    assert store.read() is None
    for number in (9, 10, 11):
        data = write(store, number, generation=2)
        assert Store(url).read() == (Seal(number, 2, len(data)), data)
    assert names(folder, ".data") == names(folder, ".json") == [10, 11]


def test_a_new_writer_keeps_the_newest_of_the_one_before(tmp_path: Path) -> None:
    for number in range(1, 4):
        write(Store(str(tmp_path)), number)
    assert names(tmp_path, ".json") == [2, 3]


def test_a_store_in_memory() -> None:
    store = Store("memory://pyhvd-test-store")
    data = write(store, 3)
    assert store.read() == (Seal(3, 0, len(data)), data)


@pytest.mark.parametrize("end", [".data", ".json"])
def test_a_writer_that_is_killed_in_a_write(tmp_path: Path, end: str) -> None:
    """It leaves a part of the data, or of the manifest; the next writer removes both."""
    data = write(Store(str(tmp_path)), 1)
    store = Store(str(tmp_path))
    write_file = store._files.pipe_file

    def write_a_part(path: str, content: bytes) -> None:
        write_file(path, content[: len(content) // 2] if path.endswith(end) else content)
        if path.endswith(end):
            raise KeyboardInterrupt

    store._files.pipe_file = write_a_part
    try:
        with pytest.raises(KeyboardInterrupt):
            write(store, 2)
    finally:
        del store._files.pipe_file
    assert len(list(tmp_path.iterdir())) == (3 if end == ".data" else 4)
    assert Store(str(tmp_path)).read() == (Seal(1, 0, len(data)), data)
    write(Store(str(tmp_path)), 3)
    assert names(tmp_path, ".data") == names(tmp_path, ".json") == [1, 3]


def cut(path: Path) -> str:
    path.write_bytes(path.read_bytes()[:-1])
    return "has 101 bytes instead of 102"


def change(path: Path) -> str:
    data = bytearray(path.read_bytes())
    data[50] ^= 1
    path.write_bytes(data)
    return "has another digest than its manifest"


def remove(path: Path) -> str:
    path.unlink()
    return "is missing"


@pytest.mark.parametrize("damage", [cut, change, remove])
def test_what_is_not_whole_is_not_read(tmp_path: Path, damage: Any) -> None:
    store = Store(str(tmp_path))
    older = write(store, 1)
    write(store, 2)
    (newest,) = tmp_path.glob("commit-2-*.data")
    why = damage(newest)
    assert store.read() == (Seal(1, 0, len(older)), older)
    for path in tmp_path.glob("commit-1-*"):
        path.unlink()
    with pytest.raises(StoreError) as caught:
        store.read()
    assert str(caught.value) == (
        f"{tmp_path}: no commit is whole: {newest.name} {why}; empty the folder to begin anew"
    )


def test_a_store_that_is_away(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = Store(f"{tmp_path}/file/store")
    with pytest.raises(StoreError, match="cannot be written to, commit 1 is not there: "):
        write(store, 1)
    with pytest.raises(StoreError, match="cannot be opened: "):
        Store("nosuch://folder")


def test_a_full_store_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(str(tmp_path))
    data = write(store, 1)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store._files, "pipe_file", refuse)
        with pytest.raises(StoreError, match="No space left on device"):
            write(store, 2)
    assert store.read() == (Seal(1, 0, len(data)), data)
    write(store, 3)
    assert names(tmp_path, ".json") == [1, 3]


def test_without_fsspec_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(StoreError) as caught:
        Store("folder")
    assert str(caught.value) == (
        '--elastic-store needs fsspec, which is not installed: pip install "pyhvd[store]"'
    )
