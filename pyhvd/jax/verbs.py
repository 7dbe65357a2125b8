"""The verbs for JAX: in compiled functions and out of them, with gradients.

Outside of a trace a verb is that of :mod:`pyhvd`: it waits, and returns arrays of JAX. In a trace, such as
that of ``jax.jit``, it becomes a part of the program.

Gradients
---------
With n ranks, allreduce and alltoall have the gradient of a sum of all ranks' losses. Those of allgather and
broadcast are 1/n of it, and that of reducescatter is n times it, as in :mod:`pyhvd.torch`. The gradients are
collectives too, so all ranks must take them, or none. That of a named call is named ``<name>.grad``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pyhvd.api import collectives
from pyhvd.api.call import resolve_op
from pyhvd.api.collectives import Adasum, Average, Product, Sum
from pyhvd.api.process_sets import ProcessSet, global_process_set
from pyhvd.api.topology import rank
from pyhvd.dtypes import ReduceOp
from pyhvd.errors import UnsupportedOpError
from pyhvd.frameworks.calls import GraphCall
from pyhvd.jax.collective import in_trace, run

_LINEAR = (Average, Sum)


class CallTerms(NamedTuple):
    """What a call and its gradient need beside tensors; it is hashable."""

    name: str
    process_set: ProcessSet
    op: ReduceOp = Average
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0

    def of_gradient(self, **changes: Any) -> CallTerms:
        """Return the terms of a call in the backward pass."""
        return self._replace(name=f"{self.name}.grad" if self.name else "", **changes)


def _call(verb: str, terms: CallTerms, tensors: Sequence[Any]) -> list[Any]:
    """Run a verb, as a group if there are several tensors, on arrays or tracers; no derivative."""
    if not tensors:
        return []
    call = GraphCall.traced(
        verb if len(tensors) == 1 else f"grouped_{verb}",
        terms.name,
        [each.dtype for each in tensors],
        op=terms.op,
        prescale_factor=terms.prescale,
        postscale_factor=terms.postscale,
        root_rank=terms.root,
        process_set=terms.process_set,
    )
    return run(call, tensors)


def _has_none(gradient: Any) -> bool:
    """Return whether this is the gradient of an array of integers, which has none."""
    return bool(gradient.dtype == jax.dtypes.float0)


def _on_floats(
    function: Any, terms: CallTerms, gradients: Sequence[Any], *others: Sequence[Any]
) -> list[Any]:
    """Call a function of gradients, but for those of integers, which have none."""
    places = [k for k, each in enumerate(gradients) if not _has_none(each)]
    picked = [[each[k] for k in places] for each in (gradients, *others)]
    results = list(gradients)
    for k, result in zip(places, function(terms, *picked), strict=True):
        results[k] = result
    return results


# -- allreduce -----------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _allreduce(terms: CallTerms, tensors: list[Any]) -> list[Any]:
    return _call("allreduce", terms, tensors)


def _allreduce_forward(terms: CallTerms, tensors: list[Any]) -> tuple[list[Any], Any]:
    results = _allreduce(terms, tensors)
    return results, None if terms.op in _LINEAR else (tensors, results)


def _allreduce_backward(terms: CallTerms, kept: Any, gradients: list[Any]) -> tuple[list[Any]]:
    if terms.op in _LINEAR:
        return (_on_floats(_allreduce, terms.of_gradient(), gradients),)
    if terms.op is Adasum:
        raise UnsupportedOpError(
            "the gradient of op=Adasum is not defined: pass jax.lax.stop_gradient(tensor), or use another op"
        )
    tensors, results = kept
    return (_on_floats(_gradients_of_others, terms, gradients, tensors, results),)


def _gradients_of_others(
    terms: CallTerms, gradients: list[Any], tensors: list[Any], results: list[Any]
) -> list[Any]:
    """Return the gradients of Min, Max and Product."""
    if terms.op is Product:
        marked = [each == 0 for each in tensors]
    else:
        marked = [mine == result for mine, result in zip(tensors, results, strict=True)]
    n = len(gradients)
    own = [mark.astype(each.dtype) for mark, each in zip(marked, gradients, strict=True)]
    summed = _allreduce(terms.of_gradient(op=Sum), [*gradients, *own])
    totals, counts = summed[:n], summed[n:]
    if terms.op is not Product:
        return [total * mine / count for total, mine, count in zip(totals, own, counts, strict=True)]
    filled = [jnp.where(mark, jnp.ones_like(x), x) for mark, x in zip(marked, tensors, strict=True)]
    others = terms.of_gradient(op=Product)
    products = _allreduce(others._replace(name=others.name and f"{others.name}.others"), filled)
    return [
        total * jnp.where(zeros == mine, product / x, jnp.zeros_like(product))
        for total, mine, zeros, product, x in zip(totals, own, counts, products, filled, strict=True)
    ]


_allreduce.defvjp(_allreduce_forward, _allreduce_backward)


def reduce_leaves(terms: CallTerms, tensors: list[Any]) -> list[Any]:
    """Return the reduced tensors; factors of an op that is not linear are multiplications of their own."""
    if not in_trace():
        return _call("allreduce", terms, tensors)
    reduced: list[Any]
    if terms.op in _LINEAR or terms.op is Adasum:
        reduced = _allreduce(terms, tensors)
        return reduced
    before, after = terms.prescale, terms.postscale
    plain = _allreduce(
        terms._replace(prescale=1.0, postscale=1.0), [_scaled(each, before) for each in tensors]
    )
    return [_scaled(each, after) for each in plain]


def _scaled(tensor: Any, factor: float) -> Any:
    return tensor if factor == 1.0 else tensor * jnp.asarray(factor, tensor.dtype)


def allreduce(
    x: Any,
    op: ReduceOp = Average,
    *,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce an array over the ranks; every rank gets the result.

    The gradient of Average and Sum is the gradients' Average or Sum, with the same factors. That of Min and
    Max goes to the ranks that hold the extreme, in equal parts. That of Product is the product of the other
    ranks' elements. Adasum has none. ``jax.vmap`` treats the batch as a part of the array.

    Parameters
    ----------
    x : array
        Of the same shape and dtype on every rank.
    op : ReduceOp
        Average, Sum, Adasum, Min, Max or Product.
    name : str, optional
        The same on every rank. In a compiled function the default is made of the dtype, the shape and a
        count, so give names where ranks may compile different programs.
    prescale_factor, postscale_factor : float
        Factors before and after the reduction.
    process_set : ProcessSet
        The ranks that take part.

    Returns
    -------
    jax.Array
        Of the array's shape and dtype.

    Raises
    ------
    MismatchError
        The ranks submitted different shapes, dtypes or ops under this name. From a compiled function it comes
        as ``jax.errors.JaxRuntimeError``; see :func:`pyhvd.jax.cause_of`.
    HorovodInternalError
        Another rank failed, or pyhvd was shut down; likewise.
    ValueError
        The function is compiled for more than one device of this process.
    """
    terms = CallTerms(
        name or "", process_set, resolve_op(op, average=None), prescale_factor, postscale_factor
    )
    return reduce_leaves(terms, [jnp.asarray(x)])[0]


