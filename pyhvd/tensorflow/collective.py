"""One collective, with gradients: at once on eager tensors, or in a graph by one of the two doors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from pyhvd.api import collectives as core
from pyhvd.backends.host import rows_of
from pyhvd.dtypes import lookup
from pyhvd.errors import UnsupportedDtypeError
from pyhvd.frameworks import callback
from pyhvd.frameworks.calls import TABLE, GraphCall
from pyhvd.tensorflow.door import OpDoor, native_door
from pyhvd.tensorflow.gradients import gradients_of
from pyhvd.tensorflow.internals import check_not_xla, find_site, is_recording
from pyhvd.tensorflow.naming import distinct_name
from pyhvd.tensorflow.terms import CollectiveTerms

_SAME_SHAPES = ("allreduce", "broadcast")
Make = Callable[[CollectiveTerms, Sequence[Any]], list[Any]]


def run(terms: CollectiveTerms, tensors: Sequence[Any]) -> list[Any]:
    """Make a collective; autograd records it if a tape is active, and in graphs.

    Parameters
    ----------
    terms : CollectiveTerms
        With a name in graphs.
    tensors : sequence of tf.Tensor
        The operands: one, or those of a group; tensor and splits (int32; empty: even) of an alltoall.

    Returns
    -------
    list of tf.Tensor
        One result for each tensor; output and received splits (int32) of an alltoall.

    Raises
    ------
    UnsupportedDtypeError
        pyhvd cannot send a dtype, such as that of strings.
    ValueError
        XLA compiles the function that is being traced.
    """
    for tensor in tensors:
        _check_dtype(terms, tensor)
    if tf.executing_eagerly():
        return _recorded(_at_once, terms, tensors) if is_recording() else _at_once(terms, tensors)
    check_not_xla()
    if not tensors:
        return []
    door = native_door()
    if door is None:
        return _recorded(_add_callback, terms, tensors)
    return _add_op(door, terms, tensors)


def run_backward(terms: CollectiveTerms, tensors: Sequence[Any]) -> list[Any]:
    """Make a collective of a backward pass, whose name a graph may have already."""
    if tf.executing_eagerly() or terms.name is None:
        return run(terms, tensors)
    return run(terms.renamed(distinct_name(terms.name)), tensors)


def _check_dtype(terms: CollectiveTerms, tensor: Any) -> None:
    try:
        lookup(np.dtype(tensor.dtype.as_numpy_dtype))
    except UnsupportedDtypeError as exc:
        raise UnsupportedDtypeError(
            f"{terms.verb} of a tensor of {tensor.dtype.name}: {exc}; for other data use broadcast_object or"
            " allgather_object"
        ) from None


def _recorded(make: Make, terms: CollectiveTerms, tensors: Sequence[Any]) -> list[Any]:
    """Make a collective as one operation for tapes and tf.gradients."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def operation(*inputs: Any) -> Any:
        outputs = make(terms, inputs)

        def backward(*upstream: Any) -> list[Any]:
            return gradients_of(run_backward, terms, inputs, outputs, upstream)

        return outputs, backward

    results: list[Any] = operation(*tensors)
    return results


# -- eager ---------------------------------------------------------------------------------------------------


def _at_once(terms: CollectiveTerms, tensors: Sequence[Any]) -> list[Any]:
    common: dict[str, Any] = {"name": terms.name, "process_set": terms.process_set}
    if terms.verb == "broadcast":
        return [core.broadcast(tensors[0], terms.root_rank, **common)]
    if terms.verb == "alltoall":
        splits = tensors[1].numpy()
        output, received = core.alltoall_async(tensors[0], splits if splits.size else None, **common).result()
        return [output, tf.constant(received, tf.int32)]
    if terms.verb != "allgather":
        common |= {"op": terms.op, "prescale_factor": terms.prescale, "postscale_factor": terms.postscale}
    if terms.grouped:
        results: list[Any] = getattr(core, f"grouped_{terms.verb}")(list(tensors), **common)
        return results
    return [getattr(core, terms.verb)(tensors[0], **common)]


# -- in graphs -----------------------------------------------------------------------------------------------


def _as_graph_call(terms: CollectiveTerms, tensors: Sequence[Any]) -> GraphCall:
    assert terms.name is not None
    call = GraphCall.traced(
        f"grouped_{terms.verb}" if terms.grouped else terms.verb,
        terms.name,
        [each.dtype.as_numpy_dtype for each in tensors],
        op=terms.op,
        prescale_factor=terms.prescale,
        postscale_factor=terms.postscale,
        root_rank=terms.root_rank,
        process_set=terms.process_set,
        has_splits=terms.verb == "alltoall",
    )
    return replace(call, site=find_site())


def _add_op(door: OpDoor, terms: CollectiveTerms, tensors: Sequence[Any]) -> list[Any]:
    """Add an op that runs in any order with others, as names pair the ranks' calls."""
    call = _as_graph_call(terms, tensors)
    if terms.verb in _SAME_SHAPES:
        return door.add_same_shapes(call, terms, tensors)
    shapes = [_result_shape(terms, each) for each in tensors]
    if terms.verb == "alltoall":
        shapes[1] = tf.TensorShape([terms.process_set.size()])
    return door.add_other_shapes(call, terms, tensors, shapes)


def _add_callback(terms: CollectiveTerms, tensors: Sequence[Any]) -> list[Any]:
    """Add a call of Python, which waits; TensorFlow runs such calls in the order of the program."""
    key = TABLE.add(_as_graph_call(terms, tensors))

    def call(*arrays: Any) -> Any:
        return callback.run_now(key, *arrays)

    results = tf.numpy_function(call, list(tensors), [each.dtype for each in tensors], stateful=True)
    for source, result in zip(tensors, results, strict=True):
        result.set_shape(source.shape if terms.verb in _SAME_SHAPES else _result_shape(terms, source))
    if terms.verb == "alltoall":
        results[1].set_shape([terms.process_set.size()])
    return list(results)


def _result_shape(terms: CollectiveTerms, source: Any) -> Any:
    """Return what is known of the shape of a result that has other rows than its operand."""
    if not source.shape.rank:
        return tf.TensorShape(None)
    rows = source.shape[0]
    if terms.verb != "reducescatter" or rows is None:
        return tf.TensorShape([None, *source.shape[1:]])
    size, rank = terms.process_set.size(), terms.process_set.rank()
    assert size is not None
    assert rank is not None
    return tf.TensorShape([rows_of(rows, size)[rank], *source.shape[1:]])
