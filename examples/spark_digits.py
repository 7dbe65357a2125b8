"""Train on handwritten digits inside Spark, from a DataFrame of pixels to a DataFrame of predictions.

    DataFrame -> prepare (Parquet) -> run (4 ranks, each reads its shard) -> model in a store -> DataFrame

The data are the 1797 scanned digits that come with scikit-learn. A fifth of them is held out: at the end,
Spark's tasks apply the trained network to them. Without arguments, the example starts Spark in this process.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import pyhvd.spark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Array = npt.NDArray[Any]
Arrays = dict[str, Array]

CLASSES = 10
PIXELS = 64
RUN = "digits"
GOOD = 0.95


# -- data ----------------------------------------------------------------------------------------------


def load(spark: SparkSession, seed: int) -> tuple[DataFrame, DataFrame]:
    """Return a training and a held-out DataFrame, with columns pixels (64 numbers from 0 to 1) and label."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit("this example needs the digits of scikit-learn: pip install scikit-learn")
    images, labels = load_digits(return_X_y=True)
    rows = [((image / 16.0).tolist(), int(label)) for image, label in zip(images, labels, strict=True)]
    digits = spark.createDataFrame(rows, "pixels array<double>, label int")
    training, held_out = digits.randomSplit([0.8, 0.2], seed)
    return training, held_out


# -- model ---------------------------------------------------------------------------------------------


def new_parameters(hidden: int, seed: int) -> Arrays:
    """Return weights for pixels -> hidden (ReLU) -> classes."""
    draw = np.random.default_rng(seed)
    return {
        "hidden.weight": draw.normal(0.0, np.sqrt(2 / PIXELS), (PIXELS, hidden)),
        "hidden.bias": np.zeros(hidden),
        "output.weight": draw.normal(0.0, np.sqrt(1 / hidden), (hidden, CLASSES)),
        "output.bias": np.zeros(CLASSES),
    }


def forward(parameters: Arrays, images: Array) -> tuple[Array, Array]:
    """Return the hidden layer's activations and the score of each class."""
    hidden = np.maximum(images @ parameters["hidden.weight"] + parameters["hidden.bias"], 0.0)
    return hidden, hidden @ parameters["output.weight"] + parameters["output.bias"]


def backward(parameters: Arrays, images: Array, labels: Array) -> tuple[float, Arrays]:
    """Return the mean cross-entropy of a batch, and its gradients."""
    hidden, scores = forward(parameters, images)
    scores -= scores.max(axis=1, keepdims=True)
    log_probability = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    rows = np.arange(len(labels))
    error = np.exp(log_probability)
    error[rows, labels] -= 1.0
    error /= len(labels)
    back = (error @ parameters["output.weight"].T) * (hidden > 0.0)
    gradients = {
        "hidden.weight": images.T @ back,
        "hidden.bias": back.sum(axis=0),
        "output.weight": hidden.T @ error,
        "output.bias": error.sum(axis=0),
    }
    return -float(log_probability[rows, labels].mean()), gradients


# -- training, on every rank ---------------------------------------------------------------------------


