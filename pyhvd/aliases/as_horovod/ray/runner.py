"""``horovod.ray.runner``."""

from pyhvd.ray import RayExecutor as RayExecutor
