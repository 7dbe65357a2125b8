"""``horovod.torch.optimizer``."""

from pyhvd.torch.optimizer import (
    DistributedOptimizer as DistributedOptimizer,
    _DistributedOptimizer as _DistributedOptimizer,
)
