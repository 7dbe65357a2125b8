"""pyhvd inside Spark: ``pyhvd.spark.run(train, num_proc=4)``, its data, and an Estimator.

Each rank is a process of its own beside a Spark task; the driver makes them one MPI world. The driver needs
pyspark, and the executors pyhvd with MPICH: ``pip install "pyhvd[spark,mpich]"``. With
``launcher="mpiexec"``, driver and executors need Open MPI.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyhvd.job.errors import UnsupportedLauncherError
from pyhvd.spark.api import run
from pyhvd.spark.data.manifest import Column, Dataset
from pyhvd.spark.data.partition import partition
from pyhvd.spark.data.prepare import prepare
from pyhvd.spark.data.shard import Shard, shard
from pyhvd.spark.data.store import Store
from pyhvd.spark.elastic import run_elastic
from pyhvd.spark.errors import DataError, JavaNotFoundError, SparkError, StartTimeoutError
from pyhvd.spark.java import use_java
from pyhvd.spark.ml.numpy_trainer import SGD, NumpyModel
from pyhvd.spark.ml.training import Batch, Training
from pyhvd.spark.resources import get_available_devices

if TYPE_CHECKING:
    from pyhvd.spark.ml.estimator import Estimator
    from pyhvd.spark.ml.model import Model

__all__ = [
    "SGD",
    "Batch",
    "Column",
    "DataError",
    "Dataset",
    "Estimator",
    "JavaNotFoundError",
    "Model",
    "NumpyModel",
    "Shard",
    "SparkError",
    "StartTimeoutError",
    "Store",
    "Training",
    "UnsupportedLauncherError",
    "get_available_devices",
    "partition",
    "prepare",
    "run",
    "run_elastic",
    "shard",
    "use_java",
]


def __getattr__(name: str) -> Any:
    """Import Estimator and Model on first use: they need pyspark, which ranks and tasks do not."""
    if name not in ("Estimator", "Model"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    try:
        return getattr(importlib.import_module(f"pyhvd.spark.ml.{name.lower()}"), name)
    except ModuleNotFoundError as exc:
        if exc.name is not None and exc.name.partition(".")[0] == "pyspark":
            raise SparkError('pyspark is not installed: pip install "pyhvd[spark]"') from None
        raise
