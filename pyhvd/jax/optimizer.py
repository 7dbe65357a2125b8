"""Averaged gradients: ``grad``, ``value_and_grad``, and a wrapper for optimizers with optax's interface."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pyhvd.api.call import resolve_op
from pyhvd.api.collectives import Average
from pyhvd.api.compression import Compressor, compress_all, decompress_all
from pyhvd.api.process_sets import ProcessSet, global_process_set
from pyhvd.dtypes import ReduceOp
from pyhvd.jax.compression import Compression
from pyhvd.jax.verbs import grouped_allreduce


def value_and_grad(
    fun: Callable[..., Any],
    argnums: Any = 0,
    has_aux: bool = False,  # noqa: FBT001, FBT002 - jax's
    *,
    op: ReduceOp = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    **options: Any,
) -> Callable[..., Any]:
    """Return a function as ``jax.value_and_grad`` does, whose results are averaged over the ranks.

    One call reduces the value and all gradients.

    Parameters
    ----------
    fun, argnums, has_aux, **options
        As for ``jax.value_and_grad``. What ``has_aux`` adds is not reduced.
    op, name, process_set
        As for :func:`pyhvd.jax.allreduce`.

    Returns
    -------
    callable
        Returns ``(value, gradients)``, or ``((value, aux), gradients)``.
    """
    resolve_op(op, average=None)
    inner = jax.value_and_grad(fun, argnums, has_aux, **options)

    @functools.wraps(inner)
    def averaged(*args: Any, **kwargs: Any) -> Any:
        value, gradients = inner(*args, **kwargs)
        own, aux = value if has_aux else (value, None)
        own, gradients = grouped_allreduce((own, gradients), op, name=name, process_set=process_set)
        return (own, aux) if has_aux else own, gradients

    return averaged


def grad(
    fun: Callable[..., Any],
    argnums: Any = 0,
    has_aux: bool = False,  # noqa: FBT001, FBT002 - jax's
    *,
    op: ReduceOp = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    **options: Any,
) -> Callable[..., Any]:
    """Return a function as ``jax.grad`` does, whose gradients are averaged; see :func:`value_and_grad`.

    Returns
    -------
    callable
        Returns the gradients, or ``(gradients, aux)``.
    """
    resolve_op(op, average=None)
    inner = jax.grad(fun, argnums, has_aux, **options)

    @functools.wraps(inner)
    def averaged(*args: Any, **kwargs: Any) -> Any:
        result = inner(*args, **kwargs)
        gradients, aux = result if has_aux else (result, None)
        gradients = grouped_allreduce(gradients, op, name=name, process_set=process_set)
        return (gradients, aux) if has_aux else gradients

    return averaged


class GradientTransformation(NamedTuple):
    """A pair of functions with the names and order of optax's."""

    init: Callable[..., Any]
    update: Callable[..., Any]


class AccumulationState(NamedTuple):
    """The state of an optimizer that reduces in every n-th step.

    Attributes
    ----------
    inner : pytree
        The state of the wrapped optimizer.
    passes : jax.Array of int32
        Backward passes since the last reduction.
    gradients : pytree
        The sums of their gradients.
    """

    inner: Any
    passes: Any
    gradients: Any


def DistributedOptimizer(  # noqa: N802 - Horovod's
    optimizer: Any,
    op: ReduceOp = Average,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    process_set: ProcessSet = global_process_set,
) -> GradientTransformation:
    """Return an optimizer whose ``update`` reduces the gradients over the ranks before the given one's.

    Parameters
    ----------
    optimizer : object
        With optax's ``init(params)`` and ``update(gradients, state, params=None)``.
    op : ReduceOp
        Average or another op.
    compression : Compressor
        ``Compression.fp16`` and ``.bf16`` cast gradients while they travel.
    backward_passes_per_step : int
        With n > 1 the gradients of n calls of ``update`` are summed, then reduced and applied. The other
        calls return zeros as updates. The state is then an :class:`AccumulationState`, else the given
        optimizer's.
    process_set : ProcessSet
        The ranks that take part.

    Returns
    -------
    GradientTransformation
        To be used, also in compiled functions and in ``optax.chain``, as the given one.

    Raises
    ------
    TypeError
        The optimizer lacks ``init`` or ``update``.
    ValueError
        ``backward_passes_per_step`` is less than 1.
    """
    if not callable(getattr(optimizer, "init", None)) or not callable(getattr(optimizer, "update", None)):
        raise TypeError(
            f"DistributedOptimizer takes an object with optax's init and update, not {optimizer!r}"
        )
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step={backward_passes_per_step}: expected a number >= 1")
    resolve_op(op, average=None)

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        leaves, structure = jax.tree.flatten(gradients)
        sent, contexts = compress_all(compression, [jnp.asarray(leaf) for leaf in leaves])
        reduced = decompress_all(compression, grouped_allreduce(sent, op, process_set=process_set), contexts)
        result: tuple[Any, Any]
        result = optimizer.update(jax.tree.unflatten(structure, reduced), state, params, **extra)
        return result

    if backward_passes_per_step == 1:
        return GradientTransformation(optimizer.init, update)
    return _accumulating(GradientTransformation(optimizer.init, update), backward_passes_per_step)


def _accumulating(optimizer: GradientTransformation, passes: int) -> GradientTransformation:
    """Return an optimizer that updates in every n-th call, with the sum of the gradients."""

    def init(params: Any) -> AccumulationState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return AccumulationState(optimizer.init(params), jnp.zeros((), jnp.int32), zeros)

    def update(
        gradients: Any, state: AccumulationState, params: Any = None, **extra: Any
    ) -> tuple[Any, AccumulationState]:
        total = jax.tree.map(jnp.add, state.gradients, gradients)

        def apply() -> tuple[Any, AccumulationState]:
            updates, inner = optimizer.update(total, state.inner, params, **extra)
            return updates, AccumulationState(inner, jnp.zeros((), jnp.int32), _zeros(total))

        def wait() -> tuple[Any, AccumulationState]:
            return _zeros(total), AccumulationState(state.inner, state.passes + 1, total)

        updates, changed = jax.lax.cond(state.passes + 1 == passes, apply, wait)
        return updates, changed

    return GradientTransformation(init, update)


def _zeros(tree: Any) -> Any:
    return jax.tree.map(jnp.zeros_like, tree)
