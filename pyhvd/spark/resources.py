"""What Spark has given the task of a rank: the addresses of its devices."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import msgspec

from pyhvd.errors import ConfigError
from pyhvd.job.mpi.rank_env import find_place

_RESOURCES = "_PYHVD_SPARK_RESOURCES"
_BY_LOCAL_RANK = ("PYHVD_SPARK_USE_LOCAL_RANK_GPU_INDEX", "HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX")


def get_available_devices() -> list[str]:
    """Return the GPUs that Spark has assigned to the task of this rank of :func:`pyhvd.spark.run`.

    Spark assigns GPUs where ``spark.task.resource.gpu.amount`` asks for them. No other task has them.

    Returns
    -------
    list of str
        Their addresses, most often CUDA's device numbers; empty if Spark has assigned none. With
        PYHVD_SPARK_USE_LOCAL_RANK_GPU_INDEX=1 in the ranks' environment it is the rank's local rank, for
        executors of which each sees only its own GPUs and numbers them from 0.

    Raises
    ------
    ConfigError
        PYHVD_SPARK_USE_LOCAL_RANK_GPU_INDEX is neither 0 nor 1.

    Examples
    --------
    >>> import pyhvd.spark
    >>> pyhvd.spark.get_available_devices()  # here is no Spark
    []
    """
    place = find_place()
    if place is not None and _by_local_rank(os.environ):
        return [str(place.local_rank)]
    return decode_resources(os.environ).get("gpu", [])


def encode_resources(resources: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the variables by which a rank knows its task's resources: names, and addresses of each."""
    return {_RESOURCES: msgspec.json.encode(resources).decode()}


def decode_resources(environ: Mapping[str, str]) -> dict[str, list[str]]:
    """Return what :func:`encode_resources` was given; nothing outside of a rank."""
    return msgspec.json.decode(environ.get(_RESOURCES, "{}"), type=dict[str, list[str]])


def _by_local_rank(environ: Mapping[str, str]) -> bool:
    for name in _BY_LOCAL_RANK:
        if name in environ:
            if environ[name] not in ("0", "1"):
                raise ConfigError(f"{name}={environ[name]!r}: expected 0 or 1")
            return environ[name] == "1"
    return False
