"""``horovod.elastic.sampler``."""

from pyhvd.elastic import ElasticSampler as ElasticSampler
