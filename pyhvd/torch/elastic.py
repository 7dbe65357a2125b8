"""Elastic training of torch's models: Horovod's ``horovod.torch.elastic``. See docs/elastic.md."""

from __future__ import annotations

import itertools
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
from pyhvd.elastic.handlers import ByStateDict, Handler, register
from pyhvd.torch import optimizer_state

__all__ = [*elastic.__all__, "TorchState"]


class ElasticSampler(elastic.ElasticSampler, torch.utils.data.Sampler[int]):
    """:class:`pyhvd.elastic.ElasticSampler` for a DataLoader; the parameters are the same."""


class _OfModels(ByStateDict):
    """Models; parameters and buffers get the dtype that was saved."""

    def load(self, value: Any, dumped: Any) -> Any:
        value.load_state_dict(dumped)
        own = (value.named_parameters(remove_duplicate=False), value.named_buffers(remove_duplicate=False))
        for name, tensor in itertools.chain(*own):
            saved = dumped.get(name)
            if isinstance(saved, torch.Tensor) and saved.dtype != tensor.dtype:
                tensor.grad = None
                tensor.data = saved.to(tensor.device)
        return value


class _OfOptimizers(Handler):
    """Optimizers; their options, such as the learning rate, are settings."""

    def dump(self, value: Any) -> Any:
        return optimizer_state.take(value)

    def load(self, value: Any, dumped: Any) -> Any:
        optimizer_state.put(value, dumped)
        return value

    def settings(self, value: Any) -> Any:
        return optimizer_state.options_of(value)

    def load_settings(self, value: Any, settings: Any) -> Any:
        optimizer_state.put_options(value, settings, optimizer_state.options_of(value))
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


register(torch.nn.Module, _OfModels())
register(torch.optim.Optimizer, _OfOptimizers())
