"""``horovod.torch.sync_batch_norm``."""

from pyhvd.torch.sync_batch_norm import *  # noqa: F403
