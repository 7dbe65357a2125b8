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

from pyhvd.api import collectives
from pyhvd.api.collectives import Average, Sum
from pyhvd.api.process_sets import ProcessSet, global_process_set
from pyhvd.dtypes import ReduceOp
from pyhvd.frameworks.failures import raising_causes


class ReductionTerms(NamedTuple):
    """What all tensors of one reduction share."""

    name: str
    op: ReduceOp = Average
    prescale: float = 1.0
    postscale: float = 1.0
    process_set: ProcessSet = global_process_set

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of a grouped allreduce, which all adapters share."""
        factors = {"prescale_factor": self.prescale, "postscale_factor": self.postscale}
        return {"name": self.name, "op": self.op, "process_set": self.process_set, **factors}


class Door:
    """What the adapter needs of a backend; this class serves a backend without compiled steps."""

    def reduce(self, tensors: Sequence[Any], terms: ReductionTerms) -> list[Any]:
        """Reduce tensors as one unit, outside of a compiled step or inside of it."""
        return collectives.grouped_allreduce(list(tensors), **terms.arguments())

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

    def reduce_sparse(self, tensor: Any, terms: ReductionTerms) -> Any:
        """Reduce a sparse gradient by its rows."""
        raise NotImplementedError

    def at_updates(self, optimizer: Any, change: Callable[[list[Any]], list[Any]], grads: list[Any]) -> Any:  # noqa: ARG002
        """Change gradients in the steps that update variables; the others only accumulate gradients."""
        return change(grads)

    def check_step(self) -> None:
        """Raise ValueError if the step under way cannot hold a collective."""

    def errors(self) -> tuple[type[Exception], ...]:
        """Return the classes of the backend's errors that may carry one of pyhvd."""
        return ()

    def check_logs(self, logs: Any) -> None:
        """Raise the error of a step that has ended after its call returned; Keras keeps it in the logs."""

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

    def reduce(self, tensors: Sequence[Any], terms: ReductionTerms) -> list[Any]:
        from pyhvd.jax import verbs

        return list(verbs.grouped_allreduce(list(tensors), **terms.arguments()))

    def total(self, tensor: Any, name: str, process_set: ProcessSet) -> Any:
        from pyhvd.jax import verbs

        return verbs.allreduce(tensor, Sum, name=name, process_set=process_set)

    def errors(self) -> tuple[type[Exception], ...]:
        import jax

        return (jax.errors.JaxRuntimeError,)

    def check_logs(self, logs: Any) -> None:
        import jax

        with raising_causes(*self.errors()):
            jax.block_until_ready(logs)  # Keras has made numbers of all others

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

    def reduce(self, tensors: Sequence[Any], terms: ReductionTerms) -> list[Any]:
        from pyhvd.tensorflow import mpi_ops

        return mpi_ops.grouped_allreduce(tensors, **terms.arguments())

    def total(self, tensor: Any, name: str, process_set: ProcessSet) -> Any:
        from pyhvd.tensorflow import mpi_ops

        return mpi_ops.allreduce(tensor, op=Sum, name=name, process_set=process_set)

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

    def reduce_sparse(self, tensor: Any, terms: ReductionTerms) -> Any:
        from pyhvd.tensorflow import mpi_ops

        scaled = self.scaled(tensor, terms.prescale * terms.postscale)
        return mpi_ops.allreduce(scaled, op=terms.op, name=terms.name, process_set=terms.process_set)

    def errors(self) -> tuple[type[Exception], ...]:
        import tensorflow as tf

        return (tf.errors.OpError,)

    def strategy(self) -> Any:
        import tensorflow as tf

        return tf.distribute.get_strategy() if tf.distribute.has_strategy() else super().strategy()

    def check_step(self) -> None:
        from pyhvd.tensorflow import internals

        internals.check_not_xla()


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
