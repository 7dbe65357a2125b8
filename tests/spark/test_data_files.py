"""Datasets, folders and stores without a Spark session: Arrow, Parquet and fsspec alone."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow", reason="make test-spark installs it")
fsspec = pytest.importorskip("fsspec", reason="make test-spark installs it")

import pyhvd.spark  # noqa: E402
from pyhvd.spark.data import manifest  # noqa: E402
from pyhvd.spark.data.columns import describe, to_batch  # noqa: E402
from pyhvd.spark.data.folder import Folder  # noqa: E402
from pyhvd.spark.data.manifest import Dataset  # noqa: E402
from pyhvd.spark.data.partition import SpilledPieces, spill  # noqa: E402
from pyhvd.spark.data.write_partition import PART_NAME, PartWriter  # noqa: E402
from pyhvd.spark.errors import DataError, SparkError, needed  # noqa: E402


@pytest.fixture(params=["local", "url"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Folder]:
    """Yield a folder on disk, or one that only fsspec can reach."""
    if request.param == "local":
        yield Folder(tmp_path / "data")
        return
    place = Folder(f"memory://{tmp_path.name}/data")
    yield place
    place.remove("")


def write(folder: Folder, tables: list[Any], rows_per_group: int | None = None) -> Dataset:
    """Write each table to a file, as the tasks do, and the manifest."""
    parts, columns = [], None
    for number, table in enumerate(tables):
        written = PartWriter(folder, "0" * 12, rows_per_group, "snappy").write(
            number, table.to_batches(max_chunksize=7)
        )
        assert written.fault == ""
        assert written.part is not None
        assert PART_NAME.fullmatch(written.part.name)
        parts.append(written.part)
        columns = columns or written.columns
    assert columns is not None
    dataset = Dataset(columns, tuple(parts))
    folder.write(manifest.NAME, manifest.encode(dataset))
    return dataset


def table(begin: int, end: int) -> Any:
    rows = range(begin, end)
    return pa.table(
        {
            "row": pa.array(rows, pa.int64()),
            "pair": [[float(row), -float(row)] for row in rows],
            "image.grey": [[[row, 1], [2, 3], [4, 5]] for row in rows],
            "text": [str(row) for row in rows],
        }
    )


def test_shares_of_files(folder: Folder) -> None:
    dataset = write(folder, [table(0, 25), table(25, 60), table(60, 61)], rows_per_group=10)
    assert [part.groups for part in dataset.parts] == [(10, 10, 5), (10, 10, 10, 5), (1,)]
    assert [column.shape for column in dataset.columns] == [(), (2,), (3, 2), ()]
    seen = []
    for rank in range(4):
        data = pyhvd.spark.shard(folder.path, rank, 4, batch_size=6, seed=1)
        assert (data.rows, data.steps, data.total_rows) == (15, 3, 61)
        for batch in data.epoch(2):
            assert batch["pair"].dtype == np.float64
            assert np.array_equal(batch["pair"][:, 1], -batch["row"])
            assert np.array_equal(batch["image.grey"][:, 0, 0], batch["row"])
            assert batch["text"].tolist() == [str(row) for row in batch["row"]]
            seen += batch["row"].tolist()
    assert len(seen) == len(set(seen)) == 60
    one = pyhvd.spark.shard(folder.path, 3, 4, columns=["text", "row"], shuffle=False, equal_steps=False)
    assert list(one.columns) == ["text", "row"]
    (batch,) = one.epoch()
    assert list(batch) == ["text", "row"]
    assert batch["row"].tolist() == one.read()["row"].tolist() == list(range(45, 61))


def test_more_ranks_than_rows(folder: Folder) -> None:
    write(folder, [table(0, 2)])
    with pytest.raises(DataError, match=r"has 2 rows for 3 ranks: use fewer ranks, or equal_steps=False"):
        pyhvd.spark.shard(folder.path, 0, 3)
    data = [pyhvd.spark.shard(folder.path, rank, 3, equal_steps=False) for rank in range(3)]
    assert [[batch["row"].tolist() for batch in each.epoch()] for each in data] == [[], [[0]], [[1]]]
    assert data[0].read()["image.grey"].shape == (0, 3, 2)


def test_row_groups_by_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("pyhvd.spark.data.write_partition.GROUP_BYTES", 800)
    one = pa.table({"x": np.arange(1000.0)})
    dataset = write(Folder(tmp_path), [one])
    assert dataset.parts[0].groups == (100,) * 10


def test_a_partition_without_rows(folder: Folder) -> None:
    written = PartWriter(folder, "0" * 12, None, "snappy").write(3, table(0, 0).to_batches())
    assert (written.partition, written.part, written.fault) == (3, None, "")
    assert folder.names() == []


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([1, None, 3], r"column 'x' holds 1 nulls among 3 rows"),
        ([[1], [None], [2]], r"column 'x' holds 1 nulls among 3 rows or elements"),
        ([[1, 2], [3], [4, 5]], r"column 'x' has lists of 2 and of 1 elements.*pad them"),
        ([{"a": 1}], r"column 'x' is of type struct<a: int64>, which no array has"),
    ],
)
def test_what_no_array_holds(folder: Folder, values: list[Any], text: str) -> None:
    written = PartWriter(folder, "0" * 12, None, "snappy").write(0, pa.table({"x": values}).to_batches())
    assert written.part is None
    with pytest.raises(DataError, match=text):
        raise DataError(written.fault)
    assert folder.names() == []


def test_lists_of_other_lengths_in_a_later_group(folder: Folder) -> None:
    lists = pa.table({"x": [[1, 2]] * 4 + [[1, 2, 3]] * 4})
    written = PartWriter(folder, "0" * 12, 4, "snappy").write(0, lists.to_batches())
    assert written.fault == "column 'x' has rows of shape (2,) and of shape (3,): pad its lists"
    assert folder.names() == []


def test_a_write_that_fails_leaves_no_file(folder: Folder) -> None:
    def batches() -> Iterator[Any]:
        yield from table(0, 8).to_batches()
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        PartWriter(folder, "0" * 12, 4, "snappy").write(0, batches())
    assert folder.names() == []


def test_arrow_as_numpy() -> None:
    days = np.array(["2020-01-01", "2021-02-03"], "datetime64[D]")
    whole = pa.table(
        {
            "flag": [True, False],
            "half": pa.array(np.array([1, 2], np.float16)),
            "day": days,
            "moment": pa.array(days.astype("datetime64[us]")),
            "bytes": [b"a", b"bc"],
            "empty": pa.array([[], []], pa.list_(pa.int8())),
        }
    )
    found = {column.name: (column.dtype, column.shape) for column in describe(to_batch(whole))}
    assert found == {
        "flag": ("bool", ()),
        "half": ("float16", ()),
        "day": ("datetime64[D]", ()),
        "moment": ("datetime64[us]", ()),
        "bytes": ("object", ()),
        "empty": ("int8", (0,)),
    }
    sliced = pa.table({"x": [[1, 2], [3, 4], [5, 6]]}).slice(1)
    assert to_batch(sliced)["x"].tolist() == [[3, 4], [5, 6]]
    chunked = pa.chunked_array([[[1, 2]], [[3, 4]]])
    assert to_batch(pa.table({"x": chunked}))["x"].tolist() == [[1, 2], [3, 4]]


def test_no_dataset(folder: Folder) -> None:
    with pytest.raises(DataError, match=r"is no prepared dataset: there is no _pyhvd_metadata\.json"):
        pyhvd.spark.shard(folder.path, 0, 1)


def test_a_file_that_is_gone_or_damaged(folder: Folder) -> None:
    dataset = write(folder, [table(0, 4), table(4, 8)])
    names = [part.name for part in dataset.parts]
    data = pyhvd.spark.shard(folder.path, 0, 1, shuffle=False)
    folder.write(names[0], folder.read(names[0])[:-20])
    with pytest.raises(DataError, match=rf"row group 0 of \S+{names[0]} cannot be read \(.*prepare the data"):
        list(data.epoch())
    folder.write(names[0], folder.read(names[1])[:4])
    with pytest.raises(DataError, match="cannot be read"):
        list(data.epoch())
    write_other = PartWriter(folder, "1" * 12, None, "snappy").write(0, table(0, 3).to_batches())
    assert write_other.part is not None
    folder.write(names[0], folder.read(write_other.part.name))
    with pytest.raises(DataError, match="does not match the dataset's description"):
        list(pyhvd.spark.shard(folder.path, 0, 1, shuffle=False).epoch())
    folder.remove(names[0])
    with pytest.raises(DataError, match="cannot be read"):
        list(pyhvd.spark.shard(folder.path, 0, 1, shuffle=False).epoch())


def test_a_folder_in_other_processes(folder: Folder) -> None:
    folder.write("a/b", b"1")
    again = pickle.loads(pickle.dumps(folder))
    assert again.read("a/b") == b"1"
    again.write("a/b", b"2")
    assert folder.read("a/b") == b"2"
    assert folder.names() == ["a"]
    assert folder.names("a") == ["b"]
    assert folder.sizes() == {}
    folder.remove("a")
    folder.remove("a")
    assert folder.names() == folder.names("a") == []
    assert not folder.exists("a")


def test_secrets_are_not_shown() -> None:
    shown = repr(Folder("s3://bucket/x", {"secret": "hunter2"}))
    shown += repr(pyhvd.spark.Store.create("s3://bucket/x", storage_options={"secret": "hunter2"}))
    assert "hunter2" not in shown
    assert "s3://bucket/x" in shown


def test_a_write_that_fails_raises_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the file system is gone when the temporary file is to be removed."""
    from fsspec.implementations.memory import MemoryFileSystem

    def fails(error: str) -> Callable[..., None]:
        def call(*_: object, **__: object) -> None:
            raise OSError(error)

        return call

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", fails("no space"))
    monkeypatch.setattr(MemoryFileSystem, "exists", fails("gone"))
    with pytest.raises(OSError, match="no space"):
        Folder("memory://full").write("file", b"data")


