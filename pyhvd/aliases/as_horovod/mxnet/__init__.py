"""``horovod.mxnet``: not there."""

raise ImportError(
    "this horovod is pyhvd, which has no horovod.mxnet: reduce its arrays with pyhvd.grouped_allreduce()"
    " (docs/frameworks.md), or install Horovod itself"
)
