"""prepare and shard on a cluster: from a DataFrame to the ranks, and the errors on the way."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyhvd as hvd
import pyhvd.spark
from pyhvd.spark.data import manifest
from pyhvd.spark.data.folder import Folder
from pyhvd.spark.data.write_partition import PART_NAME
from pyhvd.spark.errors import DataError, SparkError
from tests.spark.cluster import ROOT

pytestmark = [
    pytest.mark.timeout(240),  # the first test waits for the cluster too
    pytest.mark.filterwarnings("ignore:distutils Version classes:DeprecationWarning"),  # Spark 3.5's own
]


@pytest.fixture(scope="module")
def frame(spark: Any) -> Any:
    """Return a DataFrame of a thousand rows with all kinds of columns."""
    import datetime

    from pyspark.ml.linalg import Vectors

    day = datetime.date(2024, 5, 1)
    rows = [
        (n, n / 2, n % 2 == 0, Vectors.sparse(4, {n % 4: 1.0}), [[n, 1], [2, 3]], f"t{n}", day, b"\0")
        for n in range(1000)
    ]
    return spark.createDataFrame(
        rows, ["row", "half", "even", "vector", "nested.list", "text", "day", "bytes"]
    )


def summary(path: str) -> dict[str, Any]:
    """Return a summary of one rank's shard."""
    hvd.init()
    data = pyhvd.spark.shard(path, batch_size=64, equal_steps=False)
    rows, ok = [], True
    for batch in data.epoch(1):
        numbers = batch["row"]
        rows += numbers.tolist()
        ok &= bool((batch["vector"].argmax(axis=1) == numbers % 4).all())
        ok &= bool((batch["nested.list"][:, 0, 0] == numbers).all())
        ok &= bool((batch["even"] == (numbers % 2 == 0)).all())
        ok &= batch["text"].tolist() == [f"t{number}" for number in numbers]
    hvd.join()
    return {"rows": rows, "ok": ok, "steps": data.steps, "columns": list(data.columns.values())}


def test_from_a_dataframe_to_the_ranks(spark: Any, frame: Any, mark: dict[str, str], tmp_path: Path) -> None:
    dataset = pyhvd.spark.prepare(frame, tmp_path / "data", rows_per_group=100)
    assert (dataset.rows, len(dataset.parts)) == (1000, 4)
    results = pyhvd.spark.run(summary, (str(tmp_path / "data"),), num_proc=3, env=mark)
    assert all(result["ok"] for result in results)
    assert sorted(row for result in results for row in result["rows"]) == list(range(1000))
    assert [result["steps"] for result in results] == [6, 6, 6]
    assert results[0]["columns"] == [
        pyhvd.spark.Column("row", "int64"),
        pyhvd.spark.Column("half", "float64"),
        pyhvd.spark.Column("even", "bool"),
        pyhvd.spark.Column("vector", "float64", (4,)),
        pyhvd.spark.Column("nested.list", "int64", (2, 2)),
        pyhvd.spark.Column("text", "object"),
        pyhvd.spark.Column("day", "datetime64[D]"),
        pyhvd.spark.Column("bytes", "object"),
    ]
    # Every share is a sample of all rows, and Spark reads the files too.
    assert all(300 < np.mean(result["rows"]) < 700 for result in results)
    assert spark.read.parquet(str(tmp_path / "data")).selectExpr("sum(row)").first()[0] == 499_500


@pytest.mark.any_spark
def test_the_order_of_the_partitions(spark: Any, tmp_path: Path) -> None:
    frame = spark.range(0, 100, numPartitions=5)
    dataset = pyhvd.spark.prepare(frame, f"file://{tmp_path}/data", shuffle=False)
    assert [part.groups for part in dataset.parts] == [(20,)] * 5
    data = pyhvd.spark.shard(tmp_path / "data", 1, 4, shuffle=False)
    assert data.read()["id"].tolist() == list(range(25, 50))
    again = pyhvd.spark.prepare(frame, tmp_path / "two", shuffle=False, num_files=2)
    assert [part.rows for part in again.parts] == [40, 60]