def test_a_scheme_that_nobody_knows() -> None:
    with pytest.raises(DataError, match=r"nonesuch://x: Protocol not known"):
        Folder("nonesuch://x").names()


def test_a_name_node_in_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec's file system for Hadoop takes host and port from the URL; the rest is the path."""
    from fsspec.implementations.memory import MemoryFileSystem

    class Hadoop(MemoryFileSystem):  # type: ignore[misc]
        protocol = "hdfs"
        told: ClassVar[dict[str, Any]] = {}

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            Hadoop.told = options

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return "/" + path.removeprefix("hdfs://").partition("/")[2] if "://" in path else path

        @staticmethod
        def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
            host, _, port = path.removeprefix("hdfs://").partition("/")[0].partition(":")
            return {"host": host, "port": int(port)}

    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "hdfs", Hadoop)
    place = Folder("hdfs://name:8020/data/digits", {"user": "me"})
    write(place, [table(0, 4)])
    assert Hadoop.told == {"host": "name", "port": 8020, "user": "me"}
    assert Folder("memory://data/digits").exists(manifest.NAME)
    data = pyhvd.spark.shard("hdfs://name:8020/data/digits", 0, 1, storage_options={"user": "me"})
    assert data.read()["row"].tolist() == [0, 1, 2, 3]
    place.remove("")


