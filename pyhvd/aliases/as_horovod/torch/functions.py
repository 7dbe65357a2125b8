"""``horovod.torch.functions``."""

from pyhvd.torch.functions import *  # noqa: F403
