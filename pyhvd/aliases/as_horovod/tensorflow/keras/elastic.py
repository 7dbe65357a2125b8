"""``horovod.tensorflow.keras.elastic``: :mod:`pyhvd.keras.elastic`."""

from pyhvd.aliases.as_horovod.common.elastic import run_fn as run_fn
from pyhvd.keras.elastic import *  # noqa: F403
