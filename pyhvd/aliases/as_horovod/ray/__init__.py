"""``horovod.ray``: the executors of :mod:`pyhvd.ray`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyhvd.aliases.as_horovod.ray import ray_logger as ray_logger
from pyhvd.ray import BaseHorovodWorker as BaseHorovodWorker

if TYPE_CHECKING:
    from pyhvd.ray import ElasticRayExecutor as ElasticRayExecutor, RayExecutor as RayExecutor


def __getattr__(name: str) -> Any:
    if name not in ("ElasticRayExecutor", "RayExecutor"):  # ranks do not need them
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import pyhvd.ray

    return getattr(pyhvd.ray, name)