def test_a_file_system_that_moves_no_file_onto_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec's WebHDFS ignores the answer "false" to a move onto an existing file."""
    from fsspec.implementations.memory import MemoryFileSystem

    class WebHdfs(MemoryFileSystem):  # type: ignore[misc]
        protocol = ("webhdfs", "webHDFS")

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return "/" + path.removeprefix("webhdfs://").partition("/")[2] if "://" in path else path

        def mv(self, path1: str, path2: str, **options: Any) -> None:
            if not self.exists(path2):
                super().mv(path1, path2, **options)

    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "webhdfs", WebHdfs)
    place = Folder("webhdfs://name:9870/runs")
    for data in (b"old", b"new"):
        place.write("checkpoint", data)
        assert (place.names(), place.read("checkpoint")) == (["checkpoint"], data)
    place.remove("")


def test_a_spilled_partition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path},/nonesuch")
    with spill(table(0, 20).to_batches(max_chunksize=7)) as file:
        assert os.readlink(f"/proc/self/fd/{file.fileno()}").startswith(str(tmp_path))
        assert os.listdir(tmp_path) == []
        source = SpilledPieces(file.fileno(), ["row", "pair"])
        assert source.lengths == [7, 7, 6]
        assert source.load(1)["row"].tolist() == list(range(7, 14))
        assert list(source.load(2)) == ["row", "pair"]
        with pytest.raises(DataError, match=r"no column 'x'; there are row, pair, image\.grey, text"):
            SpilledPieces(file.fileno(), ["x"]).load(0)
    with spill([]) as file:
        assert SpilledPieces(file.fileno(), None).lengths == []
    with spill(table(0, 0).to_batches()) as file:
        assert SpilledPieces(file.fileno(), None).lengths == []


