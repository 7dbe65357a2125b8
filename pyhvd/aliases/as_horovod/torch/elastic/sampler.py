"""``horovod.torch.elastic.sampler``."""

from pyhvd.torch.elastic import ElasticSampler as ElasticSampler
