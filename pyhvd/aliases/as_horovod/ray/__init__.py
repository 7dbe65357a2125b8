"""``horovod.ray``: :class:`pyhvd.ray.RayExecutor`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyhvd.aliases.as_horovod.ray import ray_logger as ray_logger
from pyhvd.ray import BaseHorovodWorker as BaseHorovodWorker

if TYPE_CHECKING:
    from pyhvd.ray import RayExecutor as RayExecutor


def __getattr__(name: str) -> Any:
    if name != "RayExecutor":  # ranks do not need it
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pyhvd.ray import RayExecutor

    return RayExecutor
