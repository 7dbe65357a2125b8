"""The modules of Horovod that pyhvd does not have: importing one raises an error with the remedy."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_ARRAYS = "reduce its arrays with pyhvd.grouped_allreduce() (docs/frameworks.md), or install Horovod itself"
_ESTIMATOR = "for models of torch, Keras 3 and numpy use pyhvd.spark.Estimator, see docs/spark_estimator.md"
_ELASTIC_RAY = "start elastic ranks with pyhvd.ray.RayExecutor(min_workers=), see docs/ray.md"
_REMEDIES = {
    "horovod.mxnet": _ARRAYS,
    "horovod.ray.elastic_v2": _ELASTIC_RAY,
    "horovod.spark.common.backend": "give the number of ranks to pyhvd.spark.Estimator(num_proc=) or"
    " pyhvd.spark.run(num_proc=), see docs/spark_estimator.md",
    **dict.fromkeys((f"horovod.spark.{name}" for name in ("keras", "lightning", "torch")), _ESTIMATOR),
    "horovod.spark.common.estimator": _ESTIMATOR,
}


class AbsentModules:
    """Finder and loader of the modules in the table; programs that probe with ``find_spec`` see a module."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:  # noqa: ARG003
        """Return a spec whose loader raises the error; None for other modules."""
        return ModuleSpec(name, cls) if name in _REMEDIES else None  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        """Leave that to the import system."""

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Raise the error of an absent module."""
        name = module.__name__
        raise ImportError(f"this horovod is pyhvd, which has no {name}: {_REMEDIES[name]}", name=name)


def install() -> None:
    """Let imports find the absent modules, after all modules that exist."""
    if AbsentModules not in sys.meta_path:
        sys.meta_path.append(AbsentModules)
