"""Commits in a store: killed writers, files that are cut or changed, stores that are full or away."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

pytest.importorskip("fsspec")

from pyhvd.job.commits.store import CommitStore, StoreError, open_folder
from pyhvd.job.commits.vault import Seal
from pyhvd.job.messages import StoreOrder

KEY = b"secret" * 6


def make(url: object, job: str = "job1", key: bytes = KEY) -> CommitStore:
    return CommitStore(StoreOrder(str(url), job, key))


def write(store: CommitStore, number: int, generation: int = 0) -> bytes:
    data = os.urandom(100 + number)
    store.write(Seal(number, generation, len(data)), data)
    return data


def write_part(store: CommitStore, end: str, number: int, generation: int = 0) -> None:
    """Write a commit, and be killed when half a file is written."""
    write_file = store._files.pipe_file

    def write_a_part(path: str, content: bytes) -> None:
        write_file(path, content[: len(content) // 2] if path.endswith(end) else content)
        if path.endswith(end):
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store._files, "pipe_file", write_a_part)
        with pytest.raises(KeyboardInterrupt):
            write(store, number, generation)


def names(folder: Path, end: str) -> list[tuple[int, int]]:
    """Return the generations and the numbers of the files."""
    found = (path.name.split("-") for path in folder.glob(f"*{end}"))
    return sorted((int(words[2]), int(words[3])) for words in found)


@pytest.mark.parametrize("form", ["{}", "file://{}", "{}/", "local://{}"])
def test_the_newest_commit_is_read_and_two_are_kept(tmp_path: Path, form: str) -> None:
    folder = tmp_path / "a" / "store"
    url = form.format(folder)
    store = make(url)
    assert store.read() is None
    assert store.newest() is None
    for number in (9, 10, 11):
        data = write(store, number, generation=2)
        assert make(url).newest() == Seal(number, 2, len(data))
        assert make(url).read() == (Seal(number, 2, len(data)), data)
    assert names(folder, ".data") == names(folder, ".json") == [(2, 10), (2, 11)]
    store.clear()
    assert list(folder.iterdir()) == []


def test_a_store_in_memory() -> None:
    store = make("memory://pyhvd-test-store")
    data = write(store, 3)
    assert store.read() == (Seal(3, 0, len(data)), data)
    store.clear()
    assert store.read() is None


_WRITES = st.tuples(st.integers(0, 3), st.integers(1, 9), st.sampled_from(["", ".data", ".json"]))


@settings(max_examples=60, deadline=None)
@given(st.lists(_WRITES, max_size=12))
def test_any_order_of_writers(writes: list[tuple[int, int, str]]) -> None:
    """Writers of older generations may come late; others are killed while they write a file."""
    store = make("memory://pyhvd-orders")
    written = dict[tuple[int, int], list[bytes]]()
    try:
        for generation, number, killed_in in writes:
            if killed_in:
                before = store.read()
                write_part(store, killed_in, number, generation)
                assert store.read() == before
                continue
            data = write(store, number, generation)
            written.setdefault((generation, number), []).append(data)
            found = store.read()
            assert found is not None
            seal, data = found
            assert (seal.generation, seal.number) == max(written)
            assert data in written[max(written)]
            assert len(store._manifests()[0]) <= 2 + len(written[max(written)])
    finally:
        store.clear()


@pytest.mark.parametrize("end", [".data", ".json"])
def test_a_writer_that_is_killed_in_a_write(tmp_path: Path, end: str) -> None:
    """It leaves a part of the data, or of the manifest; later writers remove both."""
    data = write(make(tmp_path), 1)
    write_part(make(tmp_path), end, 2)
    assert len(list(tmp_path.iterdir())) == (3 if end == ".data" else 4)
    assert make(tmp_path).read() == (Seal(1, 0, len(data)), data)
    write(make(tmp_path), 3)
    write(make(tmp_path), 4)
    assert names(tmp_path, ".data") == names(tmp_path, ".json") == [(0, 3), (0, 4)]


def test_a_late_write_of_an_older_generation_counts_for_nothing(tmp_path: Path) -> None:
    """It has a greater number, but its host was given up: the others went on from an older commit."""
    new, old = make(tmp_path), make(tmp_path)
    write(new, 10, generation=4)
    data = write(new, 11, generation=4)
    write(old, 12, generation=3)
    assert new.read() == (Seal(11, 4, len(data)), data)
    assert names(tmp_path, ".data") == names(tmp_path, ".json") == [(4, 10), (4, 11)]


def test_another_job_in_the_same_folder(tmp_path: Path) -> None:
    """Files of a job with another name stay; one with the same name, but another key, is not believed."""
    write(make(tmp_path), 1)
    other = make(tmp_path, job="job2")
    assert other.read() is None
    for number in (1, 2, 3):
        write(other, number)
    assert len(names(tmp_path, ".json")) == 3
    other.clear()
    assert make(tmp_path).newest() is not None
    assert make(tmp_path, key=b"another").read() is None


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


def make_folder(path: Path) -> str:
    path.unlink()
    path.mkdir()
    return "is no file"


def make_pipe(path: Path) -> str:
    """Reading it would wait for a writer."""
    path.unlink()
    os.mkfifo(path)
    return "is no file"


def lengthen(path: Path) -> str:
    """A sparse file, which is larger than memory."""
    os.truncate(path, 1 << 42)
    return f"has {1 << 42} bytes" + (
        " instead of 102" if path.suffix == ".data" else ", more than a manifest"
    )


@pytest.mark.parametrize("damage", [cut, change, remove, make_folder, make_pipe, lengthen])
def test_what_is_not_whole_is_not_read(tmp_path: Path, damage: Callable[[Path], str]) -> None:
    store = make(tmp_path)
    older = write(store, 1)
    write(store, 2)
    (newest,) = tmp_path.glob("pyhvd-job1-0-2-*.data")
    why = damage(newest)
    assert store.read() == (Seal(1, 0, len(older)), older)
    for path in tmp_path.glob("pyhvd-job1-0-1-*"):
        path.unlink()
    with pytest.raises(StoreError) as caught:
        store.read()
    assert str(caught.value) == f"{tmp_path}: no commit is valid: {newest.name} {why}"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("damage", [make_folder, make_pipe, lengthen])
def test_a_manifest_that_cannot_be_read(tmp_path: Path, damage: Callable[[Path], str]) -> None:
    store = make(tmp_path)
    older = write(store, 1)
    write(store, 2)
    (newest,) = tmp_path.glob("pyhvd-job1-0-2-*.json")
    why = damage(newest)
    assert store.read() == (Seal(1, 0, len(older)), older)
    assert store.newest() == Seal(1, 0, len(older))
    write(store, 3)
    for path in tmp_path.glob("pyhvd-job1-0-[13]-*"):
        path.unlink()
    for look in (store.read, store.newest):  # not None, which means that nothing was stored
        with pytest.raises(StoreError) as caught:
            look()
        assert str(caught.value) == f"{tmp_path}: no commit is valid: {newest.name} {why}"


@pytest.mark.parametrize("end", [".data", ".json"])
def test_an_error_of_the_disk(tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make(tmp_path)
    older = write(store, 1)
    write(store, 2)
    read = store._files.cat_file

    def fail(path: str) -> bytes:
        if "-0-2-" in path and path.endswith(end):
            raise OSError(5, "Input/output error")
        return bytes(read(path))

    monkeypatch.setattr(store._files, "cat_file", fail)
    assert store.read() == (Seal(1, 0, len(older)), older)
    for path in tmp_path.glob("pyhvd-job1-0-1-*"):
        path.unlink()
    with pytest.raises(StoreError, match=rf"{end} cannot be read: OSError: \[Errno 5\] Input/output error$"):
        store.read()


def test_a_manifest_that_was_changed_is_not_believed(tmp_path: Path) -> None:
    write(make(tmp_path), 1)
    (manifest,) = tmp_path.glob("*.json")
    manifest.write_text(manifest.read_text().replace('"number":1', '"number":7'))
    assert make(tmp_path).read() is None


def test_a_scheme_without_a_host_is_no_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError, match="nosuch:/x: cannot be opened: ValueError: "):
        make("nosuch:/x")
    write(make(f"file:{tmp_path}/y"), 1)
    assert [path.name for path in tmp_path.iterdir()] == ["y"]


def test_a_store_that_is_away(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = make(f"{tmp_path}/file/store")
    with pytest.raises(StoreError, match="file/store: commit 1 cannot be stored: "):
        write(store, 1)
    with pytest.raises(StoreError, match="nosuch://folder: cannot be opened: ValueError: "):
        make("nosuch://folder")


def fail_to_write(store: CommitStore, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a commit into a store without room: nothing of it is written."""

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store._files, "pipe_file", refuse)
        with pytest.raises(StoreError, match="No space left on device"):
            write(store, number)


