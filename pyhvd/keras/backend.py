"""The doors to the backends of Keras: how a collective enters a step that the backend compiles or records.

A door has no state. It imports its backend when the first call needs it, so that ``import pyhvd.keras``
imports Keras's own backend alone.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from pyhvd.api import collectives
from pyhvd.api.collectives import Average, Sum
from pyhvd.api.process_sets import ProcessSet, global_process_set
from pyhvd.dtypes import ReduceOp


class CallTerms(NamedTuple):
    """What all tensors of one reduction share."""

    name: str
    op: ReduceOp = Average
    prescale: float = 1.0
    postscale: float = 1.0
    process_set: ProcessSet = global_process_set

    def allreduce(self, tensors: Sequence[Any]) -> list[Any]:
        """Reduce tensors that have memory, as one unit."""
        return collectives.grouped_allreduce(
            list(tensors),
            name=self.name,
            op=self.op,
            prescale_factor=self.prescale,
            postscale_factor=self.postscale,
            process_set=self.process_set,
        )


class Door:
    """What the adapter needs of a backend; this class serves a backend without compiled steps."""

    def reduce(self, tensors: Sequence[Any], terms: CallTerms) -> list[Any]:
        """Reduce tensors as one unit, outside of a compiled step or inside of it."""
        return terms.allreduce(tensors)

    def eager(self, tensor: Any) -> Any:
        """Return a tensor that no gradient follows; raise ValueError if a compiled step is being traced."""
        return tensor

    def trace(self) -> Any:
        """Return the step that is being traced; two calls in one trace return equal objects, else None."""

    def total(self, tensor: Any, name: str, process_set: ProcessSet) -> Any:
        """Return the ranks' sum of a tensor, with its gradient: the sum of the ranks' gradients."""
        raise NotImplementedError

    def densify(self, tensor: Any) -> Any:
        """Return a gradient as a dense tensor."""
        return tensor

    def is_sparse(self, tensor: Any) -> bool:  # noqa: ARG002 - of the interface
        """Return whether a gradient is sparse, which is reduced by its rows."""
        return False

    def scaled(self, tensor: Any, factor: float) -> Any:
        """Return a gradient, dense or sparse, times a factor."""
        return tensor * factor

    def reduce_sparse(self, tensor: Any, terms: CallTerms) -> Any:
        """Reduce a sparse gradient by its rows."""
        raise NotImplementedError

    def at_updates(self, optimizer: Any, change: Callable[[list[Any]], list[Any]], grads: list[Any]) -> Any:  # noqa: ARG002
        """Change gradients in the steps that update variables; the others only accumulate gradients."""
        return change(grads)

    def check_step(self) -> None:
        """Raise ValueError if the step under way cannot hold a collective."""

    def strategy(self) -> Any:
        """Return what distributes models over devices, if it is active."""
        return keras.distribution.distribution()


_IN_A_STEP = (
    "the verbs of pyhvd.keras run outside of compiled steps; inside use {module}, or DistributedOptimizer and"
    " SyncBatchNormalization"
)


class _Jax(Door):
    def eager(self, tensor: Any) -> Any:
        import jax

        if isinstance(tensor, jax.core.Tracer):
            raise ValueError(_IN_A_STEP.format(module="pyhvd.jax"))
        return tensor

    def trace(self) -> Any:
        import jax

        return jax.core.get_opaque_trace_state(convention="flax")

    def reduce(self, tensors: Sequence[Any], terms: CallTerms) -> list[Any]:
        import jax
        from jax.experimental import io_callback

        if not any(isinstance(each, jax.core.Tracer) for each in tensors):
            return terms.allreduce(tensors)

        def call(*arrays: Any) -> list[Any]:
            return terms.allreduce([np.asarray(each) for each in arrays])

        like = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in tensors]
        return list(io_callback(call, like, *tensors, ordered=True))

    def total(self, tensor: Any, name: str, process_set: ProcessSet) -> Any:
        import jax

        def add_up(tensor: Any) -> Any:
            return self.reduce([tensor], CallTerms(name, Sum, process_set=process_set))[0]

        def backward(_: None, gradient: Any) -> Any:
            return tuple(self.reduce([gradient], CallTerms(f"{name}.grad", Sum, process_set=process_set)))

        total: Any = jax.custom_vjp(add_up)
        total.defvjp(lambda tensor: (add_up(tensor), None), backward)
        return total(tensor)

    def at_updates(self, optimizer: Any, change: Callable[[list[Any]], list[Any]], grads: list[Any]) -> Any:
        import jax

        steps = optimizer.gradient_accumulation_steps
        if not steps:
            return change(grads)
        is_update = (optimizer._iterations.value + 1) % steps == 0
        return jax.lax.cond(is_update, change, list, grads)


class _TensorFlow(Door):
    def eager(self, tensor: Any) -> Any:
        import tensorflow as tf

        if not tf.executing_eagerly():
            raise ValueError(_IN_A_STEP.format(module="pyhvd.tensorflow"))
        return tensor

    def trace(self) -> Any:
        import tensorflow as tf

        return None if tf.executing_eagerly() else weakref.ref(tf.compat.v1.get_default_graph())

    def reduce(self, tensors: Sequence[Any], terms: CallTerms) -> list[Any]:
        import tensorflow as tf

        if tf.executing_eagerly():
            return terms.allreduce(tensors)
        dtypes = [each.dtype for each in tensors]
        results = tf.numpy_function(lambda *arrays: terms.allreduce(arrays), tensors, dtypes)
        return [tf.ensure_shape(new, old.shape) for new, old in zip(results, tensors, strict=True)]

    def total(self, tensor: Any, name: str, process_set: ProcessSet) -> Any:
        import tensorflow as tf

        def add_up(tensor: Any) -> Any:
            def backward(gradient: Any) -> Any:
                return self.reduce([gradient], CallTerms(f"{name}.grad", Sum, process_set=process_set))[0]

            return self.reduce([tensor], CallTerms(name, Sum, process_set=process_set))[0], backward

        return tf.custom_gradient(add_up)(tensor)

    def densify(self, tensor: Any) -> Any:
        import tensorflow as tf

        return tf.convert_to_tensor(tensor)

    def is_sparse(self, tensor: Any) -> bool:
        import tensorflow as tf

        return isinstance(tensor, tf.IndexedSlices)

    def scaled(self, tensor: Any, factor: float) -> Any:
        import tensorflow as tf

        if not self.is_sparse(tensor):
            return tensor * factor
        return tf.IndexedSlices(tensor.values * factor, tensor.indices, tensor.dense_shape)

    def reduce_sparse(self, tensor: Any, terms: CallTerms) -> Any:
        import tensorflow as tf

        process_set = terms.process_set
        factor = terms.prescale * terms.postscale / (process_set.size() or 1 if terms.op is Average else 1)

        def call(values: Any, indices: Any) -> Any:
            return collectives.grouped_allgather([values, indices], terms.name, process_set)

        given = [tensor.values * factor, tensor.indices]
        if tf.executing_eagerly():
            values, indices = call(*given)
        else:
            values, indices = tf.numpy_function(call, given, [each.dtype for each in given])
            values.set_shape([None, *tensor.values.shape[1:]])
            indices.set_shape([None])
        return tf.IndexedSlices(values, indices, tensor.dense_shape)

    def strategy(self) -> Any:
        import tensorflow as tf

        return tf.distribute.get_strategy() if tf.distribute.has_strategy() else super().strategy()

    def check_step(self) -> None:
        import tensorflow as tf
        from tensorflow.python.ops import control_flow_util

        if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
            raise ValueError(
                "XLA cannot compile a step of TensorFlow that reduces gradients over ranks:"
                " pass model.compile(..., jit_compile=False)"
            )


class _Torch(Door):
    def eager(self, tensor: Any) -> Any:
        return tensor.detach()

    def total(self, tensor: Any, name: str, process_set: ProcessSet) -> Any:
        from pyhvd.torch import mpi_ops

        return mpi_ops.allreduce(tensor, name=name, op=Sum, process_set=process_set)


_DOORS: dict[str, type[Door]] = {"jax": _Jax, "tensorflow": _TensorFlow, "torch": _Torch}


@functools.cache
def door() -> Door:
    """Return the door to Keras's backend.

    Raises
    ------
    ValueError
        It is another backend than JAX, TensorFlow and torch.
    """
    name = keras.backend.backend()
    if name not in _DOORS:
        raise ValueError(
            f"pyhvd.keras: the backend of Keras is {name!r}: set KERAS_BACKEND to {', '.join(_DOORS)} before"
            " keras is imported"
        )
    return _DOORS[name]()