@pytest.mark.any_spark
def test_one_seed_gives_one_order(spark: Any, tmp_path: Path) -> None:
    frame = spark.range(0, 100, numPartitions=3)
    orders = []
    for number, seed in enumerate((1, 1, 2)):
        path = tmp_path / str(number)
        pyhvd.spark.prepare(frame, path, seed=seed, columns=["id"])
        orders.append(pyhvd.spark.shard(path, 0, 1).read()["id"].tolist())
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[2]) == list(range(100)) != orders[2]


@pytest.mark.any_spark
def test_taking_the_place_of_what_it_reads_from(spark: Any, tmp_path: Path) -> None:
    path = tmp_path / "data"
    pyhvd.spark.prepare(spark.range(0, 50), path)
    with pytest.raises(DataError, match="holds a prepared dataset: choose another folder, or overwrite=True"):
        pyhvd.spark.prepare(spark.range(0, 50), path)
    dataset = pyhvd.spark.prepare(
        spark.read.parquet(str(path)).selectExpr("id * 2 as id"), path, overwrite=True
    )
    assert sorted(pyhvd.spark.shard(path, 0, 1).read()["id"].tolist()) == list(range(0, 100, 2))
    assert sorted(os.listdir(path)) == sorted([manifest.NAME, *(part.name for part in dataset.parts)])


@pytest.mark.any_spark
def test_files_of_others_are_left_alone(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(DataError, match=r"holds other files \('thesis\.tex'\)"):
        pyhvd.spark.prepare(spark.range(3), tmp_path, overwrite=True)
    assert os.listdir(tmp_path) == ["thesis.tex"]


@pytest.mark.any_spark
def test_what_an_unfinished_job_left(spark: Any, tmp_path: Path) -> None:
    left = tmp_path / "part-00000-0123456789ab-01234567.parquet"
    left.write_bytes(b"half a file")
    with pytest.raises(DataError, match="what an unfinished prepare has left"):
        pyhvd.spark.prepare(spark.range(3), tmp_path)
    pyhvd.spark.prepare(spark.range(3), tmp_path, overwrite=True)
    assert not left.exists()


@pytest.mark.any_spark
@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("cast(id as decimal) as x", r"column 'x' is of type decimal\(10,0\), which no array has"),
        ("array(named_struct('a', id)) as x", r"column 'x' is of type array<struct<a:bigint>>"),
        ("if(id = 7, null, id) as x", r"column 'x' holds 1 nulls"),
        ("sequence(0, id % 3) as x", r"column 'x' has lists of \d and of \d elements"),
        ("if(id < 5, array(1), array(1, 2)) as x", r"pad (them|its lists)"),
    ],
)
def test_what_no_array_holds(spark: Any, tmp_path: Path, expression: str, text: str) -> None:
    frame = spark.range(0, 10, numPartitions=2).selectExpr(expression)
    with pytest.raises(DataError, match=text):
        pyhvd.spark.prepare(frame, tmp_path / "data", shuffle=False)
    assert not list(tmp_path.rglob("*.parquet"))


@pytest.mark.any_spark
def test_columns_that_are_not_there_or_twice(spark: Any, tmp_path: Path) -> None:
    frame = spark.range(3)
    with pytest.raises(DataError, match="no column 'label'; there are id"):
        pyhvd.spark.prepare(frame, tmp_path, columns=["id", "label"])
    with pytest.raises(DataError, match="column 'id' is there twice"):
        pyhvd.spark.prepare(frame.selectExpr("id", "id + 1 as id"), tmp_path)
    with pytest.raises(DataError, match="expected a list of names"):
        pyhvd.spark.prepare(frame, tmp_path, columns="id")
    with pytest.raises(DataError, match="the DataFrame has no rows"):
        pyhvd.spark.prepare(frame.filter("id < 0"), tmp_path)
    with pytest.raises(ValueError, match="num_files=0"):
        pyhvd.spark.prepare(frame, tmp_path, num_files=0)
    with pytest.raises(ValueError, match="compression='best'"):
        pyhvd.spark.prepare(frame, tmp_path, compression="best")


