"""``horovod.torch.elastic.state``."""

from __future__ import annotations

from typing import NoReturn

from pyhvd.torch.elastic import ObjectState as ObjectState, TorchState as TorchState

_HANDLERS = {"StateHandler", "ModelStateHandler", "OptimizerStateHandler", "SamplerStateHandler"}
_REGISTRY = {"get_handler_registry", "set_handler_registry"}


def __getattr__(name: str) -> NoReturn:
    """Say what replaces Horovod's handlers; by ImportError, whose text ``from ... import`` shows."""
    if name in _HANDLERS | _REGISTRY:
        raise ImportError(
            f"this horovod is pyhvd, whose TorchState needs no handlers and has no {name}: it keeps models,"
            " optimizers, samplers and every object that has state_dict() and load_state_dict()"
            " (docs/elastic.md)"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
