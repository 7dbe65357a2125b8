"""Elastic training with JAX: states of pytrees, and ``run``, which finds pyhvd's errors in JAX's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from pyhvd import elastic
from pyhvd.elastic import (
    ElasticSampler as ElasticSampler,
    HostsUpdatedInterrupt as HostsUpdatedInterrupt,
    ObjectState as ObjectState,
    State as State,
    StoreError as StoreError,
    VaultError as VaultError,
    enabled as enabled,
    generation as generation,
    max_size as max_size,
)
from pyhvd.elastic.handlers import Handler
from pyhvd.frameworks.failures import raising_causes

__all__ = [*elastic.__all__, "JaxState"]

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=State)


def run(func: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Let a function go on from the last commit; see :func:`pyhvd.elastic.run`.

    An error of a compiled function that carries one of pyhvd becomes that one, such as HorovodInternalError.
    """
    return elastic.run(raising_causes(jax.errors.JaxRuntimeError)(func))


class _OfTrees(Handler):
    """Pytrees: leaves of JAX are committed as arrays of numpy."""

    def dump(self, value: Any) -> Any:
        return jax.tree.map(lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf, value)

    def load(self, value: Any, dumped: Any) -> Any:
        return jax.tree.map(
            lambda old, new: jnp.asarray(new) if isinstance(old, jax.Array) else new, value, dumped
        )


_TREES = _OfTrees()


class JaxState(ObjectState):
    """A state of pytrees, such as parameters and an optimizer's state; leaves come back as jax arrays.

    A tree must keep its structure. Attributes without a leaf of JAX are committed as in
    :class:`pyhvd.elastic.ObjectState`.

    Parameters
    ----------
    **trees
        The state's attributes.

    Examples
    --------
    >>> state = JaxState(weights=weights, optimizer=optimizer.init(weights), epoch=0)  # doctest: +SKIP
    """

    def __init__(self, **trees: Any) -> None:
        super().__init__(**trees)

    def handler(self, value: Any) -> Handler:
        """Return how an attribute is saved and loaded: a tree with leaves of JAX has a handler of its own."""
        if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value)):
            return _TREES
        return super().handler(value)

    def reset(self) -> None:
        """Forget compiled functions: the number of ranks may have changed."""
        jax.clear_caches()
