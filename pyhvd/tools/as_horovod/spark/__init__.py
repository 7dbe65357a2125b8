"""``horovod.spark``: :func:`pyhvd.spark.run`."""

from typing import Any

from pyhvd.spark import run as run


def __getattr__(name: str) -> Any:
    if name == "run_elastic":
        raise ImportError("pyhvd has no elastic training in Spark: use run() in place of run_elastic()")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
