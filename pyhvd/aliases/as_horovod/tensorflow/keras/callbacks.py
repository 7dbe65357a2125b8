"""``horovod.tensorflow.keras.callbacks``: :mod:`pyhvd.keras.callbacks`."""

from pyhvd.keras.callbacks import *  # noqa: F403
