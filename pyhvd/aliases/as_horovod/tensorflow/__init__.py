"""``horovod.tensorflow``: not there."""

raise ImportError(
    "this horovod is pyhvd, which has no horovod.tensorflow: reduce its arrays with pyhvd.grouped_allreduce()"
    " (docs/frameworks.md), or install Horovod itself"
)
