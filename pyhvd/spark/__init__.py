"""Training inside Spark's executors: ``pyhvd.spark.run(train, num_proc=4)``.

Every rank is a process of its own beside a Spark task; the driver makes them one MPI world. Needs pyspark
and, on the executors, pyhvd with MPICH: ``pip install "pyhvd[spark,mpich]"``.
"""

from __future__ import annotations

from pyhvd.spark.api import run
from pyhvd.spark.errors import JavaNotFoundError, SparkError, StartTimeoutError, UnsupportedLauncherError
from pyhvd.spark.java import use_java
from pyhvd.spark.task import get_available_devices

__all__ = [
    "JavaNotFoundError",
    "SparkError",
    "StartTimeoutError",
    "UnsupportedLauncherError",
    "get_available_devices",
    "run",
    "use_java",
]
