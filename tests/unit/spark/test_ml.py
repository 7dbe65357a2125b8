"""The parts of pyhvd.spark.Estimator that need neither Spark nor Arrow."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp

import pyhvd.spark
from pyhvd.spark import SGD, Store
from pyhvd.spark.data.manifest import Column
from pyhvd.spark.errors import DataError, SparkError
from pyhvd.spark.ml import settings
from pyhvd.spark.ml.model_metadata import ModelDescription
from pyhvd.spark.ml.numpy_trainer import NumpyTrainer
from pyhvd.spark.ml.prediction import as_trained, describe_outputs, spark_type, widened
from pyhvd.spark.ml.runs import Run
from pyhvd.spark.ml.training import Batch, picked

Array = npt.NDArray[Any]


class Line:
    """y = w x."""

    def __init__(self) -> None:
        self.parameters: dict[str, Array] = {"w": np.zeros(1)}

    def gradients(self, features: Array, labels: Array) -> tuple[float, Mapping[str, Array]]:
        error = self.predict(features) - labels
        return float((error**2).mean()), {"w": np.array([(2 * error * features).mean()])}

    def predict(self, features: Array) -> Array:
        return features * self.parameters["w"]


def values(**changed: Any) -> dict[str, Any]:
    """Return valid arguments of an Estimator, with the given changes."""
    right: dict[str, Any] = {
        "model": Line(), "train_fn": None, "store": Store.create("/tmp/store"), "feature_cols": ["x"],
        "label_cols": ["y"], "num_proc": None, "batch_size": 8, "epochs": 1, "validation": None, "loss": None,
        "optimizer": None, "metrics": {}, "run_options": {}, "run_id": None, "seed": 0,
    }  # fmt: skip
    return right | changed


def test_right_arguments_pass() -> None:
    settings.check(values())
    settings.check(values(validation=0.2, num_proc=4, feature_cols=("x", "z"), optimizer=SGD(0.1)))
    settings.check(values(validation="held", model=None, train_fn=print))
    assert isinstance(settings.trainer_of(values()), NumpyTrainer)
    own: Any = print
    assert settings.trainer_of(values(model=None, train_fn=own)) is own


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"store": "/tmp/x"}, r"store='/tmp/x': expected a Store, pyhvd\.spark\.Store\.create\(path\)"),
        ({"feature_cols": "x"}, "feature_cols='x': expected a list of names"),
        ({"feature_cols": []}, "feature_cols=.*one at least"),
        ({"feature_cols": ["x", "x"]}, "feature_cols=.*a column is there twice"),
        ({"label_cols": [3]}, "label_cols=.*names of columns"),
        ({"batch_size": 0}, "batch_size=0: expected a number, 1 at least"),
        ({"epochs": True}, "epochs=True: expected a number"),
        ({"seed": -1}, "seed=-1: expected a number, 0 at least"),
        ({"num_proc": 1.5}, r"num_proc=1\.5: expected"),
        (
            {"validation": 1.0},
            r"validation=1\.0: expected a fraction between 0 and 1, or the name of a column",
        ),
        ({"validation": float("nan")}, "validation=nan: expected a fraction"),
        ({"validation": "y"}, "validation='y' is a feature or a label"),
        ({"run_options": {"num_proc": 3}}, "run_options: 'num_proc' is not allowed"),
        ({"run_id": "../x"}, r"run_id='\.\./x': expected letters"),
        ({"model": None}, "give either model or train_fn"),
        ({"train_fn": print}, "give either model or train_fn"),
        ({"model": None, "train_fn": 3}, "train_fn=3: expected a function of one argument"),
        ({"model": None, "train_fn": print, "optimizer": SGD()}, "optimizer goes with model"),
        ({"model": "net"}, "model=str: expected a torch.nn.Module, a keras.Model, or an object with"),
        (
            {"model": SimpleNamespace(parameters={}, gradients=len, predict=len)},
            "parameters is dict: .*not empty",
        ),
        (
            {"model": SimpleNamespace(parameters={"n": np.ones(2, int)}, gradients=len, predict=len)},
            r"parameters\['n'\] is int64: expected a numpy array of real numbers",
        ),
        ({"loss": print}, r"loss goes with a torch module"),
        ({"optimizer": 0.1}, r"optimizer=0\.1: expected one with step\(parameters, gradients\)"),
    ],
)
def test_wrong_arguments_are_named(changed: dict[str, Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        settings.check(values(**changed))


def test_metrics_need_data_to_be_measured_on() -> None:
    some = values(metrics={"accuracy": lambda outputs, labels: 0.0})
    settings.check_metrics(some, validating=True)
    with pytest.raises(ValueError, match="metrics are measured on validation data"):
        settings.check_metrics(some, validating=False)


@pytest.mark.parametrize("name", ["Estimator", "Model"])
def test_without_pyspark_the_extra_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [each for each in sys.modules if each.startswith(("pyspark", "pyhvd.spark.ml."))]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(SparkError, match=r'pip install "pyhvd\[spark\]"'):
        getattr(pyhvd.spark, name)
    with pytest.raises(AttributeError, match="no attribute 'Nonesuch'"):
        pyhvd.spark.Nonesuch  # noqa: B018


_NUMBERS = st.floats(-100, 100, width=32)


@given(
    hnp.arrays(np.float64, (4, 3), elements=_NUMBERS),
    st.floats(0.001, 1.0),
    st.floats(0.0, 0.99),
)
def test_sgd_is_the_heavy_ball(gradients: Array, rate: float, momentum: float) -> None:
    parameters = {"w": np.ones(3)}
    optimizer = SGD(rate, momentum)
    expected = np.ones(3)
    for step, gradient in enumerate(gradients):
        optimizer.step(parameters, {"w": gradient.copy()})
        past = sum(momentum ** (step - i) * gradients[i] for i in range(step + 1))
        expected = expected - rate * past
    assert np.allclose(parameters["w"], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("arguments", "text"), [((0.0,), "learning_rate=0.0"), ((0.1, 1.0), "momentum=1.0")])
def test_sgd_refuses(arguments: tuple[float, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SGD(*arguments)


@pytest.mark.parametrize(
    ("gradients", "text"),
    [
        ({"a": np.zeros(2)}, r"'b' is \(\), its gradient missing"),
        (
            {"a": np.zeros(2), "b": np.zeros(()), "c": np.zeros(1)},
            r"'c' is no parameter, its gradient \(1,\)",
        ),
        ({"a": np.zeros((1, 2)), "b": np.zeros(())}, r"'a' is \(2,\), its gradient \(1, 2\)"),
    ],
)
def test_gradients_must_fit_the_parameters(gradients: dict[str, Array], text: str) -> None:
    model = SimpleNamespace(
        parameters={"a": np.zeros(2), "b": np.zeros(())}, gradients=lambda x, y: (0.0, gradients), predict=len
    )
    with pytest.raises(ValueError, match=text):
        NumpyTrainer(model, SGD(), {})._step(Batch(np.ones(1), np.ones(1), 1))


def test_several_columns_are_a_tuple() -> None:
    columns = {"x": np.arange(3), "y": np.ones((3, 2))}
    assert picked(columns, ["y"]) is columns["y"]
    first, second = picked(columns, ["y", "x"])
    assert first is columns["y"]
    assert second is columns["x"]


@pytest.mark.parametrize(
    ("output", "expected", "kind"),
    [
        (np.zeros(5), Column("0", "float64"), "double"),
        (np.zeros((5, 3), np.float32), Column("0", "float32", (3,)), "array<float>"),
        (np.zeros((5, 2, 2), np.float16), Column("0", "float32", (2, 2)), "array<float>"),
        (np.zeros(5, np.uint8), Column("0", "int16"), "smallint"),
        (np.zeros(5, bool), Column("0", "bool"), "boolean"),
        ([0] * 5, None, ""),
    ],
)
def test_outputs_become_columns(output: Any, expected: Column | None, kind: str) -> None:
    if expected is None:
        with pytest.raises(DataError, match=r"output 0 has shape \(\) for 5 rows"):
            describe_outputs(output, 5)
        return
    assert describe_outputs(output, 5) == (expected,)
    assert spark_type(expected) == kind


def test_several_outputs_and_what_no_column_holds() -> None:
    assert describe_outputs((np.zeros(2), np.zeros((2, 1))), 2) == (
        Column("0", "float64"),
        Column("1", "float64", (1,)),
    )
    with pytest.raises(DataError, match="output 0 is complex128: Spark's columns hold bool, int8"):
        describe_outputs(np.zeros(2, complex), 2)


@pytest.mark.parametrize("dtype", ["float16", "uint8", "uint16", "uint32"])
def test_widening_keeps_every_value(dtype: str) -> None:
    kind = np.dtype(dtype)
    info = np.iinfo(kind) if kind.kind == "u" else np.finfo(kind)
    extremes = np.array([info.min, info.max], kind)
    assert np.array_equal(widened(extremes).astype(np.float64), extremes.astype(np.float64))


@pytest.mark.parametrize(
    ("older", "expected"),
    [(None, []), ([{"loss": 1.5}, {"loss": None}], [{"loss": 1.5}, {"loss": math.nan}])],
)
def test_a_history_in_its_older_forms(older: Any, expected: Any) -> None:
    said = ModelDescription((Column("x", "float32", (2,)),), (Column("0", "float64"),), ("y",), 8, [], "run")
    written = json.loads(said.encode()) | {"history": older}
    assert repr(ModelDescription.decode(json.dumps(written).encode()).history) == repr(expected)
    for damaged in ("no list", [7], [{"loss": "low"}]):
        with pytest.raises(msgspec.DecodeError, match="history"):
            ModelDescription.decode(json.dumps(written | {"history": damaged}).encode())


def test_data_that_cannot_be_removed_cost_neither_the_model_nor_the_first_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("the store says no")

    monkeypatch.setattr(Store, "remove", refuse)
    Run(Store.create(tmp_path), "r1").remove_data()
    assert "r1/data could not be removed: the store says no" in caplog.text


def test_a_history_that_has_diverged_survives_its_file() -> None:
    history = [{"loss": 1.5, "val_loss": float("inf")}, {"loss": float("nan"), "val_loss": -float("inf")}]
    said = ModelDescription(
        (Column("x", "float32", (2,)),), (Column("0", "float64"),), ("y",), 8, history, "run"
    )
    assert repr(ModelDescription.decode(said.encode())) == repr(said)


def test_a_feature_must_be_what_the_model_was_trained_on() -> None:
    column = Column("x", "float32", (2,))
    assert as_trained(np.ones((3, 2)), column).dtype == np.float32
    with pytest.raises(
        DataError, match=r"column 'x' has rows of float64 and shape \(3,\); .* float32 and shape \(2,\)"
    ):
        as_trained(np.ones((3, 3)), column)
    with pytest.raises(DataError, match="trained on int64"):
        as_trained(np.ones(3), Column("x", "int64"))
