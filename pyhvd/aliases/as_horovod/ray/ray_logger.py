"""``horovod.ray.ray_logger``."""

from pyhvd.ray.ray_logger import log as log
