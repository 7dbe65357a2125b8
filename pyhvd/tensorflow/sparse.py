"""The allreduce of tf.IndexedSlices: the ranks gather each other's rows."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from pyhvd.api.process_sets import ProcessSet
from pyhvd.dtypes import ReduceOp
from pyhvd.errors import UnsupportedOpError
from pyhvd.tensorflow.collective import run
from pyhvd.tensorflow.terms import LINEAR, CollectiveTerms


def reduce_slices(
    slices: Any, op: ReduceOp, factors: tuple[float, float], name: str | None, process_set: ProcessSet
) -> Any:
    """Return the rows of all ranks; Average divides them by the number of ranks.

    Parameters
    ----------
    slices : tf.IndexedSlices
        With the same dtypes on every rank; the number of rows may differ, and may be 0.
    op : ReduceOp
        Average or Sum.
    factors : tuple of float
        Before and after the reduction: both 1.
    name : str or None
        The same on every rank.
    process_set : ProcessSet
        The ranks that take part.

    Raises
    ------
    UnsupportedOpError
        Another op, or other factors; it is a NotImplementedError.
    """
    if op not in LINEAR or factors != (1.0, 1.0):
        raise UnsupportedOpError(
            "allreduce of IndexedSlices supports op=Average and op=Sum without factors, not"
            f" op={op.name.title()} with factors {factors}: pass tf.convert_to_tensor(slices)"
        )
    terms = CollectiveTerms("allgather", name, process_set, grouped=True)
    values, indices = run(terms, [slices.values, slices.indices])
    size = process_set.size()
    assert size is not None
    if op is ReduceOp.AVERAGE:
        values = values / tf.cast(size, values.dtype)
    return tf.IndexedSlices(values, indices, slices.dense_shape)
