"""pyhvd.spark.Estimator and Model on a Spark cluster."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import pyhvd as hvd
import pyhvd.spark
from pyhvd.spark import SGD, Store, Training
from pyhvd.spark.errors import DataError, SparkError

Array = npt.NDArray[Any]

ROWS = 240
WEIGHTS = np.array([3.0, -2.0])
BIAS = 0.5


class Linear:
    """Least squares: y = x w + b."""

    def __init__(self) -> None:
        self.parameters: dict[str, Array] = {"weights": np.zeros(2), "bias": np.zeros(1)}

    def gradients(self, features: Array, labels: Array) -> tuple[float, Mapping[str, Array]]:
        error = self.predict(features) - labels
        rows = len(labels)
        return float((error**2).mean()), {
            "weights": 2 * features.T @ error / rows,
            "bias": np.array([2 * error.sum() / rows]),
        }

    def predict(self, features: Array) -> Array:
        return features @ self.parameters["weights"] + self.parameters["bias"]


def descend(x: Array, y: Array, steps: int, rate: float, momentum: float) -> Linear:
    """Return the expected result: gradient descent on all rows, in one process."""
    model, optimizer = Linear(), SGD(rate, momentum)
    for _ in range(steps):
        optimizer.step(model.parameters, dict(model.gradients(x, y)[1]))
    return model


def points(rows: int = ROWS) -> tuple[Array, Array]:
    x = np.random.default_rng(7).normal(size=(rows, 2))
    return x, x @ WEIGHTS + BIAS


@pytest.fixture
def rows(spark: Any) -> Any:
    """Return a DataFrame with id, vector x, label y, and held, which is true for every fourth row."""
    from pyspark.ml.linalg import Vectors

    x, y = points()
    data = [
        (i, Vectors.dense(a.tolist()), float(b), i % 4 == 0)
        for i, (a, b) in enumerate(zip(x, y, strict=True))
    ]
    return spark.createDataFrame(data, ["id", "x", "y", "held"])


@pytest.fixture
def make(mark: dict[str, str], tmp_path: Path) -> Callable[..., Any]:
    """Return a function that makes Estimators of Linear on 4 ranks, which take all rows in one step."""

    def estimator(**changed: Any) -> Any:
        arguments: dict[str, Any] = {
            "model": Linear(),
            "store": Store.create(tmp_path),
            "feature_cols": ["x"],
            "label_cols": ["y"],
            "num_proc": 4,
            "batch_size": ROWS,
            "optimizer": SGD(0.1, 0.5),
            "verbose": 0,
            "run_options": {"env": mark, "start_timeout": 60},
        }
        return pyhvd.spark.Estimator(**arguments | changed)

    return estimator


def parameters(model: Any) -> dict[str, Array]:
    found: dict[str, Array] = model.predictor().__self__.parameters
    return found


def test_four_ranks_train_as_one_process_does(rows: Any, make: Callable[..., Any], tmp_path: Path) -> None:
    model = make(epochs=5).fit(rows)
    x, y = points()
    expected = descend(x, y, 5, 0.1, 0.5)
    for name, value in expected.parameters.items():
        assert np.allclose(parameters(model)[name], value, rtol=1e-12, atol=0)
    assert [set(each) for each in model.history] == [{"loss"}] * 5
    assert model.history[0]["loss"] == pytest.approx(float((y**2).mean()), rel=1e-12)
    got = {row.id: row.y__output for row in model.transform(rows).collect()}
    assert np.allclose([got[i] for i in range(ROWS)], expected.predict(x), rtol=1e-12)
    assert sorted(path.name for path in (tmp_path / "runs" / model.run_id).iterdir()) == [
        "checkpoint",
        "model",
    ]


def mean_error(outputs: Array, labels: Array) -> float:
    return float(abs(outputs - labels).mean())


@pytest.mark.any_spark
def test_validation_by_fraction_and_by_column(rows: Any, make: Callable[..., Any]) -> None:
    chosen = {"epochs": 30, "batch_size": 8, "metrics": {"error": mean_error}}
    model = make(validation=0.25, **chosen).fit(rows)
    assert set(model.history[-1]) == {"loss", "val_loss", "val_error"}
    assert model.history[-1]["val_error"] < 0.01 < model.history[0]["val_error"]
    assert np.allclose(parameters(model)["weights"], WEIGHTS, atol=0.01)

    model = make(validation="held", **(chosen | {"epochs": 1, "batch_size": ROWS})).fit(rows)
    x, y = points()
    held = np.arange(ROWS) % 4 == 0
    expected = descend(x[~held], y[~held], 1, 0.1, 0.5)
    assert np.allclose(parameters(model)["weights"], expected.parameters["weights"], rtol=1e-12)
    assert model.history[0]["val_error"] == pytest.approx(mean_error(expected.predict(x[held]), y[held]))


@pytest.mark.any_spark
def test_a_run_goes_on_where_it_has_ended(rows: Any, make: Callable[..., Any]) -> None:
    first = make(epochs=2, run_id="long").fit(rows)
    second = make(epochs=5, run_id="long").fit(rows)
    assert second.history[:2] == first.history
    assert len(second.history) == 5
    expected = descend(*points(), 5, 0.1, 0.5)  # the momentum was kept too
    assert np.allclose(parameters(second)["weights"], expected.parameters["weights"], rtol=1e-12)
    third = make(epochs=5, run_id="long").fit(rows)  # no epoch is left
    assert third.history == second.history


@pytest.mark.any_spark
def test_the_checkpoint_of_another_model_is_refused(rows: Any, make: Callable[..., Any]) -> None:
    make(run_id="once").fit(rows)
    other = Linear()
    other.parameters["more"] = np.zeros(3)
    with pytest.raises(hvd.RankFailedError, match="the checkpoint of run 'once' is of another model"):
        make(run_id="once", epochs=2, model=other).fit(rows)


def own_loop(training: Training) -> Callable[[Any], Any]:
    """Train with two features and two labels: the state is the sum of the labels seen."""
    hvd.barrier()  # init() has been called
    seen = training.state or 0.0
    for epoch in training.epochs():
        for batch in training.batches(epoch):
            (x, number), (y, held) = batch.features, batch.labels
            assert x.shape == (batch.rows, 2)
            assert (number.dtype, y.dtype, held.dtype) == (np.int64, np.float64, np.bool_)
            seen += float(hvd.allreduce(y.sum(), op=hvd.Sum, name="seen"))
        training.end_epoch(seen, {"seen": seen})
    return lambda features: (features[1] % 4 == 0, np.outer(features[1], [1, seen]))


@pytest.mark.any_spark
def test_a_loop_of_ones_own(rows: Any, make: Callable[..., Any]) -> None:
    chosen = {"model": None, "optimizer": None, "train_fn": own_loop, "run_id": "own"}
    columns = {"feature_cols": ["x", "id"], "label_cols": ["y", "held"]}
    make(epochs=1, **chosen, **columns).fit(rows)
    model = make(epochs=3, **chosen, **columns).fit(rows)
    total = points()[1].sum()
    assert [each["seen"] for each in model.history] == pytest.approx([total, 2 * total, 3 * total])
    model.set(model.output_cols, ["quarter", "products"])
    out = model.transform(rows.select("id", "x"))
    assert out.dtypes[2:] == [("quarter", "boolean"), ("products", "array<double>")]
    for row in out.collect():
        assert row.quarter == (row.id % 4 == 0)
        assert row.products == pytest.approx([row.id, row.id * 3 * total])


def fails(training: Training) -> Callable[[Any], Any]:
    if hvd.rank() == 2:
        raise KeyError("no such layer")
    hvd.barrier()
    raise AssertionError


@pytest.mark.any_spark
def test_a_failing_loop_names_its_rank_and_leaves_no_data(
    rows: Any, make: Callable[..., Any], tmp_path: Path
) -> None:
    with pytest.raises(hvd.RankFailedError, match=r"rank 2 of 4 .* KeyError: 'no such layer'"):
        make(model=None, optimizer=None, train_fn=fails).fit(rows)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert len(make().fit(rows).history) == 1


def skips_the_end(training: Training) -> Callable[[Any], Any]:
    for _ in training.epochs():
        pass
    return len


@pytest.mark.any_spark
def test_a_loop_that_ends_no_epoch(rows: Any, make: Callable[..., Any]) -> None:
    with pytest.raises(
        hvd.RankFailedError, match=r"call training\.end_epoch once per epoch; it did not in epoch 0"
    ):
        make(model=None, optimizer=None, train_fn=skips_the_end).fit(rows)
    with pytest.raises(hvd.RankFailedError, match=r"train_fn returned NoneType: .* a function"):
        make(model=None, optimizer=None, train_fn=lambda training: None).fit(rows)


@pytest.mark.any_spark
def test_prepared_data_serve_many_fits(rows: Any, make: Callable[..., Any], tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("train", "held")]
    for path, condition in zip(paths, ("not held", "held"), strict=True):
        pyhvd.spark.prepare(rows.where(condition), path)
    first, second = (make(epochs=n).fit_on_prepared(*paths) for n in (1, 2))
    assert second.history[0] == pytest.approx(first.history[0])
    assert set(second.history[1]) == {"loss", "val_loss"}
    with pytest.raises(ValueError, match="give validation_path instead"):
        make(validation=0.5).fit_on_prepared(*paths)
    with pytest.raises(DataError, match="no column 'z'; there are id, x, y, held"):
        make(feature_cols=["z"]).fit_on_prepared(paths[0])


def test_it_is_an_estimator_of_spark_ml(spark: Any, make: Callable[..., Any], tmp_path: Path) -> None:
    from pyspark.ml import Pipeline
    from pyspark.ml.feature import VectorAssembler

    x, y = points()
    frame = spark.createDataFrame(
        [(float(a), float(b), float(c)) for (a, b), c in zip(x, y, strict=True)], ["a", "b", "y"]
    )
    estimator = make(num_proc=2)
    pipeline = Pipeline(stages=[VectorAssembler(inputCols=["a", "b"], outputCol="x"), estimator])
    fitted = pipeline.fit(frame, {estimator.epochs: 3})
    expected = descend(x, y, 3, 0.1, 0.5)
    out = fitted.transform(frame).collect()
    assert [row.y__output for row in out] == pytest.approx(
        [float(expected.predict(np.array([row.a, row.b]))[0]) for row in out]
    )
    assert "epochs: passes over the data" in estimator.explainParams()
    with pytest.raises(ValueError, match="epochs=0"):
        estimator.fit(frame, {estimator.epochs: 0})


@pytest.mark.any_spark
@pytest.mark.parametrize("maps", [[{}, {}], [{}, {"run_id": "b"}]])
def test_several_fits_share_no_run(rows: Any, make: Callable[..., Any], maps: list[dict[str, str]]) -> None:
    estimator = make(run_id=None if maps[1] else "a")
    params = [{estimator.getParam(name): value for name, value in each.items()} for each in maps]
    with pytest.raises(ValueError, match=r"run_id='[ab]' names one run"):
        estimator.fit(rows, params)


@pytest.mark.any_spark
def test_a_saved_model_is_the_same(rows: Any, make: Callable[..., Any], tmp_path: Path) -> None:
    model = make(epochs=2, run_id="kept").fit(rows)
    model.set(model.output_cols, ["guess"])
    model.save(tmp_path / "own")
    expected = [row.y__output for row in make(run_id="kept", epochs=2).fit(rows).transform(rows).collect()]
    for path, name in ((tmp_path / "own", "guess"), (tmp_path / "runs/kept/model", "y__output")):
        loaded = pyhvd.spark.Model.load(path)
        assert loaded.history == model.history
        assert loaded.run_id == "kept"
        assert [row[name] for row in loaded.transform(rows).collect()] == expected
    with pytest.raises(DataError, match=r"holds no model: Model.save writes one"):
        pyhvd.spark.Model.load(tmp_path)


READ_BACK = """
import sys
import pyhvd.spark
from pyspark.sql import SparkSession
from pyspark.ml import PipelineModel

