"""pyhvd for TensorFlow: ``import pyhvd.tensorflow as hvd`` in place of ``import horovod.tensorflow as hvd``.

The names are Horovod's. Those that do not concern tensors are :mod:`pyhvd`'s own.
"""

import importlib
from typing import Any

from pyhvd.api.collectives import (
    Adasum as Adasum,
    Average as Average,
    Max as Max,
    Min as Min,
    Product as Product,
    Sum as Sum,
)
from pyhvd.api.compression import Compressor as Compressor
from pyhvd.api.diagnostics import start_timeline as start_timeline, stop_timeline as stop_timeline
from pyhvd.api.lifecycle import init as init, shutdown as shutdown
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
from pyhvd.errors import (
    DuplicateNameError as DuplicateNameError,
    HorovodInternalError as HorovodInternalError,
    HostsUpdatedInterrupt as HostsUpdatedInterrupt,
    MismatchError as MismatchError,
    NotInitializedError as NotInitializedError,
    RankFailedError as RankFailedError,
    StallError as StallError,
    UnsupportedDtypeError as UnsupportedDtypeError,
    UnsupportedOpError as UnsupportedOpError,
    UnsupportedShapeError as UnsupportedShapeError,
)
from pyhvd.frameworks.failures import cause_of as cause_of
from pyhvd.tensorflow import elastic as elastic
from pyhvd.tensorflow.compression import Compression as Compression
from pyhvd.tensorflow.door import graph_ops as graph_ops
from pyhvd.tensorflow.functions import (
    BroadcastGlobalVariablesHook as BroadcastGlobalVariablesHook,
    allgather_object as allgather_object,
    broadcast_ as broadcast_,
    broadcast_global_variables as broadcast_global_variables,
    broadcast_object as broadcast_object,
    broadcast_object_fn as broadcast_object_fn,
    broadcast_variables as broadcast_variables,
)
from pyhvd.tensorflow.mpi_ops import (
    allgather as allgather,
    allreduce as allreduce,
    alltoall as alltoall,
    barrier as barrier,
    broadcast as broadcast,
    grouped_allgather as grouped_allgather,
    grouped_allreduce as grouped_allreduce,
    grouped_reducescatter as grouped_reducescatter,
    join as join,
    local_rank_op as local_rank_op,
    local_size_op as local_size_op,
    process_set_included_op as process_set_included_op,
    rank_op as rank_op,
    reducescatter as reducescatter,
    size_op as size_op,
)
from pyhvd.tensorflow.optimizer import DistributedOptimizer as DistributedOptimizer
from pyhvd.tensorflow.tape import (
    DistributedGradientTape as DistributedGradientTape,
    PartialDistributedGradientTape as PartialDistributedGradientTape,
)


def __getattr__(name: str) -> Any:
    """Load SyncBatchNormalization, a layer of Keras, when it is asked for."""
    if name == "SyncBatchNormalization":
        return importlib.import_module("pyhvd.keras").SyncBatchNormalization
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