def train(store: pyhvd.spark.Store, options: argparse.Namespace) -> list[float]:
    """Train on this rank's shard; return the loss of every epoch. Rank 0 saves the network."""
    import pyhvd as hvd

    hvd.init()
    data = pyhvd.spark.shard(store.get_train_data_path(), batch_size=options.batch_size, seed=options.seed)
    parameters = new_parameters(options.hidden, options.seed)  # equal on every rank, since the seed is
    velocity = {name: np.zeros_like(value) for name, value in parameters.items()}
    losses = []
    for epoch in range(options.epochs):
        lr = options.lr * (1 - epoch / options.epochs)
        total = 0.0
        for batch in data.epoch(epoch):
            loss, gradients = backward(parameters, batch["pixels"], batch["label"])
            # All ranks have equally many rows in a step: the ranks' average is the average of all rows.
            averages = hvd.grouped_allreduce(list(gradients.values()), name="gradients")
            for name, average in zip(gradients, averages, strict=True):
                velocity[name] = 0.9 * velocity[name] + average
                parameters[name] -= lr * velocity[name]
            total += loss
        losses.append(float(hvd.allreduce(np.array(total / data.steps), name="loss")))
        if hvd.rank() == 0 and (epoch + 1) % max(options.epochs // 5, 1) == 0:
            print(f"epoch {epoch + 1:3d} of {options.epochs}  loss {losses[-1]:.4f}")
    if hvd.rank() == 0:
        save(store, parameters)
    return losses


def model_path(store: pyhvd.spark.Store) -> str:
    """Return the path of the trained network in the store."""
    return f"{store.get_checkpoint_path(RUN)}/model.npz"


def save(store: pyhvd.spark.Store, parameters: Arrays) -> None:
    """Write the network to the store."""
    file = io.BytesIO()
    np.savez(file, **parameters)  # type: ignore[arg-type]
    store.write(model_path(store), file.getvalue())


# -- and back to a DataFrame ---------------------------------------------------------------------------


def transform(df: DataFrame, store: pyhvd.spark.Store) -> DataFrame:
    """Return the DataFrame with an added column, prediction; Spark's tasks apply the network."""
    from pyspark.sql.types import IntegerType, StructField, StructType

    with np.load(io.BytesIO(store.read(model_path(store)))) as saved:
        parameters = dict(saved)

    def predict(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        for batch in batches:
            images = np.asarray(batch.column("pixels").flatten()).reshape(-1, PIXELS)
            _, scores = forward(parameters, images)
            prediction = pa.array(scores.argmax(axis=1), pa.int32())
            names = [*batch.schema.names, "prediction"]
            yield pa.RecordBatch.from_arrays([*batch.columns, prediction], names=names)

    return df.mapInArrow(predict, StructType([*df.schema.fields, StructField("prediction", IntegerType())]))


# -- the driver ----------------------------------------------------------------------------------------


def start_spark(options: argparse.Namespace) -> SparkSession:
    """Return a session; it uses the Java that pip installed if there is no other."""
    pyhvd.spark.use_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName("digits").master(options.master or f"local[{options.num_proc}]")
    if options.master is None:
        builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.ui.enabled", "false")
    on_terminal = str(sys.stderr.isatty()).lower()
    builder = builder.config("spark.log.level", "ERROR").config("spark.ui.showConsoleProgress", on_terminal)
    session: SparkSession = builder.getOrCreate()
    return session


def work(spark: SparkSession, folder: str, options: argparse.Namespace) -> float:
    """Prepare, train and transform; return the share of held-out digits classified correctly."""
    from pyspark.sql import functions

    store = pyhvd.spark.Store.create(folder)
    training, held_out = load(spark, options.seed)
    dataset = pyhvd.spark.prepare(
        training, store.get_train_data_path(), seed=options.seed, num_files=options.num_proc, overwrite=True
    )
    columns = ", ".join(f"{each.name} {each.dtype}{list(each.shape) or ''}" for each in dataset.columns)
    print(f"prepared {dataset.rows} rows in {len(dataset.parts)} files: {columns}", flush=True)
    start = time.perf_counter()
    # One thread per rank, since there are as many ranks as slots.
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    results = pyhvd.spark.run(train, (store, options), num_proc=options.num_proc, env=threads)
    losses = results[0]
    print(
        f"trained on {len(results)} ranks in {time.perf_counter() - start:.1f} s:"
        f" loss {losses[0]:.4f} -> {losses[-1]:.4f}, saved in {model_path(store)}",
        flush=True,
    )
    predicted = transform(held_out, store)
    hits = functions.sum((predicted["prediction"] == predicted["label"]).cast("int"))
    digits = predicted.groupBy("label").agg(functions.count("*").alias("images"), hits.alias("found")).cache()
    digits.orderBy("label").show()
    images, found = (int(number) for number in digits.selectExpr("sum(images)", "sum(found)").first())
    print(f"held-out accuracy {found / images:.1%} ({images} images)", flush=True)
    return found / images


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example:\n  python examples/spark_digits.py --num-proc 2 --folder /tmp/digits",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--num-proc", type=int, default=4, help="ranks (default: 4)")
    parser.add_argument("--master", help="URL of a Spark cluster (default: one in this process)")
    parser.add_argument(
        "--folder",
        help="path or URL for the data and the network, shared by driver and executors"
        " (default: a temporary folder)",
    )
    parser.add_argument("--epochs", type=int, default=30, help="passes over the data (default: 30)")
    parser.add_argument("--batch-size", type=int, default=16, help="rows per step and rank (default: 16)")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate, falling to 0 (default: 0.1)")
    parser.add_argument("--hidden", type=int, default=64, help="hidden units (default: 64)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    options = parser.parse_args()
    if min(options.num_proc, options.epochs, options.batch_size, options.hidden) < 1:
        parser.error("--num-proc, --epochs, --batch-size and --hidden must be at least 1")
    return options


def main() -> None:
    """Run the example; exit with an error if the accuracy is below GOOD."""
    options = parse()
    with tempfile.TemporaryDirectory(prefix="pyhvd-digits-") as temporary:
        spark = start_spark(options)
        try:
            accuracy = work(spark, options.folder or temporary, options)
        finally:
            spark.stop()
    if accuracy < GOOD:
        sys.exit(f"the accuracy must be at least {GOOD:.0%}")


if __name__ == "__main__":
    main()