def grouped_allreduce(
    tree: Any,
    op: ReduceOp = Average,
    *,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce all leaves of a pytree in one call; see :func:`allreduce`.

    Returns
    -------
    pytree
        Of the same structure. Dtypes of leaves may differ.
    """
    leaves, structure = jax.tree.flatten(tree)
    terms = CallTerms(
        name or "", process_set, resolve_op(op, average=None), prescale_factor, postscale_factor
    )
    return jax.tree.unflatten(structure, reduce_leaves(terms, [jnp.asarray(each) for each in leaves]))


# -- allgather -----------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _allgather(terms: CallTerms, tensors: list[Any]) -> list[Any]:
    return _call("allgather", terms, tensors)


def _allgather_forward(terms: CallTerms, tensors: list[Any]) -> tuple[list[Any], None]:
    results = _allgather(terms, tensors)
    size = _place(terms)[0]
    for each, result in zip(tensors, results, strict=True):
        if len(result) != len(each) * size:
            raise ValueError(
                f"the gradient of allgather needs equal numbers of rows, but this rank gave {len(each)} of"
                f" {len(result)} in all: pad the array, or call allgather outside of jax.grad"
            )
    return results, None


def _allgather_backward(terms: CallTerms, _: None, gradients: list[Any]) -> tuple[list[Any]]:
    size, place = _place(terms)
    totals = _on_floats(_allreduce, terms.of_gradient(op=Average), gradients)
    return ([each.reshape(size, len(each) // size, *each.shape[1:])[place] for each in totals],)


def _place(terms: CallTerms) -> tuple[int, int]:
    """Return the size of the process set, and this rank's place in it."""
    size, place = terms.process_set.size(), terms.process_set.rank()
    if size is None or place is None:
        raise ValueError(f"this rank is not a member of {terms.process_set}")
    return size, place


_allgather.defvjp(_allgather_forward, _allgather_backward)


def allgather(x: Any, *, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Concatenate the ranks' arrays along dimension 0, in rank order.

    The gradient is the Average of the ranks' gradients of this rank's rows.

    Parameters
    ----------
    x : array
        With at least one dimension. In compiled functions, and where gradients are taken, all ranks need
        equal shapes; elsewhere the number of rows may differ.
    name, process_set
        As for :func:`allreduce`.

    Returns
    -------
    jax.Array
        The rows of all ranks.

    Raises
    ------
    UnsupportedShapeError
        The array has no dimension.
    HorovodInternalError
        As for :func:`allreduce`; and the ranks' shapes differ in a compiled function.
    """
    return _allgather(CallTerms(name or "", process_set), [jnp.asarray(x)])[0]


def grouped_allgather(
    tree: Any, *, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Gather all leaves of a pytree in one call; see :func:`allgather`."""
    leaves, structure = jax.tree.flatten(tree)
    terms = CallTerms(name or "", process_set)
    return jax.tree.unflatten(structure, _allgather(terms, [jnp.asarray(each) for each in leaves]))


# -- broadcast -----------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _broadcast(terms: CallTerms, tensor: Any) -> Any:
    return _call("broadcast", terms, [tensor])[0]


def _broadcast_forward(terms: CallTerms, tensor: Any) -> tuple[Any, None]:
    return _broadcast(terms, tensor), None


def _broadcast_backward(terms: CallTerms, _: None, gradient: Any) -> tuple[Any]:
    total = _on_floats(_allreduce, terms.of_gradient(op=Average), [gradient])[0]
    if rank() == terms.root or _has_none(gradient):
        return (total,)
    return (total * 0,)


_broadcast.defvjp(_broadcast_forward, _broadcast_backward)


def broadcast(
    x: Any, root_rank: int = 0, *, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the root's array on every rank.

    On the root the gradient is the Average of the ranks' gradients, elsewhere zero. ``jax.vmap`` treats the
    batch as a part of the array.

    Parameters
    ----------
    x : array
        Of the same shape and dtype on every rank. Only the root's contents matter.
    root_rank : int
        A global rank, also for a smaller process set.
    name, process_set
        As for :func:`allreduce`, as are the errors.
    """
    return _broadcast(CallTerms(name or "", process_set, root=root_rank), jnp.asarray(x))


# -- alltoall ------------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _alltoall(terms: CallTerms, tensor: Any) -> Any:
    return _call("alltoall", terms, [tensor])[0]


def _alltoall_forward(terms: CallTerms, tensor: Any) -> tuple[Any, None]:
    return _alltoall(terms, tensor), None


def _alltoall_backward(terms: CallTerms, _: None, gradient: Any) -> tuple[Any]:
    def back(terms: CallTerms, gradients: list[Any]) -> list[Any]:
        return [_alltoall(terms, each) for each in gradients]

    return (_on_floats(back, terms.of_gradient(), [gradient])[0],)


_alltoall.defvjp(_alltoall_forward, _alltoall_backward)


def alltoall(
    x: Any, splits: Any = None, *, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send a part of dimension 0 to each rank; return the parts that the ranks sent here, in rank order.

    The gradient is the alltoall in the other direction.

    Parameters
    ----------
    x : array
        Its number of rows must divide by the number of ranks, unless splits are given. In compiled functions
        all ranks need equal shapes.
    splits : sequence of int, optional
        The number of rows for each rank; not in a trace.
    name, process_set
        As for :func:`allreduce`, as are the errors.

    Returns
    -------
    jax.Array, or (jax.Array, numpy.ndarray of int32)
        The rows; if splits were given, also the number of rows from each rank.

    Raises
    ------
    TypeError
        Splits are given in a trace, where shapes must be known.
    ValueError
        The rows do not divide by the number of ranks.
    """
    if splits is None:
        return _alltoall(CallTerms(name or "", process_set), jnp.asarray(x))
    require_no_trace("alltoall with splits", x, splits, remedy="leave out the splits")
    return collectives.alltoall(jnp.asarray(x), np.asarray(splits), name, process_set)


# -- reducescatter -------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _reducescatter(terms: CallTerms, tensors: list[Any]) -> list[Any]:
    return _call("reducescatter", terms, tensors)


def _reducescatter_forward(terms: CallTerms, tensors: list[Any]) -> tuple[list[Any], None]:
    results = _reducescatter(terms, tensors)
    size = _place(terms)[0]
    rows = [len(each) for each in tensors]
    if any(each % size for each in rows):
        raise ValueError(
            f"the gradient of reducescatter needs numbers of rows that divide by {size}, not {rows}: pad the"
            " array"
        )
    return results, None


def _reducescatter_backward(terms: CallTerms, _: None, gradients: list[Any]) -> tuple[list[Any]]:
    size = _place(terms)[0]
    factor = terms.prescale * terms.postscale * (size if terms.op is Sum else 1)

    def gather(terms: CallTerms, gradients: list[Any]) -> list[Any]:
        gathered: list[Any] = _allgather(terms, [_scaled(each, factor) for each in gradients])
        return gathered

    plain = terms.of_gradient(op=Average, prescale=1.0, postscale=1.0)
    return (
        [
            np.zeros((len(each) * size, *each.shape[1:]), each.dtype) if _has_none(each) else each
            for each in _on_floats(gather, plain, gradients)
        ],
    )


_reducescatter.defvjp(_reducescatter_forward, _reducescatter_backward)


def reducescatter(
    x: Any,
    op: ReduceOp = Average,
    *,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce an array over the ranks, and give each rank its part of dimension 0.

    The gradient is the allgather of the ranks' gradients, times the factors, and for Sum times the number of
    ranks. It needs a number of rows that divides by the number of ranks.

    Parameters
    ----------
    x : array
        Of the same shape and dtype on every rank, with at least one dimension. If its rows do not divide by
        the number of ranks, the first ranks get one row more.
    op, name, prescale_factor, postscale_factor, process_set
        As for :func:`allreduce`, as are the errors.
    """
    terms = CallTerms(name or "", process_set, op, prescale_factor, postscale_factor)
    return _reducescatter(terms, [jnp.asarray(x)])[0]


# -- traces --------------------------------------------------------------------------------------------


def require_no_trace(what: str, *values: Any, remedy: str) -> None:
    """Raise TypeError if a value is a tracer."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values)):
        raise TypeError(f"{what} cannot be compiled: call it outside of jit, grad and vmap, or {remedy}")
