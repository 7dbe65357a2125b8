"""pyhvd: Horovod's job in Python: named collectives, negotiated, fused and overlapped, over mpi4py.

``import pyhvd as hvd``, then ``hvd.init()``. The package loads each name at its first use, so that the import
costs nothing and initialises nothing. ``init()`` is the first to touch MPI. Type checkers read the same names
from the imports below; a test compares the two.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from pyhvd._version import __version__ as __version__

if TYPE_CHECKING:
    from pyhvd import elastic as elastic
    from pyhvd.api.collectives import (
        Adasum as Adasum,
        Average as Average,
        Max as Max,
        Min as Min,
        Product as Product,
        Sum as Sum,
        allgather as allgather,
        allgather_async as allgather_async,
        allreduce as allreduce,
        allreduce_ as allreduce_,
        allreduce_async as allreduce_async,
        allreduce_async_ as allreduce_async_,
        alltoall as alltoall,
        alltoall_async as alltoall_async,
        barrier as barrier,
        broadcast as broadcast,
        broadcast_ as broadcast_,
        broadcast_async as broadcast_async,
        broadcast_async_ as broadcast_async_,
        grouped_allgather as grouped_allgather,
        grouped_allgather_async as grouped_allgather_async,
        grouped_allreduce as grouped_allreduce,
        grouped_allreduce_ as grouped_allreduce_,
        grouped_allreduce_async as grouped_allreduce_async,
        grouped_allreduce_async_ as grouped_allreduce_async_,
        grouped_reducescatter as grouped_reducescatter,
        grouped_reducescatter_async as grouped_reducescatter_async,
        join as join,
        reducescatter as reducescatter,
        reducescatter_async as reducescatter_async,
    )
    from pyhvd.api.compression import (
        Compression as Compression,
        Compressor as Compressor,
    )
    from pyhvd.api.devices import (
        device_synchronize as device_synchronize,
    )
    from pyhvd.api.diagnostics import (
        Histogram as Histogram,
        Metrics as Metrics,
        metrics as metrics,
        start_timeline as start_timeline,
        stop_timeline as stop_timeline,
    )
    from pyhvd.api.handles import (
        Handle as Handle,
        poll as poll,
        synchronize as synchronize,
    )
    from pyhvd.api.lifecycle import (
        init as init,
        shutdown as shutdown,
    )
    from pyhvd.api.logs import (
        RankFilter as RankFilter,
    )
    from pyhvd.api.memory import (
        empty as empty,
        empty_like as empty_like,
    )
    from pyhvd.api.objects import (
        allgather_object as allgather_object,
        broadcast_object as broadcast_object,
    )
    from pyhvd.api.process_sets import (
        ProcessSet as ProcessSet,
        add_process_set as add_process_set,
        global_process_set as global_process_set,
        remove_process_set as remove_process_set,
    )
    from pyhvd.api.topology import (
        ccl_built as ccl_built,
        cross_rank as cross_rank,
        cross_size as cross_size,
        cuda_built as cuda_built,
        ddl_built as ddl_built,
        gloo_built as gloo_built,
        gloo_enabled as gloo_enabled,
        is_homogeneous as is_homogeneous,
        is_initialized as is_initialized,
        local_rank as local_rank,
        local_size as local_size,
        mpi_built as mpi_built,
        mpi_enabled as mpi_enabled,
        mpi_threads_supported as mpi_threads_supported,
        nccl_built as nccl_built,
        rank as rank,
        rocm_built as rocm_built,
        size as size,
    )
    from pyhvd.config import (
        Config as Config,
    )
    from pyhvd.dtypes import (
        ReduceOp as ReduceOp,
    )
    from pyhvd.errors import (
        ConfigError as ConfigError,
        CorruptionError as CorruptionError,
        DuplicateNameError as DuplicateNameError,
        HorovodInternalError as HorovodInternalError,
        HorovodVersionMismatchError as HorovodVersionMismatchError,
        HostsUpdatedInterrupt as HostsUpdatedInterrupt,
        InternalError as InternalError,
        MismatchError as MismatchError,
        NotInitializedError as NotInitializedError,
        RankFailedError as RankFailedError,
        RankValue as RankValue,
        RemoteError as RemoteError,
        ShutDownError as ShutDownError,
        StallError as StallError,
        TimelineError as TimelineError,
        TransportError as TransportError,
        UnsupportedDtypeError as UnsupportedDtypeError,
        UnsupportedOpError as UnsupportedOpError,
        UnsupportedShapeError as UnsupportedShapeError,
    )
    from pyhvd.job.errors import (
        LaunchError as LaunchError,
    )
    from pyhvd.job.mpi.rank_env import (
        child_environment as child_environment,
    )
    from pyhvd.run.launchers.launch import (
        Hosts as Hosts,
        Ranks as Ranks,
        launch as launch,
    )

_HOMES: dict[str, tuple[str, ...]] = {
    "api.collectives": (
        *("Adasum", "Average", "Max", "Min", "Product", "Sum"),
        *("allgather", "allgather_async", "allreduce", "allreduce_", "allreduce_async", "allreduce_async_"),
        *("alltoall", "alltoall_async", "barrier"),
        *("broadcast", "broadcast_", "broadcast_async", "broadcast_async_"),
        *("grouped_allgather", "grouped_allgather_async"),
        *("grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_"),
        *("grouped_reducescatter", "grouped_reducescatter_async"),
        *("join", "reducescatter", "reducescatter_async"),
    ),
    "api.compression": ("Compression", "Compressor"),
    "config": ("Config",),
    "dtypes": ("ReduceOp",),
    "errors": (
        *("ConfigError", "CorruptionError", "DuplicateNameError", "HorovodInternalError"),
        *("HorovodVersionMismatchError", "HostsUpdatedInterrupt", "InternalError", "MismatchError"),
        *("NotInitializedError", "RankFailedError", "RankValue", "RemoteError"),
        *("ShutDownError", "StallError", "TimelineError", "TransportError"),
        *("UnsupportedDtypeError", "UnsupportedOpError", "UnsupportedShapeError"),
    ),
    "api.devices": ("device_synchronize",),
    "api.handles": ("Handle", "poll", "synchronize"),
    "api.diagnostics": ("Histogram", "Metrics", "metrics", "start_timeline", "stop_timeline"),
    "api.lifecycle": ("init", "shutdown"),
    "api.logs": ("RankFilter",),
    "api.memory": ("empty", "empty_like"),
    "api.objects": ("allgather_object", "broadcast_object"),
    "api.process_sets": ("ProcessSet", "add_process_set", "global_process_set", "remove_process_set"),
    "api.topology": (
        *("ccl_built", "cross_rank", "cross_size", "cuda_built", "ddl_built", "gloo_built", "gloo_enabled"),
        *("is_homogeneous", "is_initialized", "local_rank", "local_size"),
        *("mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built", "rank", "rocm_built", "size"),
    ),
    "job.errors": ("LaunchError",),
    "job.mpi.rank_env": ("child_environment",),
    "run.launchers.launch": ("Hosts", "Ranks", "launch"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

_MODULES = ("elastic",)

__all__ = ["__version__", *_MODULES, *_HOME_OF]

_BY_HAND = {
    "DistributedOptimizer": "for torch use pyhvd.torch, else call grouped_allreduce_() before the step",
    "DistributedGradientTape": "average the gradients with grouped_allreduce_() before the optimizer's step",
    "broadcast_parameters": "for torch use pyhvd.torch, else call broadcast_() for each, in the same order",
    "broadcast_variables": "call broadcast_() for each variable, in the same order on every rank",
    "broadcast_optimizer_state": "for torch use pyhvd.torch, else send the state with broadcast_object()",
    "sparse_allreduce_async": "for torch use pyhvd.torch, else gather indices and values with allgather()",
}
"""Horovod's names that pyhvd lacks, and how to do their work."""


if not TYPE_CHECKING:  # a type checker knows the names above only

    def __getattr__(name: str) -> Any:
        """Load a public name from its module (PEP 562)."""
        if name in _MODULES:
            return importlib.import_module(f"pyhvd.{name}")
        home = _HOME_OF.get(name)
        if home is None:
            remedy = _BY_HAND.get(name)
            hint = f": {remedy}; see docs/from_horovod.md" if remedy else ""
            raise AttributeError(f"module 'pyhvd' has no attribute {name!r}{hint}")
        value = getattr(importlib.import_module(f"pyhvd.{home}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


for _extension in ("pyhvd._fusion", "pyhvd.native.shared_memory"):
    if importlib.util.find_spec(_extension) is None:
        raise ImportError(importlib.import_module("pyhvd.common.unbuilt").explain_unbuilt(_extension))
