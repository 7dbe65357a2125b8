"""``horovod.ray.runner``; importing it needs Ray."""

from pyhvd.ray import RayExecutor as RayExecutor
