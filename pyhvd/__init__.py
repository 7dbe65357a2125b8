"""pyhvd: Horovod's job in Python: named collectives, negotiated, fused and overlapped, over mpi4py.

``import pyhvd as hvd``, then ``hvd.init()``. Names are loaded as they are first used, so that importing the
package costs nothing and initialises nothing; MPI is first touched by ``init()``. Type checkers and editors
read the same names from ``__init__.pyi``; a test holds the two together.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from pyhvd._version import __version__

_HOMES: dict[str, tuple[str, ...]] = {
    "collectives": (
        *("Adasum", "Average", "Max", "Min", "Product", "Sum"),
        *("allgather", "allgather_async", "allreduce", "allreduce_", "allreduce_async", "allreduce_async_"),
        *("alltoall", "alltoall_async", "barrier"),
        *("broadcast", "broadcast_", "broadcast_async", "broadcast_async_"),
        *("grouped_allgather", "grouped_allgather_async"),
        *("grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_"),
        *("grouped_reducescatter", "grouped_reducescatter_async"),
        *("join", "reducescatter", "reducescatter_async"),
    ),
    "compression": ("Compression", "Compressor"),
    "config": ("Config",),
    "dtypes": ("ReduceOp",),
    "errors": (
        *("ConfigError", "CorruptionError", "DuplicateNameError", "HorovodInternalError"),
        *(
            "HorovodVersionMismatchError",
            "HostsUpdatedInterrupt",
            "InternalError",
            "MismatchError",
            "NotInitializedError",
            "RankFailedError",
            "RankValue",
            "RemoteError",
        ),
        *("ShutDownError", "StallError", "TimelineError", "TransportError"),
        *("UnsupportedDtypeError", "UnsupportedOpError"),
    ),
    "handles": ("Handle", "poll", "synchronize"),
    "inspection": ("Histogram", "Metrics", "metrics"),
    "lifecycle": ("add_process_set", "init", "remove_process_set", "shutdown"),
    "memory": ("empty", "empty_like"),
    "recording": ("start_timeline", "stop_timeline"),
    "objects": ("allgather_object", "broadcast_object"),
    "process_sets": ("ProcessSet", "global_process_set"),
    "topology": (
        *("ccl_built", "cross_rank", "cross_size", "cuda_built", "ddl_built", "gloo_built", "gloo_enabled"),
        *("is_homogeneous", "is_initialized", "local_rank", "local_size"),
        *("mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built", "rank", "rocm_built", "size"),
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *_HOME_OF]

_BY_HAND = {
    "DistributedOptimizer": "average the gradients with grouped_allreduce_() before the optimizer's step",
    "DistributedGradientTape": "average the gradients with grouped_allreduce_() before the optimizer's step",
    "broadcast_parameters": "call broadcast_() for each parameter, in the same order on every rank",
    "broadcast_variables": "call broadcast_() for each variable, in the same order on every rank",
    "broadcast_optimizer_state": "send optimizer.state_dict() with broadcast_object()",
    "sparse_allreduce_async": "gather indices and values with allgather(), and add them up on each rank",
}
"""Horovod's names that are not here, and what does their work."""


def __getattr__(name: str) -> Any:
    """Load a public name from its module (PEP 562)."""
    home = _HOME_OF.get(name)
    if home is None:
        remedy = _BY_HAND.get(name)
        hint = f" yet: {remedy}; see docs/from_horovod.md" if remedy else ""
        raise AttributeError(f"module 'pyhvd' has no attribute {name!r}{hint}")
    value = getattr(importlib.import_module(f"pyhvd.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


for _extension in ("pyhvd._fusion", "pyhvd._engine", "pyhvd._lane"):
    if importlib.util.find_spec(_extension) is None:
        raise ImportError(
            f"pyhvd's extension {_extension} has not been built: install the package with pip"
            " (from a source tree: pip install -e . or python setup.py build_ext --inplace)"
        )
