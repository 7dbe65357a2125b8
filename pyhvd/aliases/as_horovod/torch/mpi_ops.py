"""``horovod.torch.mpi_ops``: the verbs, and what programs reach through it."""

from pyhvd.aliases.as_horovod.common.basics import HorovodBasics
from pyhvd.torch import *  # noqa: F403
from pyhvd.torch.mpi_ops import *  # noqa: F403
from pyhvd.torch.mpi_ops import (
    HorovodAllgather as HorovodAllgather,
    HorovodAllreduce as HorovodAllreduce,
    HorovodAlltoall as HorovodAlltoall,
    HorovodBroadcast as HorovodBroadcast,
    HorovodGroupedAllgather as HorovodGroupedAllgather,
    HorovodGroupedAllreduce as HorovodGroupedAllreduce,
    HorovodGroupedReducescatter as HorovodGroupedReducescatter,
    HorovodReducescatter as HorovodReducescatter,
)

_basics = HorovodBasics()
