"""``horovod.tensorflow.elastic``."""

from pyhvd.tensorflow.elastic import *  # noqa: F403