def test_what_spark_ends(spark: Any, tmp_path: Path) -> None:
    frame = spark.range(0, 10).selectExpr("raise_error('no such luck') as x")
    with pytest.raises(SparkError, match=r"Spark ended the job: .*") as caught:
        pyhvd.spark.prepare(frame.selectExpr("cast(x as int) as x"), tmp_path / "data")
    assert caught.value.__cause__ is not None
    with pytest.raises(SparkError, match=r"FileNotFoundError: .*/proc/nonesuch"):
        pyhvd.spark.prepare(spark.range(3), "/proc/nonesuch/data")
    assert not list(tmp_path.rglob("*.parquet"))


@pytest.mark.any_spark
def test_files_that_cannot_be_removed(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("the store says no")

    path = tmp_path / "data"
    pyhvd.spark.prepare(spark.range(0, 50), path)
    monkeypatch.setattr(Folder, "remove", refuse)
    assert pyhvd.spark.prepare(spark.range(0, 60), path, overwrite=True).rows == 60
    assert len(pyhvd.spark.shard(path, 0, 1).read()["id"]) == 60
    assert "could not be removed: the store says no" in caplog.text
    with pytest.raises(DataError, match="holds 1 nulls"):
        pyhvd.spark.prepare(spark.sql("select if(id = 7, null, id) as x from range(9)"), path, overwrite=True)
    assert len(pyhvd.spark.shard(path, 0, 1).read()["id"]) == 60


def test_a_task_that_is_tried_again(spark: Any, tmp_path: Path) -> None:
    """The first attempt fails after it has written rows; its files do not count as data."""
    marker = str(tmp_path / "failed-once")

    def fail_once(batches: Any) -> Any:
        from pyspark import TaskContext

        context = TaskContext.get()
        for number, batch in enumerate(batches):
            if number == 3 and context.partitionId() == 0 and not os.path.exists(marker):
                Path(marker).touch()
                raise RuntimeError("once")
            yield batch

    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "10")
    try:
        frame = spark.range(0, 100, numPartitions=2).mapInArrow(fail_once, "id long")
        dataset = pyhvd.spark.prepare(frame, tmp_path / "data", shuffle=False, rows_per_group=5)
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    assert os.path.exists(marker)
    assert dataset.rows == 100
    files = [name for name in os.listdir(tmp_path / "data") if PART_NAME.fullmatch(name)]
    assert sorted(files) == sorted(part.name for part in dataset.parts)
    assert sorted(pyhvd.spark.shard(tmp_path / "data", 0, 1).read()["id"].tolist()) == list(range(100))


