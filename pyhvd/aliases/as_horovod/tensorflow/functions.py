"""``horovod.tensorflow.functions``."""

from pyhvd.tensorflow.functions import *  # noqa: F403
