"""``horovod.ray.elastic``."""

from pyhvd.ray import ElasticRayExecutor as ElasticRayExecutor
from pyhvd.ray.discovery import RayHostDiscovery as RayHostDiscovery
