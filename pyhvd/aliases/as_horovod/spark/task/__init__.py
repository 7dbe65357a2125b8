"""``horovod.spark.task``."""

from pyhvd.spark import get_available_devices as get_available_devices
