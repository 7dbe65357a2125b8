"""Training inside Spark's executors: ``pyhvd.spark.run(train, num_proc=4)``.

Every rank is a process of its own beside a Spark task; the driver makes them one MPI world. Needs pyspark
and, on the executors, pyhvd with MPICH: ``pip install "pyhvd[spark,mpich]"``.
"""

from __future__ import annotations

from pyhvd.spark.api import run
from pyhvd.spark.data.manifest import Column, Dataset
from pyhvd.spark.data.partition import partition
from pyhvd.spark.data.reading import Shard, shard
from pyhvd.spark.data.store import Store
from pyhvd.spark.data.writing import prepare
from pyhvd.spark.errors import (
    DataError,
    JavaNotFoundError,
    SparkError,
    StartTimeoutError,
    UnsupportedLauncherError,
)
from pyhvd.spark.java import use_java

__all__ = [
    "Column",
    "DataError",
    "Dataset",
    "JavaNotFoundError",
    "Shard",
    "SparkError",
    "StartTimeoutError",
    "Store",
    "UnsupportedLauncherError",
    "partition",
    "prepare",
    "run",
    "shard",
    "use_java",
]
