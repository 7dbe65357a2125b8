"""pyhvd for JAX: collectives in compiled functions, with gradients; ``import pyhvd.jax as hvd``.

Names that do not concern arrays are :mod:`pyhvd`'s own.
"""

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
from pyhvd.jax import elastic as elastic
from pyhvd.jax.compression import Compression as Compression
from pyhvd.jax.door import graph_ops as graph_ops
from pyhvd.jax.functions import (
    allgather_object as allgather_object,
    barrier as barrier,
    broadcast_object as broadcast_object,
    broadcast_variables as broadcast_variables,
    join as join,
)
from pyhvd.jax.optimizer import (
    DistributedOptimizer as DistributedOptimizer,
    grad as grad,
    value_and_grad as value_and_grad,
)
from pyhvd.jax.verbs import (
    allgather as allgather,
    allreduce as allreduce,
    alltoall as alltoall,
    broadcast as broadcast,
    grouped_allgather as grouped_allgather,
    grouped_allreduce as grouped_allreduce,
    reducescatter as reducescatter,
)
