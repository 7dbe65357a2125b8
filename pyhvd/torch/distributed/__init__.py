"""pyhvd as a backend of torch.distributed: ``import pyhvd.torch.distributed``, then

>>> torch.distributed.init_process_group("pyhvd")  # doctest: +SKIP

All that stands on torch.distributed on CPUs then runs on pyhvd: DDP, FSDP, DTensor, checkpoints.
"""

from pyhvd.torch.distributed.backend import register
from pyhvd.torch.distributed.errors import (
    CollectiveError as CollectiveError,
    CollectiveTimeoutError as CollectiveTimeoutError,
)
from pyhvd.torch.distributed.process_group import ProcessGroup as ProcessGroup

register()
