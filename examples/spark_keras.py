"""Train a Keras 3 model inside Spark, from a DataFrame of points to a model and its accuracy.

    DataFrame -> Estimator.fit (ranks inside the executors) -> model -> transform

The points of three classes are made up: each class lies around a centre of its own.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from typing import TYPE_CHECKING, Any

import numpy as np

import pyhvd.spark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CENTRES = np.array([[2.0, 0.0, 0.0, 1.0], [0.0, 2.0, 1.0, 0.0], [-1.0, -1.0, 2.0, 2.0]])
RUN = "keras"
GOOD = 0.95


def make_points(count: int, seed: int) -> tuple[Any, Any]:
    """Return points, and the class of each."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, len(CENTRES), count)
    return CENTRES[labels] + draw.normal(0.0, 0.6, (count, CENTRES.shape[1])), labels


def load(spark: SparkSession, count: int, seed: int) -> DataFrame:
    """Return a DataFrame with columns point and label."""
    points, labels = make_points(count, seed)
    rows = [(point.tolist(), int(label)) for point, label in zip(points, labels, strict=True)]
    return spark.createDataFrame(rows, "point array<double>, label int")


def start_spark(num_proc: int) -> SparkSession:
    """Return a session in this process; it uses the Java that pip installed if there is no other."""
    pyhvd.spark.use_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(RUN).master(f"local[{num_proc}]")
    builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.ui.enabled", "false")
    builder = builder.config("spark.log.level", "ERROR").config("spark.ui.showConsoleProgress", "false")
    session: SparkSession = builder.getOrCreate()
    return session


def make_model(hidden: int) -> Any:
    """Return a Keras model from a point to a score for each class."""
    import keras

    return keras.Sequential(
        [
            keras.Input(CENTRES.shape[1:]),
            keras.layers.Dense(hidden, "relu"),
            keras.layers.Dense(len(CENTRES)),
        ]
    )


def train(frame: DataFrame, folder: str, options: argparse.Namespace) -> Any:
    """Train on ranks inside the executors; return the model as a transformer of Spark ML."""
    import keras

    estimator = pyhvd.spark.Estimator(
        model=make_model(options.hidden),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.Adam(options.lr),
        store=pyhvd.spark.Store.create(folder),
        feature_cols=["point"],
        label_cols=["label"],
        num_proc=options.num_proc,
        batch_size=options.batch_size,
        epochs=options.epochs,
        seed=options.seed,
        verbose=0,
    )
    return estimator.fit(frame)


def evaluate(model: Any, frame: DataFrame) -> float:
    """Return the share of points that the trained model classifies correctly."""
    rows = model.transform(frame).select("label", "label__output").collect()
    return float(np.mean([int(np.argmax(row.label__output)) == row.label for row in rows]))


def main() -> None:
    """Run the example; exit with an error if the accuracy is below GOOD."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example:\n  python examples/spark_keras.py --num-proc 4",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--num-proc", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--rows", type=int, default=1200, help="rows of the DataFrame (default: 1200)")
    parser.add_argument("--epochs", type=int, default=5, help="passes over the data (default: 5)")
    parser.add_argument("--batch-size", type=int, default=32, help="rows per step and rank (default: 32)")
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate (default: 0.01)")
    parser.add_argument("--hidden", type=int, default=32, help="hidden units (default: 32)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    parser.add_argument("--backend", default="tensorflow", help="of Keras: tensorflow, jax or torch")
    options = parser.parse_args()
    os.environ.update(KERAS_BACKEND=options.backend, TF_CPP_MIN_LOG_LEVEL="2")
    spark = start_spark(options.num_proc)
    try:
        with tempfile.TemporaryDirectory(prefix="pyhvd-keras-") as folder:
            model = train(load(spark, options.rows, options.seed), folder, options)
            accuracy = evaluate(model, load(spark, 600, options.seed + 1))
    finally:
        spark.stop()
    losses = [measures["loss"] for measures in model.history]
    print(f"trained on {options.num_proc} ranks: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    print(f"accuracy {accuracy:.1%} on new points", flush=True)
    if accuracy < GOOD:
        sys.exit(f"the accuracy must be at least {GOOD:.0%}")


if __name__ == "__main__":
    main()
