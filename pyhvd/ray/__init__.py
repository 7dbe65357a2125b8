"""pyhvd on Ray: Horovod's executors, whose ranks live from ``start()`` to ``shutdown()``, or are elastic.

An actor on each host holds the host's agent, and the agent starts the ranks, processes of their own. The
driver and all nodes need pyhvd with MPICH and Ray: ``pip install "pyhvd[ray,mpich]"``. Ranks import no Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pyhvd.ray import ray_logger as ray_logger
from pyhvd.ray.errors import RayError, StartTimeoutError
from pyhvd.ray.worker import BaseHorovodWorker

if TYPE_CHECKING:
    from pyhvd.ray.elastic_executor import ElasticRayExecutor
    from pyhvd.ray.executor import RayExecutor

__all__ = [
    "BaseHorovodWorker",
    "ElasticRayExecutor",
    "RayError",
    "RayExecutor",
    "StartTimeoutError",
    "ray_logger",
]
_EXECUTORS = {"ElasticRayExecutor": "elastic_executor", "RayExecutor": "executor"}


def __getattr__(name: str) -> Any:
    """Import an executor on first use: ranks do not need it."""
    if name not in _EXECUTORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"pyhvd.ray.{_EXECUTORS[name]}"), name)
