"""``horovod.torch.elastic.state``."""

from pyhvd.torch.elastic import ObjectState as ObjectState, TorchState as TorchState
