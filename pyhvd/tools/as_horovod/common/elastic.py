"""``horovod.common.elastic``."""

from pyhvd.elastic import ObjectState as ObjectState, State as State
