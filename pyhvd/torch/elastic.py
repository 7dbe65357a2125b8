"""Elastic training of torch's models: Horovod's ``horovod.torch.elastic``. See docs/elastic.md."""

from __future__ import annotations

from typing import Any

import torch

from pyhvd import elastic
from pyhvd.elastic import (
    HostsUpdatedInterrupt as HostsUpdatedInterrupt,
    ObjectState as ObjectState,
    State as State,
    StoreError as StoreError,
    VaultError as VaultError,
    enabled as enabled,
    generation as generation,
    max_size as max_size,
    run as run,
)
from pyhvd.elastic.handlers import ByStateDict, Handler

__all__ = [*elastic.__all__, "TorchState"]

# Not options: the parameters themselves, and their names.
_FIXED = ("params", "param_names")


class ElasticSampler(elastic.ElasticSampler, torch.utils.data.Sampler[int]):
    """:class:`pyhvd.elastic.ElasticSampler` for a DataLoader; the parameters are the same."""


class _OfOptimizers(ByStateDict):
    """Optimizers; their options, such as the learning rate, are settings."""

    def settings(self, value: Any) -> Any:
        return [{name: group[name] for name in group if name not in _FIXED} for group in value.param_groups]

    def load_settings(self, value: Any, settings: Any) -> Any:
        for group, options in zip(value.param_groups, settings, strict=True):
            for name, option in options.items():
                own = group.get(name)
                if isinstance(own, torch.Tensor) and isinstance(option, torch.Tensor):
                    own.copy_(option)  # a CUDA graph may refer to it
                else:
                    group[name] = option
        return value


class TorchState(ObjectState):
    """A state with models and optimizers, which stay the same objects and load what was committed.

    An assignment such as ``state.model = other`` replaces an object. Schedulers, gradient scalers and
    samplers have ``state_dict`` and ``load_state_dict`` too, and also stay the same objects. All else is
    committed as in :class:`pyhvd.elastic.ObjectState`.

    Parameters
    ----------
    model : torch.nn.Module, optional
        A model; more of them may have any keyword.
    optimizer : torch.optim.Optimizer, optional
        An optimizer, distributed or not; more of them may have any keyword.
    **attributes
        The state's other attributes.

    Examples
    --------
    >>> state = TorchState(model, optimizer, sampler=sampler, epoch=0)  # doctest: +SKIP
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **attributes: Any) -> None:
        super().__init__(model=model, optimizer=optimizer, **attributes)

    def handler(self, value: Any) -> Handler:
        return _OF_OPTIMIZERS if isinstance(value, torch.optim.Optimizer) else super().handler(value)


_OF_OPTIMIZERS = _OfOptimizers()
