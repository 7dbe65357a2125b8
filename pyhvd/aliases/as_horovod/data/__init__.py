"""``horovod.data``: not there."""

raise ImportError(
    "this horovod is pyhvd, which has no horovod.data: torch.utils.data.DataLoader(num_workers=1) loads"
    " batches beside the training, and pyhvd.torch.elastic.ElasticSampler divides them (docs/elastic.md)"
)
