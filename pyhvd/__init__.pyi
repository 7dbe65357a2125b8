from typing import Final

from pyhvd.collectives import (
    Adasum as Adasum,
)
from pyhvd.collectives import (
    Average as Average,
)
from pyhvd.collectives import (
    Max as Max,
)
from pyhvd.collectives import (
    Min as Min,
)
from pyhvd.collectives import (
    Product as Product,
)
from pyhvd.collectives import (
    Sum as Sum,
)
from pyhvd.collectives import (
    allgather as allgather,
)
from pyhvd.collectives import (
    allgather_async as allgather_async,
)
from pyhvd.collectives import (
    allreduce as allreduce,
)
from pyhvd.collectives import (
    allreduce_ as allreduce_,
)
from pyhvd.collectives import (
    allreduce_async as allreduce_async,
)
from pyhvd.collectives import (
    allreduce_async_ as allreduce_async_,
)
from pyhvd.collectives import (
    alltoall as alltoall,
)
from pyhvd.collectives import (
    alltoall_async as alltoall_async,
)
from pyhvd.collectives import (
    barrier as barrier,
)
from pyhvd.collectives import (
    broadcast as broadcast,
)
from pyhvd.collectives import (
    broadcast_ as broadcast_,
)
from pyhvd.collectives import (
    broadcast_async as broadcast_async,
)
from pyhvd.collectives import (
    broadcast_async_ as broadcast_async_,
)
from pyhvd.collectives import (
    grouped_allgather as grouped_allgather,
)
from pyhvd.collectives import (
    grouped_allgather_async as grouped_allgather_async,
)
from pyhvd.collectives import (
    grouped_allreduce as grouped_allreduce,
)
from pyhvd.collectives import (
    grouped_allreduce_ as grouped_allreduce_,
)
from pyhvd.collectives import (
    grouped_allreduce_async as grouped_allreduce_async,
)
from pyhvd.collectives import (
    grouped_allreduce_async_ as grouped_allreduce_async_,
)
from pyhvd.collectives import (
    grouped_reducescatter as grouped_reducescatter,
)
from pyhvd.collectives import (
    grouped_reducescatter_async as grouped_reducescatter_async,
)
from pyhvd.collectives import (
    join as join,
)
from pyhvd.collectives import (
    reducescatter as reducescatter,
)
from pyhvd.collectives import (
    reducescatter_async as reducescatter_async,
)
from pyhvd.compression import (
    Compression as Compression,
)
from pyhvd.compression import (
    Compressor as Compressor,
)
from pyhvd.config import (
    Config as Config,
)
from pyhvd.dtypes import (
    ReduceOp as ReduceOp,
)
from pyhvd.errors import (
    ConfigError as ConfigError,
)
from pyhvd.errors import (
    CorruptionError as CorruptionError,
)
from pyhvd.errors import (
    DuplicateNameError as DuplicateNameError,
)
from pyhvd.errors import (
    HorovodInternalError as HorovodInternalError,
)
from pyhvd.errors import (
    HorovodVersionMismatchError as HorovodVersionMismatchError,
)
from pyhvd.errors import (
    HostsUpdatedInterrupt as HostsUpdatedInterrupt,
)
from pyhvd.errors import (
    InternalError as InternalError,
)
from pyhvd.errors import (
    MismatchError as MismatchError,
)
from pyhvd.errors import (
    NotInitializedError as NotInitializedError,
)
from pyhvd.errors import (
    RankFailedError as RankFailedError,
)
from pyhvd.errors import (
    RankValue as RankValue,
)
from pyhvd.errors import (
    RemoteError as RemoteError,
)
from pyhvd.errors import (
    ShutDownError as ShutDownError,
)
from pyhvd.errors import (
    StallError as StallError,
)
from pyhvd.errors import (
    TimelineError as TimelineError,
)
from pyhvd.errors import (
    TransportError as TransportError,
)
from pyhvd.errors import (
    UnsupportedDtypeError as UnsupportedDtypeError,
)
from pyhvd.errors import (
    UnsupportedOpError as UnsupportedOpError,
)
from pyhvd.handles import (
    Handle as Handle,
)
from pyhvd.handles import (
    poll as poll,
)
from pyhvd.handles import (
    synchronize as synchronize,
)
from pyhvd.inspection import (
    Histogram as Histogram,
)
from pyhvd.inspection import (
    Metrics as Metrics,
)
from pyhvd.inspection import (
    metrics as metrics,
)
from pyhvd.lifecycle import (
    add_process_set as add_process_set,
)
from pyhvd.lifecycle import (
    init as init,
)
from pyhvd.lifecycle import (
    remove_process_set as remove_process_set,
)
from pyhvd.lifecycle import (
    shutdown as shutdown,
)
from pyhvd.memory import (
    empty as empty,
)
from pyhvd.memory import (
    empty_like as empty_like,
)
from pyhvd.objects import (
    allgather_object as allgather_object,
)
from pyhvd.objects import (
    broadcast_object as broadcast_object,
)
from pyhvd.process_sets import (
    ProcessSet as ProcessSet,
)
from pyhvd.process_sets import (
    global_process_set as global_process_set,
)
from pyhvd.recording import (
    start_timeline as start_timeline,
)
from pyhvd.recording import (
    stop_timeline as stop_timeline,
)
from pyhvd.topology import (
    ccl_built as ccl_built,
)
from pyhvd.topology import (
    cross_rank as cross_rank,
)
from pyhvd.topology import (
    cross_size as cross_size,
)
from pyhvd.topology import (
    cuda_built as cuda_built,
)
from pyhvd.topology import (
    ddl_built as ddl_built,
)
from pyhvd.topology import (
    gloo_built as gloo_built,
)
from pyhvd.topology import (
    gloo_enabled as gloo_enabled,
)
from pyhvd.topology import (
    is_homogeneous as is_homogeneous,
)
from pyhvd.topology import (
    is_initialized as is_initialized,
)
from pyhvd.topology import (
    local_rank as local_rank,
)
from pyhvd.topology import (
    local_size as local_size,
)
from pyhvd.topology import (
    mpi_built as mpi_built,
)
from pyhvd.topology import (
    mpi_enabled as mpi_enabled,
)
from pyhvd.topology import (
    mpi_threads_supported as mpi_threads_supported,
)
from pyhvd.topology import (
    nccl_built as nccl_built,
)
from pyhvd.topology import (
    rank as rank,
)
from pyhvd.topology import (
    rocm_built as rocm_built,
)
from pyhvd.topology import (
    size as size,
)

__version__: Final[str]
__all__: list[str]