def test_a_full_store_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make(tmp_path)
    data = write(store, 1)
    fail_to_write(store, 2, monkeypatch)
    assert store.read() == (Seal(1, 0, len(data)), data)
    write(store, 3)
    assert names(tmp_path, ".json") == [(0, 1), (0, 3)]


def test_a_store_with_room_for_two_commits_drops_the_older(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(tmp_path)
    write_file = store._files.pipe_file

    def write_if_there_is_room(path: str, data: bytes) -> None:
        full = path.endswith(".data") and len(names(tmp_path, ".data")) == 2
        write_file(path, data[: len(data) // 2] if full else data)
        if full:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(store._files, "pipe_file", write_if_there_is_room)
    for number in (1, 2, 3, 4):
        data = write(store, number)
        assert store.read() == (Seal(number, 0, len(data)), data)
    assert names(tmp_path, ".data") == names(tmp_path, ".json") == [(0, 3), (0, 4)]


def test_a_full_store_does_not_drop_its_last_valid_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newer one has a valid manifest, but its data was damaged."""
    store = make(tmp_path)
    kept = write(store, 1)
    write(store, 2)
    (damaged,) = tmp_path.glob("*-2-*.data")
    change(damaged)
    fail_to_write(store, 3, monkeypatch)
    assert store.read() == (Seal(1, 0, len(kept)), kept)


@pytest.mark.parametrize("end", [".data", ".json"])
def test_a_failed_write_leaves_no_part(tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make(tmp_path)
    write_file = store._files.pipe_file

    def write_a_part(path: str, data: bytes) -> None:
        write_file(path, data[: len(data) // 2] if path.endswith(end) else data)
        if path.endswith(end):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(store._files, "pipe_file", write_a_part)
    with pytest.raises(StoreError, match=r"commit 1 cannot be stored: OSError: .*Input/output error"):
        write(store, 1)
    assert list(tmp_path.iterdir()) == []


def test_without_fsspec_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(StoreError) as caught:
        open_folder("folder")
    assert str(caught.value) == (
        '--elastic-store needs fsspec, which is not installed: pip install "pyhvd[store]"'
    )
