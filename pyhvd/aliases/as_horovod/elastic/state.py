"""``horovod.elastic.state``."""

from pyhvd.elastic import ObjectState as ObjectState, State as State
