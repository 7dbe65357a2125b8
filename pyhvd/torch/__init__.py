"""pyhvd for torch: ``import pyhvd.torch as hvd`` in place of ``import horovod.torch as hvd``.

The names are Horovod's. Those that do not concern tensors are :mod:`pyhvd`'s own.
"""

from pyhvd.api.collectives import (
    Adasum as Adasum,
    Average as Average,
    Max as Max,
    Min as Min,
    Product as Product,
    Sum as Sum,
    allgather_async as allgather_async,
    allreduce_ as allreduce_,
    allreduce_async as allreduce_async,
    allreduce_async_ as allreduce_async_,
    barrier as barrier,
    broadcast_ as broadcast_,
    broadcast_async as broadcast_async,
    broadcast_async_ as broadcast_async_,
    grouped_allgather_async as grouped_allgather_async,
    grouped_allreduce_ as grouped_allreduce_,
    grouped_allreduce_async as grouped_allreduce_async,
    grouped_allreduce_async_ as grouped_allreduce_async_,
    grouped_reducescatter_async as grouped_reducescatter_async,
    join as join,
    reducescatter_async as reducescatter_async,
)
from pyhvd.api.compression import Compressor as Compressor
from pyhvd.api.devices import device_synchronize as device_synchronize
from pyhvd.api.diagnostics import start_timeline as start_timeline, stop_timeline as stop_timeline
from pyhvd.api.handles import Handle as Handle, poll as poll, synchronize as synchronize
from pyhvd.api.lifecycle import init as init, shutdown as shutdown
from pyhvd.api.objects import allgather_object as allgather_object, broadcast_object as broadcast_object
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
from pyhvd.torch import elastic as elastic
from pyhvd.torch.compression import Compression as Compression
from pyhvd.torch.functions import (
    broadcast_buffers as broadcast_buffers,
    broadcast_optimizer_state as broadcast_optimizer_state,
    broadcast_parameters as broadcast_parameters,
)
from pyhvd.torch.mpi_ops import (
    allgather as allgather,
    allreduce as allreduce,
    alltoall as alltoall,
    alltoall_async as alltoall_async,
    broadcast as broadcast,
    grouped_allgather as grouped_allgather,
    grouped_allreduce as grouped_allreduce,
    grouped_reducescatter as grouped_reducescatter,
    reducescatter as reducescatter,
)
from pyhvd.torch.optimizer import DistributedOptimizer as DistributedOptimizer
from pyhvd.torch.sparse import sparse_allreduce_async as sparse_allreduce_async
from pyhvd.torch.sync_batch_norm import (
    SyncBatchNorm as SyncBatchNorm,
    convert_sync_batchnorm as convert_sync_batchnorm,
)
