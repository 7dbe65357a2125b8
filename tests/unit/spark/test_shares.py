"""The rows of each rank, the order of an epoch, and the description of a prepared dataset."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pyhvd.spark.data import manifest
from pyhvd.spark.data.folder import Folder
from pyhvd.spark.data.manifest import Column, DataFile, Dataset
from pyhvd.spark.data.shard import BatchPlan, Shard, shard
from pyhvd.spark.data.shares import MIXED, draw, pieces, read_order, share
from pyhvd.spark.errors import DataError

GROUPS = st.lists(st.integers(1, 30), max_size=20)


class Rows:
    """The rows of one rank's pieces: their numbers in the whole dataset."""

    def __init__(self, groups: list[int], rank: int, size: int) -> None:
        firsts = np.cumsum([0, *groups])
        begin, end = share(sum(groups), rank, size)
        self.rows = end - begin
        self.columns = [Column("row", "int64"), Column("pair", "int64", (2,))]
        self._pieces = pieces(groups, begin, end)
        self._first = [firsts[piece.group] for piece in self._pieces]
        self.lengths = [piece.rows for piece in self._pieces]
        self.loaded: list[int] = []

    def load(self, number: int) -> dict[str, np.ndarray]:
        self.loaded.append(number)
        piece = self._pieces[number]
        rows = self._first[number] + np.arange(piece.begin, piece.end)
        return {"row": rows, "pair": np.stack([rows, -rows], axis=1)}

    def shard(self, rank: int, total: int, rows: int, batch_size: int, shuffle: bool, **more: bool) -> Shard:
        plan = BatchPlan(batch_size, shuffle, 3, more.get("cache", False))
        return Shard(self, self.columns, rank=rank, total_rows=total, rows=rows, plan=plan)


@given(GROUPS, st.integers(1, 9))
def test_every_row_is_one_ranks(groups: list[int], size: int) -> None:
    shares = [Rows(groups, rank, size) for rank in range(size)]
    assert max(share.rows for share in shares) - min(share.rows for share in shares) <= 1
    rows = [row for s in shares for n in range(len(s.lengths)) for row in s.load(n)["row"].tolist()]
    assert rows == list(range(sum(groups)))


@given(st.integers(0, 40), st.integers(0, 5))
def test_an_epoch_reads_every_piece_once(count: int, epoch: int) -> None:
    order = read_order(count, draw(0, epoch, 1))
    assert sorted(number for window in order for number in window) == list(range(count))
    assert all(len(window) == MIXED for window in order[:-1])
    assert read_order(count, draw(0, epoch, 1)) == order
    assert read_order(count, None) == [[number] for number in range(count)]


