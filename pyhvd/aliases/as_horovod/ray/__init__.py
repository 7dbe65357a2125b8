"""``horovod.ray``: not there."""

raise ImportError(
    "this horovod is pyhvd, which has no horovod.ray: start the ranks with pyhvd.launch(fn, np=4), or with"
    " pyhvdrun -H on Ray's hosts (docs/many_hosts.md), or install Horovod itself"
)
