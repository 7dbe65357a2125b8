"""``horovod.ray``: not there."""

raise ImportError(
    "this horovod is pyhvd, which has no horovod.ray: reduce its arrays with pyhvd.grouped_allreduce()"
    " (docs/frameworks.md), or install Horovod itself"
)
