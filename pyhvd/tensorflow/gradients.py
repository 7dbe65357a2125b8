"""The gradients of the verbs: the table of docs/tensorflow.md, which is that of docs/torch.md.

Backward passes call collectives too: all ranks must have recorded a call, or none. The collective of a call
named ``x`` is named ``x.grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from pyhvd.api.topology import rank
from pyhvd.dtypes import ReduceOp
from pyhvd.errors import UnsupportedOpError
from pyhvd.tensorflow.terms import LINEAR, CollectiveTerms

Run = Callable[[CollectiveTerms, Sequence[Any]], list[Any]]
"""Makes a collective, in which gradients can be recorded again."""


def gradients_of(
    run: Run, terms: CollectiveTerms, inputs: Sequence[Any], outputs: Sequence[Any], upstream: Sequence[Any]
) -> list[Any]:
    """Return the gradient of each input of a collective; None for an input that has none.

    Parameters
    ----------
    run : callable
        Makes the collectives of the backward pass.
    terms : CollectiveTerms
        The terms of the forward pass.
    inputs, outputs : sequence of tf.Tensor
        Those of the forward pass.
    upstream : sequence of tf.Tensor or None
        The gradient of each output; None where its dtype has no gradients.
    """
    if terms.verb == "alltoall":
        return _of_alltoall(run, terms, inputs, outputs, upstream[0])
    places = [place for place, each in enumerate(upstream) if each is not None and _has_gradient(each)]
    picked = [[each[place] for place in places] for each in (inputs, outputs, upstream)]
    results: list[Any] = [None] * len(inputs)
    if places:
        for place, result in zip(places, _OF_VERBS[terms.verb](run, terms, *picked), strict=True):
            results[place] = result
    return results


def _has_gradient(tensor: Any) -> bool:
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def _named(terms: CollectiveTerms, what: str = "grad", **changes: Any) -> CollectiveTerms:
    """Return the terms of a collective of the backward pass."""
    return replace(terms, name=None if terms.name is None else f"{terms.name}.{what}", **changes)


def _of_allreduce(run: Run, terms: CollectiveTerms, inputs: Any, outputs: Any, upstream: Any) -> list[Any]:
    if terms.op in LINEAR:
        return run(_named(terms), upstream)
    if terms.op is ReduceOp.ADASUM:
        raise UnsupportedOpError(
            "the gradient of op=Adasum is not defined: apply tf.stop_gradient to its input, or its result"
        )
    of_product = terms.op is ReduceOp.PRODUCT
    marks = [x == 0 if of_product else x == y for x, y in zip(inputs, outputs, strict=True)]
    mine = [tf.cast(mark, each.dtype) for mark, each in zip(marks, upstream, strict=True)]
    n = len(upstream)
    summed = run(_named(terms, op=ReduceOp.SUM, grouped=True), [*upstream, *mine])
    triples = list(zip(summed[:n], mine, summed[n:], strict=True))
    if not of_product:
        return [total * own / all_ranks for total, own, all_ranks in triples]
    filled = [tf.where(mark, tf.ones_like(x), x) for mark, x in zip(marks, inputs, strict=True)]
    products = run(_named(terms, "grad.others", grouped=True), filled)
    return [
        total * tf.where(zeros == missing, product / own, tf.zeros_like(product))
        for (total, missing, zeros), product, own in zip(triples, products, filled, strict=True)
    ]


def _of_allgather(run: Run, terms: CollectiveTerms, inputs: Any, _: Any, upstream: Any) -> list[Any]:
    """Return this rank's rows of the averaged gradients; the ranks tell each other their numbers of rows."""
    average = replace(terms, verb="allreduce", op=ReduceOp.AVERAGE)
    whole = run(_named(average), upstream)
    own = tf.stack([tf.shape(each, tf.int64)[0] for each in inputs])[tf.newaxis]
    (rows,) = run(_named(terms, "grad.rows", grouped=False), [own])
    firsts = tf.reduce_sum(rows[: terms.process_set.rank()], axis=0)
    results = []
    for place, (gradient, source) in enumerate(zip(whole, inputs, strict=True)):
        part = gradient[firsts[place] : firsts[place] + own[0, place]]
        results.append(tf.ensure_shape(part, source.shape))
    return results


def _of_broadcast(run: Run, terms: CollectiveTerms, _: Any, __: Any, upstream: Any) -> list[Any]:
    totals = run(_named(terms, verb="allreduce", op=ReduceOp.AVERAGE), upstream)
    return totals if rank() == terms.root_rank else [tf.zeros_like(each) for each in totals]


def _of_reducescatter(run: Run, terms: CollectiveTerms, inputs: Any, _: Any, upstream: Any) -> list[Any]:
    size = terms.process_set.size()
    assert size is not None
    factor = terms.prescale * terms.postscale * (size if terms.op is ReduceOp.SUM else 1)
    scaled = [each * tf.cast(factor, each.dtype) for each in upstream] if factor != 1 else upstream
    results = run(_named(terms, verb="allgather"), scaled)
    return [tf.ensure_shape(each, source.shape) for each, source in zip(results, inputs, strict=True)]


def _of_alltoall(run: Run, terms: CollectiveTerms, inputs: Any, outputs: Any, upstream: Any) -> list[Any]:
    """Send the gradients back; rows that were not sent have the gradient zero."""
    back, _ = run(_named(terms), [upstream, outputs[1]])
    source = inputs[0]
    shape = tf.shape(source)
    unsent = tf.concat([shape[:1] - tf.shape(back)[:1], shape[1:]], 0)
    whole = tf.concat([back, tf.zeros(unsent, back.dtype)], 0)
    return [tf.ensure_shape(whole, source.shape), None]


_OF_VERBS: dict[str, Callable[..., list[Any]]] = {
    "allreduce": _of_allreduce,
    "allgather": _of_allgather,
    "broadcast": _of_broadcast,
    "reducescatter": _of_reducescatter,
}