pyhvd.spark.use_java()
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
frame = spark.createDataFrame([(0.25, 3.0), (-1.5, 1 / 3)], ["a", "b"])
pipeline = PipelineModel.load(sys.argv[1])
own = pyhvd.spark.Model.read().load(sys.argv[2])
assert type(pipeline.stages[1]) is type(own)
assert "pyhvd.spark.ml.estimator" not in sys.modules
for model in (pipeline.transform, lambda frame: own.transform(pipeline.stages[0].transform(frame))):
    print("bits", *(row.guess.hex() for row in model(frame).collect()))
print("uid", own.uid, pipeline.stages[1].uid)
"""


def test_spark_ml_writes_a_model_and_another_process_reads_it(
    spark: Any, make: Callable[..., Any], tmp_path: Path
) -> None:
    from pyspark.ml import Pipeline
    from pyspark.ml.feature import VectorAssembler

    x, y = points()
    data = [(float(a), float(b), float(c)) for (a, b), c in zip(x, y, strict=True)]
    assembler = VectorAssembler(inputCols=["a", "b"], outputCol="x")
    fitted = Pipeline(stages=[assembler, make(num_proc=2)]).fit(spark.createDataFrame(data, ["a", "b", "y"]))
    model = fitted.stages[1]
    model.set(model.output_cols, ["guess"])
    paths = [str(tmp_path / "pipeline"), str(tmp_path / "alone")]
    fitted.save(paths[0])
    model.write().save(paths[1])
    expected = model.predictor()(np.array([[0.25, 3.0], [-1.5, 1 / 3]]))
    done = subprocess.run(
        [sys.executable, "-c", READ_BACK, *paths], capture_output=True, text=True, check=False, timeout=200
    )
    said = "bits " + " ".join(float(value).hex() for value in expected)
    assert done.stdout.splitlines() == [said, said, f"uid {model.uid} {model.uid}"], done.stderr

    with pytest.raises(DataError, match=r"alone exists: .*model\.write\(\)\.overwrite\(\)\.save\(path\)"):
        model.write().save(paths[1])
    with pytest.raises(DataError, match=r"alone exists: "):
        model.save(paths[1])
    model.set(model.output_cols, ["second"])
    model.write().overwrite().save(paths[1])
    assert pyhvd.spark.Model.load(paths[1]).getOrDefault("output_cols") == ["second"]


def test_a_path_without_scheme_is_on_hadoops_file_system(spark: Any) -> None:
    from pyhvd.spark.ml.model import _folder

    hadoop = spark.sparkContext._jsc.hadoopConfiguration()
    before = hadoop.get("fs.defaultFS")
    assert _folder("/m", None).path == "/m"
    try:
        hadoop.set("fs.defaultFS", "hdfs://127.0.0.1:8020")
        assert _folder("/m", None).path == "hdfs://127.0.0.1:8020/m"
        assert _folder("file:/m", None).path == "/m"
    finally:
        hadoop.set("fs.defaultFS", before)


def test_transform_leaves_the_other_columns_as_they_are(
    spark: Any, rows: Any, make: Callable[..., Any]
) -> None:
    from pyspark.ml.linalg import Vectors
    from pyspark.sql import functions

    model = make(num_proc=2).fit(rows)
    wide = rows.select(
        "id",
        functions.create_map(functions.lit("k"), "id").alias("map"),
        functions.when(functions.col("id") > 3, functions.lit("text")).alias("text"),
        "x",
        functions.col("x").alias("same"),
    ).repartition(3)
    model.set(model.batch_size, 7)
    wide = wide.withColumn("a.b`c", functions.col("id"))
    out = model.transform(wide)
    assert out.schema.fields[:-1] == wide.schema.fields
    found = {row.id: row for row in out.collect()}
    assert len(found) == ROWS
    x, _ = points()
    predict = model.predictor()
    for i in (0, 4, ROWS - 1):
        assert found[i].map == {"k": i}
        assert found[i].text == ("text" if i > 3 else None)
        assert found[i]["a.b`c"] == i
        assert found[i].same == Vectors.dense(x[i].tolist())
        assert found[i].y__output == pytest.approx(float(predict(x[i : i + 1])[0]))
    assert model.transform(wide.where("id < 0")).count() == 0

    with pytest.raises(DataError, match="there is no column 'x'; there are id"):
        model.transform(rows.select("id"))
    with pytest.raises(DataError, match="two columns 'y__output'"):
        model.transform(rows.withColumn("y__output", functions.lit(0)))
    with pytest.raises(ValueError, match="the model has 1 outputs"):
        model.copy({model.output_cols: ["a", "b"]}).transform(rows)
    longer = spark.createDataFrame([(Vectors.dense(1.0, 2.0, 3.0),)], ["x"])
    with pytest.raises(Exception, match=r"column 'x' has rows of float64 and shape \(3,\)"):
        model.transform(longer).collect()


@pytest.mark.any_spark
def test_a_dataframe_that_cannot_be_used(rows: Any, make: Callable[..., Any]) -> None:
    with pytest.raises(DataError, match="no column 'z'"):
        make(feature_cols=["z"]).fit(rows)
    with pytest.raises(DataError, match="validation data: the DataFrame has no rows"):
        make(validation="empty").fit(rows.selectExpr("*", "false as empty"))
    with pytest.raises(DataError, match="train data: column 'y' holds 1 nulls"):
        make().fit(rows.selectExpr("x", "case when id > 0 then y end as y"))
    with pytest.raises(ValueError, match="validation='nonesuch': there is no such column"):
        make(validation="nonesuch").fit(rows)
    with pytest.raises(DataError, match=r"train data: there are 3 rows for 4 ranks.* set num_proc to 3 or"):
        make().fit(rows.limit(3))


@pytest.mark.any_spark
def test_columns_without_numbers_are_refused_at_the_call(rows: Any, make: Callable[..., Any]) -> None:
    texts = rows.selectExpr("x", "y", "id", "string(y) as text", "array(string(y)) as texts")
    for changed, named in (
        ({"feature_cols": ["x", "text"]}, "feature_cols: column 'text' is of type string.*StringIndexer"),
        ({"feature_cols": ["texts"]}, "feature_cols: column 'texts' is of type array<string>"),
        ({"label_cols": ["text"]}, "label_cols: column 'text' is of type string"),
        ({"validation": "text"}, "validation='text': that column is of type string; expected booleans"),
        (
            {"feature_cols": ["id", "y"], "label_cols": ["x"]},
            "columns 'id', 'y' as a tuple.*VectorAssembler",
        ),
    ):
        with pytest.raises(DataError, match=named):
            make(**changed).fit(texts)
    model = make(num_proc=2).fit(rows)
    with pytest.raises(DataError, match="column 'x' is of type string, and the model was trained on float64"):
        model.transform(texts.selectExpr("text as x"))


@pytest.mark.any_spark
def test_more_ranks_than_slots_are_refused_before_the_data_are_written(
    rows: Any, make: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyhvd.spark.ml.estimator.EXECUTORS_START_S", 0.0)
    with pytest.raises(SparkError, match="num_proc=9, and the cluster has 4 slots: set num_proc to 4"):
        make(num_proc=9).fit(rows)
    assert not (tmp_path / "runs").exists()


@pytest.mark.any_spark
def test_a_null_vector_is_named(spark: Any, rows: Any, make: Callable[..., Any], tmp_path: Path) -> None:
    holed = rows.selectExpr("case when id != 7 then x end as x", "y")
    named = "column 'x' holds 1 nulls among .* drop the rows"
    model = make(num_proc=2).fit(rows)
    with pytest.raises(Exception, match=named):
        model.transform(holed).collect()
    with pytest.raises(DataError, match="train data: " + named):
        make().fit(holed)
    with pytest.raises(DataError, match=named):
        pyhvd.spark.prepare(holed, tmp_path / "prepared")
    with pytest.raises(hvd.RankFailedError, match=named):
        pyhvd.spark.run(count_rows, df=holed, num_proc=2, verbose=0)


def count_rows() -> int:
    hvd.init()
    return len(pyhvd.spark.partition(equal_steps=False).read()["y"])
