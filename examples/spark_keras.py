"""Train a Keras 3 model inside Spark, from a DataFrame of points to a model and its accuracy.

    DataFrame -> prepare (Parquet) -> run (2 ranks, each reads its shard) -> model in a store

The points of three classes are made up: each class lies around a centre of its own. TensorFlow is the backend
of Keras. The lines that pyhvd needs are marked.
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


# -- training, on every rank ---------------------------------------------------------------------------


def train(store: pyhvd.spark.Store, options: argparse.Namespace) -> list[float]:
    """Train on this rank's shard; return the loss of every epoch. Rank 0 saves the model."""
    os.environ.update(KERAS_BACKEND="tensorflow", TF_CPP_MIN_LOG_LEVEL="2")
    import keras

    import pyhvd as hvd

    hvd.init()  # pyhvd
    keras.utils.set_random_seed(options.seed + hvd.rank())  # other weights on each rank, then rank 0's
    model = keras.Sequential(
        [
            keras.Input(CENTRES.shape[1:]),
            keras.layers.Dense(options.hidden, "relu"),
            keras.layers.Dense(len(CENTRES)),
        ]
    )
    model.set_weights(hvd.broadcast_object(model.get_weights(), root_rank=0))  # pyhvd
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(distribute(keras.optimizers.Adam(options.lr)), loss, jit_compile=False)  # pyhvd
    data = pyhvd.spark.shard(store.get_train_data_path(), batch_size=options.batch_size, seed=options.seed)
    losses = []
    for epoch in range(options.epochs):
        # All ranks have equally many batches.
        total = sum(model.train_on_batch(batch["point"], batch["label"]) for batch in data.epoch(epoch))
        losses.append(float(hvd.allreduce(np.float64(total / data.steps), name="loss")))  # pyhvd
    if hvd.rank() == 0:
        with tempfile.TemporaryDirectory() as folder:
            model.save(f"{folder}/model.keras")
            with open(f"{folder}/model.keras", "rb") as file:
                store.write(model_path(store), file.read())
    return losses


def distribute(optimizer: Any) -> Any:
    """Let an optimizer of Keras average the ranks' gradients before it applies them, and return it."""
    import tensorflow as tf

    import pyhvd as hvd

    def reduce(*arrays: Any) -> list[Any]:
        return hvd.grouped_allreduce(arrays, name="gradients")

    def average(gradients: list[Any]) -> list[Any]:
        # One group: ops of a graph run in any order, and several could wait for each other in a circle.
        averages = tf.numpy_function(reduce, gradients, [each.dtype for each in gradients])
        return [tf.ensure_shape(new, old.shape) for new, old in zip(averages, gradients, strict=True)]

    apply = optimizer.apply
    optimizer.apply = lambda gradients, *others: apply(average(gradients), *others)
    return optimizer


def model_path(store: pyhvd.spark.Store) -> str:
    """Return the path of the trained model in the store."""
    return f"{store.get_checkpoint_path(RUN)}/model.keras"


# -- the driver ----------------------------------------------------------------------------------------


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


def evaluate(store: pyhvd.spark.Store, folder: str, seed: int) -> float:
    """Return the share of new points that the trained model classifies correctly."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import keras

    path = f"{folder}/loaded.keras"
    with open(path, "wb") as file:
        file.write(store.read(model_path(store)))
    points, labels = make_points(600, seed + 1)
    scores = keras.models.load_model(path, compile=False).predict(points, verbose=0)
    return float((scores.argmax(axis=1) == labels).mean())


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
    options = parser.parse_args()
    spark = start_spark(options.num_proc)
    try:
        with tempfile.TemporaryDirectory(prefix="pyhvd-keras-") as folder:
            store = pyhvd.spark.Store.create(folder)
            frame = load(spark, options.rows, options.seed)
            pyhvd.spark.prepare(frame, store.get_train_data_path(), num_files=options.num_proc)
            results = pyhvd.spark.run(train, (store, options), num_proc=options.num_proc)
            accuracy = evaluate(store, folder, options.seed)
    finally:
        spark.stop()
    print(f"trained on {len(results)} ranks: loss {results[0][0]:.4f} -> {results[0][-1]:.4f}")
    print(f"accuracy {accuracy:.1%} on new points", flush=True)
    if accuracy < GOOD:
        sys.exit(f"the accuracy must be at least {GOOD:.0%}")


if __name__ == "__main__":
    main()