@pytest.mark.any_spark
def test_disks_that_are_not_shared(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyhvd.spark.data.folder.Folder.sizes", lambda self: {})
    with pytest.raises(DataError, match=r"does not find 1 of 1 files that the executors wrote in .* share"):
        pyhvd.spark.prepare(spark.range(3), tmp_path / "data", num_files=1)
    assert not (tmp_path / "data" / manifest.NAME).exists()


def own_rows(batch_size: int, equal_steps: bool) -> dict[str, Any]:
    """Return a summary of one rank's partition in two epochs."""
    hvd.init()
    data = pyhvd.spark.partition(batch_size=batch_size, equal_steps=equal_steps)
    epochs = [list(data.epoch(number)) for number in range(2)]
    hvd.join()
    return {
        "rows": [[row for batch in epoch for row in batch["row"].tolist()] for epoch in epochs],
        "ok": all((batch["vector"].argmax(axis=1) == batch["row"] % 4).all() for batch in epochs[0]),
        "sizes": [len(batch["row"]) for batch in epochs[0]],
        "data": (data.rows, data.steps, data.total_rows, len(data.read()["row"])),
        "columns": list(data.columns),
    }


def test_own_partitions(spark: Any, frame: Any, mark: dict[str, str]) -> None:
    results = pyhvd.spark.run(own_rows, (40, False), num_proc=3, env=mark, df=frame)
    assert all(result["ok"] for result in results)
    assert sorted(row for result in results for row in result["rows"][0]) == list(range(1000))
    assert all(sorted(result["rows"][0]) == sorted(result["rows"][1]) for result in results)
    assert all(result["rows"][0] != result["rows"][1] for result in results)
    assert all(result["columns"] == frame.columns for result in results)
    assert all(result["data"][2] == 1000 for result in results)
    equal = pyhvd.spark.run(own_rows, (40, True), num_proc=3, env=mark, df=frame)
    assert len({tuple(result["sizes"]) for result in equal}) == 1
    assert {result["data"][0] for result in equal} == {min(result["data"][3] for result in equal)}


def tell_columns() -> list[str]:
    hvd.init()
    try:
        pyhvd.spark.partition(columns=["label"])
    except DataError as exc:
        return [str(exc), *pyhvd.spark.partition(columns=["id"]).columns]
    return []


@pytest.mark.any_spark
def test_columns_of_a_partition(spark: Any, mark: dict[str, str]) -> None:
    (said,) = pyhvd.spark.run(tell_columns, num_proc=1, env=mark, df=spark.range(4))
    assert said == ["there is no column 'label'; there are id", "id"]


@pytest.mark.any_spark
def test_partitions_of_which_one_is_empty(spark: Any, mark: dict[str, str]) -> None:
    with pytest.raises(hvd.RankFailedError) as caught:
        pyhvd.spark.run(own_rows, (1, True), num_proc=2, env=mark, df=spark.range(1).selectExpr("id as row"))
    assert re.search(
        r"rank [01] of 2 would have no rows, as the DataFrame has 1: use fewer ranks", str(caught.value)
    )


@pytest.mark.parametrize("condition", ["false", "rand() > 1"])
def test_rows_for_which_spark_starts_no_task(spark: Any, condition: str) -> None:
    """Spark's optimizer finds one condition false before the job, the other only while it partitions rows."""
    with pytest.raises(DataError, match=r"^the DataFrame has no rows$"):
        pyhvd.spark.run(own_rows, (1, True), num_proc=2, df=spark.range(4).where(condition))


@pytest.mark.any_spark
def test_a_rank_without_a_partition(spark: Any, mark: dict[str, str]) -> None:
    with pytest.raises(hvd.RankFailedError, match=r"DataError: this rank has no partition"):
        pyhvd.spark.run(own_rows, (1, True), num_proc=1, env=mark)


@pytest.mark.any_spark
def test_columns_that_no_rank_could_use(spark: Any) -> None:
    with pytest.raises(DataError, match=r"column 'x' is of type decimal"):
        pyhvd.spark.run(own_rows, num_proc=2, df=spark.range(3).selectExpr("cast(id as decimal) as x"))


def fail_beside_rows() -> None:
    hvd.init()
    pyhvd.spark.partition()
    if hvd.rank() == 1:
        raise KeyError("no such luck")
    hvd.barrier()


def test_a_failure_beside_rows(spark: Any, mark: dict[str, str]) -> None:
    with pytest.raises(hvd.RankFailedError, match=r"rank 1 of 2 .* failed: KeyError: 'no such luck'"):
        pyhvd.spark.run(fail_beside_rows, num_proc=2, env=mark, df=spark.range(10))
    bad = spark.range(10).selectExpr("cast(raise_error('no such rows') as int) as x")
    with pytest.raises(SparkError, match=r"Spark ended the job: .*no such rows"):
        pyhvd.spark.run(fail_beside_rows, num_proc=2, env=mark, df=bad)
    from pyspark.sql import functions

    divided = functions.udf(lambda value: value // 0, "int")
    bad = spark.range(10).select(divided("id").alias("x"))
    with pytest.raises(SparkError, match=r"Spark ended the job: ZeroDivisionError: "):
        pyhvd.spark.run(fail_beside_rows, num_proc=2, env=mark, df=bad)


@pytest.mark.any_spark
def test_the_example(mark: dict[str, str], tmp_path: Path) -> None:
    """The example starts its own Spark, and leaves no rank behind."""
    pytest.importorskip("sklearn", reason="scikit-learn, which brings the digits, is missing")
    env = os.environ | mark | {"PYTHONPATH": str(ROOT), "SPARK_LOCAL_DIRS": str(tmp_path / "local")}
    env.pop("PYSPARK_PYTHON", None)
    done = subprocess.run(
        [sys.executable, "examples/spark_digits.py", "--folder", str(tmp_path / "store")],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "trained on 4 ranks" in done.stdout
    last = done.stdout.splitlines()[-1]
    assert float(last.removeprefix("held-out accuracy ").partition("%")[0]) >= 95, done.stdout
    assert (tmp_path / "store/runs/digits/checkpoint/model.npz").exists()