def test_store(tmp_path: Path) -> None:
    store = pickle.loads(pickle.dumps(pyhvd.spark.Store.create(tmp_path / "store")))
    root = str(tmp_path / "store")
    assert store.get_train_data_path() == f"{root}/intermediate_train_data"
    assert store.get_val_data_path(2) == f"{root}/intermediate_val_data.2"
    assert store.get_test_data_path() == f"{root}/intermediate_test_data"
    assert store.get_logs_path("a-1") == f"{root}/runs/a-1/logs"
    first, second = (f"{store.get_checkpoint_path('a-1')}/{name}" for name in ("1.npz", "2.npz"))
    assert not store.exists(first)
    store.write(second, b"two")
    store.write(first, b"one")
    store.write_text(f"{store.get_checkpoint_path('a-1')}/note.txt", "größer")
    assert store.get_checkpoints("a-1", ".npz") == [first, second]
    assert store.read(second) == b"two"
    assert store.read(f"{store.get_checkpoint_path('a-1')}/note.txt").decode() == "größer"
    assert store.names(store.get_runs_path()) == ["a-1"]
    write(Folder(store.get_train_data_path()), [table(0, 5)])
    assert store.is_parquet_dataset(store.get_train_data_path())
    assert not store.is_parquet_dataset(store.get_val_data_path())
    assert store.get_parquet_dataset(store.get_train_data_path()).rows == 5
    store.remove(store.get_run_path("a-1"))
    assert store.get_checkpoints("a-1") == []


@pytest.mark.parametrize("path", ["/etc/passwd", "{root}/../x", "{root}", "{root}x/y"])
def test_a_store_keeps_to_its_folder(tmp_path: Path, path: str) -> None:
    store = pyhvd.spark.Store.create(tmp_path / "store")
    with pytest.raises(DataError, match="is not below the store's folder"):
        store.read(path.format(root=store.path))


@pytest.mark.parametrize("run_id", ["", "..", "a/b", "-x"])
def test_a_run_id_is_a_name(run_id: str) -> None:
    with pytest.raises(DataError, match="run_id="):
        pyhvd.spark.Store.create("/x").get_run_path(run_id)


def test_an_extra_that_is_not_installed() -> None:
    with pytest.raises(SparkError, match=r'nonesuch, which is not installed: pip install "pyhvd\[spark\]"'):
        needed("nonesuch.module")
