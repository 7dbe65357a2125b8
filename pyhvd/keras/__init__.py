"""pyhvd for Keras 3: ``import pyhvd.keras as hvd`` in place of ``import horovod.keras as hvd``.

It works with the backends jax, tensorflow and torch, and imports Keras with the backend that
``KERAS_BACKEND`` names. The names are Horovod's; docs/keras.md has the differences.
"""

from pyhvd.api.collectives import (
    Adasum as Adasum,
    Average as Average,
    Max as Max,
    Min as Min,
    Product as Product,
    Sum as Sum,
    barrier as barrier,
    join as join,
)
from pyhvd.api.compression import Compressor as Compressor
from pyhvd.api.diagnostics import start_timeline as start_timeline, stop_timeline as stop_timeline
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
from pyhvd.frameworks.failures import cause_of as cause_of
from pyhvd.keras import callbacks as callbacks, elastic as elastic
from pyhvd.keras.compression import Compression as Compression
from pyhvd.keras.functions import (
    allgather as allgather,
    allreduce as allreduce,
    broadcast as broadcast,
    broadcast_global_variables as broadcast_global_variables,
    broadcast_variables as broadcast_variables,
    reducescatter as reducescatter,
)
from pyhvd.keras.loading import load_model as load_model
from pyhvd.keras.optimizer import (
    DistributedOptimizer as DistributedOptimizer,
    PartialDistributedOptimizer as PartialDistributedOptimizer,
)
from pyhvd.keras.sync_batch_norm import SyncBatchNormalization as SyncBatchNormalization
