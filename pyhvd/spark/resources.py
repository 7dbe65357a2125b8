"""The devices that Spark has assigned to a rank's task."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from pyhvd.errors import ConfigError
from pyhvd.job.mpi.rank_env import read_rank_env

RESOURCES = "_PYHVD_SPARK_RESOURCES"
"""The variable with the resources of a rank's task: names, and the addresses of each, as JSON."""
_BY_LOCAL_RANK = ("PYHVD_SPARK_USE_LOCAL_RANK_GPU_INDEX", "HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX")


def get_available_devices() -> list[str]:
    """Return the GPUs that Spark has assigned to the task of this rank of :func:`pyhvd.spark.run`.

    Spark assigns GPUs if ``spark.task.resource.gpu.amount`` is set, each to one task.

    Returns
    -------
    list of str
        Their addresses, usually CUDA's device numbers; empty if Spark has assigned none. With
        PYHVD_SPARK_USE_LOCAL_RANK_GPU_INDEX=1 in the ranks' environment it is the local rank, for executors
        that each number their own GPUs from 0.

    Raises
    ------
    ConfigError
        PYHVD_SPARK_USE_LOCAL_RANK_GPU_INDEX is neither 0 nor 1.

    Examples
    --------
    >>> import pyhvd.spark
    >>> pyhvd.spark.get_available_devices()  # outside Spark
    []
    """
    rank_env = read_rank_env()
    if rank_env is not None and _by_local_rank(os.environ):
        return [str(rank_env.local_rank)]
    resources: dict[str, list[str]] = json.loads(os.environ.get(RESOURCES, "{}"))
    return resources.get("gpu", [])


def _by_local_rank(environ: Mapping[str, str]) -> bool:
    for name in _BY_LOCAL_RANK:
        if name in environ:
            if environ[name] not in ("0", "1"):
                raise ConfigError(f"{name}={environ[name]!r}: expected 0 or 1")
            return environ[name] == "1"
    return False
