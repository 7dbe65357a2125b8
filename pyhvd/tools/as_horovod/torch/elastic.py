"""``horovod.torch.elastic``: not there."""

raise ImportError(
    "pyhvd has no elastic training: save checkpoints, and start the job anew from the last one"
    " (docs/torch.md)"
)