@given(GROUPS, st.integers(1, 5), st.integers(1, 40), st.booleans(), st.booleans(), st.integers(0, 3))
def test_batches(
    groups: list[int], size: int, batch_size: int, shuffle: bool, equal_steps: bool, epoch: int
) -> None:
    total = sum(groups)
    seen, sizes = [], []
    for rank in range(size):
        source = Rows(groups, rank, size)
        data = source.shard(rank, total, total // size if equal_steps else source.rows, batch_size, shuffle)
        batches = list(data.epoch(epoch))
        assert len(batches) == data.steps
        rows = [row for batch in batches for row in batch["row"].tolist()]
        assert len(rows) == data.rows
        assert len(set(rows)) == len(rows)
        if not shuffle:
            assert rows == sorted(rows)
        for batch in batches:
            assert np.array_equal(batch["pair"], np.stack([batch["row"], -batch["row"]], axis=1))
        seen += rows
        sizes.append([len(batch["row"]) for batch in batches])
        assert all(count == batch_size for count in sizes[-1][:-1])
        whole = data.read()
        assert len(whole["row"]) == source.rows
        assert set(rows) <= set(whole["row"].tolist())
        assert whole["pair"].shape == (source.rows, 2)
    if equal_steps:
        assert all(each == sizes[0] for each in sizes)
        assert total - len(seen) < size
    else:
        assert sorted(seen) == list(range(total))
        assert max(map(len, sizes)) - min(map(len, sizes)) <= 1


def test_each_epoch_has_its_own_order() -> None:
    data = Rows([50] * 10, 0, 1).shard(0, 500, 500, 500, shuffle=True)
    ((first,), (second,), (again,)) = (list(data.epoch(number)) for number in (0, 1, 0))
    assert first["row"].tolist() != second["row"].tolist()
    assert first["row"].tolist() == again["row"].tolist()


def test_the_row_left_out_is_not_always_the_same() -> None:
    data = Rows([5, 6], 0, 1).shard(0, 11, 10, 10, shuffle=True)
    left_out = {55 - sum(batch["row"].sum() for batch in data.epoch(number)) for number in range(20)}
    assert len(left_out) > 1


@pytest.mark.parametrize("shuffle", [False, True])
def test_what_is_done_to_a_batch_stays_in_it(shuffle: bool) -> None:
    data = Rows([7, 7, 7], 0, 1).shard(0, 21, 21, 4, shuffle, cache=True)
    for batch in data.epoch(0):
        batch["row"] *= 0
    assert sorted(row for batch in data.epoch(0) for row in batch["row"].tolist()) == list(range(21))


def test_a_cached_piece_is_read_once() -> None:
    for cache, times in ((False, 2), (True, 1)):
        source = Rows([3, 3], 0, 1)
        data = source.shard(0, 6, 6, 2, shuffle=True, cache=cache)
        for epoch in range(2):
            list(data.epoch(epoch))
        assert sorted(source.loaded) == [0] * times + [1] * times


def test_a_cached_shard_goes_to_a_spawned_worker_without_its_pieces() -> None:
    data = Rows([3, 3], 0, 1).shard(0, 6, 6, 2, shuffle=True, cache=True)
    expected = [batch["row"].tolist() for batch in data.epoch(1)]
    copy = pickle.loads(pickle.dumps(data))
    assert (len(data._cached), len(copy._cached)) == (2, 0)
    assert [batch["row"].tolist() for batch in copy.epoch(1)] == expected


def test_an_epoch_may_be_left_early() -> None:
    data = Rows([3] * 40, 0, 1).shard(0, 120, 120, 2, shuffle=True)
    epoch = data.epoch(0)
    next(epoch)
    epoch.close()  # type: ignore[attr-defined]
    assert len(list(data.epoch(0))) == 60


def test_what_loading_raises_comes_out() -> None:
    class Broken(Rows):
        def load(self, number: int) -> dict[str, np.ndarray]:
            if number == 6:
                raise DataError("gone")
            return super().load(number)

    data = Broken([3] * 9, 0, 1).shard(0, 27, 27, 3, shuffle=False)
    epoch = data.epoch(0)
    assert [next(epoch)["row"].tolist() for _ in range(5)][-1] == [12, 13, 14]
    with pytest.raises(DataError, match="gone"):
        list(epoch)


DATASET = Dataset(
    (Column("pixels", "float64", (64,)), Column("label", "int64")),
    (DataFile("a", (3, 4)), DataFile("b", (2,))),
)


def test_the_description_survives_its_file() -> None:
    assert manifest.decode(manifest.encode(DATASET), "x") == DATASET
    assert (DATASET.rows, DATASET.parts[0].rows) == (9, 7)
    assert DATASET.choose(["label"]) == (Column("label", "int64"),)
    with pytest.raises(DataError, match=r"no column 'labels'; there are pixels, label"):
        DATASET.choose(["labels"])
    with pytest.raises(DataError, match=r"no column is chosen: name at least one; there are pixels, label"):
        DATASET.choose([])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"parts": [{"name": "a", "groups": [0]}]}, "invalid count, shape or file name"),
        ({"parts": [{"name": "../a", "groups": [1]}]}, "invalid count, shape or file name"),
        ({"columns": [{"name": "a", "dtype": "int64", "shape": [-1]}]}, "invalid count, shape or file name"),
        ({"parts": 3}, r"m\.json is damaged \(Expected `array`, got `int`"),
        ({"version": 2}, "written by a newer pyhvd"),
    ],
)
def test_a_damaged_description(change: dict[str, object], text: str) -> None:
    good = json.loads(manifest.encode(DATASET))
    with pytest.raises(DataError, match=text):
        manifest.decode(json.dumps(good | change).encode(), "m.json")


@given(st.binary(max_size=60))
def test_noise_is_no_description(noise: bytes) -> None:
    with pytest.raises(DataError, match="is damaged"):
        manifest.decode(noise, "m.json")


@pytest.mark.parametrize(
    ("given_path", "seen"),
    [
        ("/a/b/", "/a/b"),
        ("file:/a/b", "/a/b"),
        ("file:///a/b", "/a/b"),
        ("s3a://bucket/x/", "s3://bucket/x"),
        ("hdfs://name:8020/x", "hdfs://name:8020/x"),
        ("hdfs:///x", "hdfs:///x"),
        ("hdfs:/x/", "hdfs:///x"),
        ("hdfs:///", "hdfs:///"),
        ("dbfs:/x", "dbfs:///x"),
        ("simplecache::s3://bucket/x", "simplecache::s3://bucket/x"),
    ],
)
def test_paths(given_path: str, seen: str) -> None:
    assert Folder(given_path).path == seen


def test_a_relative_path_is_the_callers(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.chdir(str(tmp_path))
    assert Folder("data").path == f"{tmp_path}/data"
    with pytest.raises(DataError, match="expected a folder"):
        Folder(" ")


@pytest.mark.parametrize(("rank", "size", "batch_size"), [(2, 2, 1), (-1, 2, 1), (0, 0, 1), (0, 1, 0)])
def test_a_place_that_is_none(rank: int, size: int, batch_size: int) -> None:
    with pytest.raises(ValueError, match=r"batch_size=0|rank="):
        shard("/nonesuch", rank, size, batch_size=batch_size)
