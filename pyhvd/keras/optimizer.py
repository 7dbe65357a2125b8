"""DistributedOptimizer: an optimizer of Keras that applies the gradients of all ranks.

The given optimizer itself gets a class that derives from its own, with the same name and module. So its
variables, schedules and whatever else refers to it stay valid, and a saved file names the class of Keras.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import keras

from pyhvd.api.collectives import Average, Sum
from pyhvd.api.compression import Compressor
from pyhvd.api.process_sets import ProcessSet, global_process_set
from pyhvd.dtypes import ReduceOp
from pyhvd.frameworks.grouping import checked_groups
from pyhvd.keras import legacy
from pyhvd.keras.backend import door
from pyhvd.keras.compression import Compression
from pyhvd.keras.loss_scale import let_ranks_agree
from pyhvd.keras.reduction import GradientReduction, OptimizerOptions, key_of

_TESTED = "3.15.1"


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",  # noqa: ARG001 - Horovod's
    device_sparse: str = "",  # noqa: ARG001 - Horovod's
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,  # noqa: FBT001, FBT002 - Horovod's
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,  # noqa: FBT001, FBT002 - Horovod's
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,  # noqa: FBT001, FBT002 - Horovod's
) -> Any:
    """Make an optimizer apply the gradients of all ranks, and return it (docs/keras.md).

    Parameters
    ----------
    optimizer : keras.optimizers.Optimizer, or one of tf_keras
        It keeps its variables. Its class is replaced by one of the same name that derives from it. Of a
        LossScaleOptimizer the inner optimizer is distributed, of a MultiOptimizer each inner one.
    name : str, optional
        How the names of its collectives begin, the same on every rank; by default its number.
    device_dense, device_sparse
        No effect.
    compression, sparse_as_dense, gradient_predivide_factor, op, process_set
        As in :func:`pyhvd.torch.DistributedOptimizer`; `op` is Average or Sum.
    backward_passes_per_step, average_aggregated_gradients : int, bool
        So many steps' gradients are summed, or averaged, before they are reduced and applied.
    num_groups, groups : int, or sequence of sequences of variables
        So many groups, or these, are reduced one by one; by default all gradients are one group.
    scale_local_gradients : bool
        Whether gradients of local variables are divided by the number of ranks.

    Raises
    ------
    TypeError
        The object is not an optimizer of Keras 3 or tf_keras.
    ValueError
        An option has a value that is not supported, or Keras distributes the model itself.
    RuntimeError
        This version of Keras lacks the methods in which pyhvd reduces gradients.
    """
    options = OptimizerOptions(
        name=name,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        predivide=gradient_predivide_factor,
        op=op,
        passes=backward_passes_per_step,
        averages_passes=average_aggregated_gradients,
        groups=checked_groups(groups, num_groups),
        process_set=process_set,
        scales_local=scale_local_gradients,
    )
    return _distribute(optimizer, _checked(options))


def PartialDistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,  # noqa: FBT001, FBT002 - Horovod's
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,  # noqa: FBT001, FBT002 - Horovod's
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,  # noqa: FBT001, FBT002 - Horovod's
) -> Any:
    """Make an optimizer apply the gradients of all ranks, but those of some layers.

    Parameters
    ----------
    optimizer : keras.optimizers.Optimizer
        See :func:`DistributedOptimizer`, also for the other arguments.
    local_layers : keras.layers.Layer, or sequence of keras.layers.Layer, optional
        Built layers, whose gradients stay this rank's own. More variables: ``optimizer.register_local_var``.

    Raises
    ------
    ValueError
        A layer is not built, so that its variables are not known; or see :func:`DistributedOptimizer`.
    """
    made = DistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        backward_passes_per_step,
        average_aggregated_gradients,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    layers = local_layers or []
    for layer in layers if isinstance(layers, list | tuple | set) else [layers]:
        if not isinstance(layer, legacy.layer_classes()):
            raise ValueError(f"local_layers: expected layers of Keras, not {type(layer).__name__}")
        if not layer.built:
            raise ValueError(f"local_layers: layer {layer.name!r} has no variables yet: build it before")
        for variable in layer.trainable_variables:
            register_local_var(made, variable)
    return made


def register_local_var(optimizer: Any, variable: Any) -> None:
    """Let the gradient of a variable stay this rank's own, in a distributed optimizer and its inner ones."""
    for each in _parts_of(optimizer):
        each._reduction.local.add(key_of(each, variable))


# -- classes -------------------------------------------------------------------------------------------


class _Distributed:
    """The methods of every distributed optimizer, before those of the class that it had."""

    _reduction: GradientReduction | None = None
    """None in an instance that was made from a config: it works alone until it is distributed."""

    def register_local_var(self, var: Any) -> None:
        """Let the gradient of a variable stay this rank's own."""
        register_local_var(self, var)

    def __reduce__(self) -> Any:
        """Pickle and copy as the optimizer that it was: the reduction belongs to this process."""
        derived = type(self)
        self.__class__ = own_class(derived)
        try:
            return self.__reduce__()
        finally:
            self.__class__ = derived


class _DistributedOne(_Distributed):
    """Of an optimizer that applies gradients itself."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """Update variables with the gradients of all ranks; see Keras's ``Optimizer.apply``."""
        reduction: Any = self._reduction
        known = self._trainable_variables if trainable_variables is None else trainable_variables  # type: ignore[attr-defined]
        variables = list(known)
        if reduction is None or len(grads) == 0 or len(variables) != len(grads):
            return super().apply(grads, trainable_variables)  # type: ignore[misc]
        given = reduction.begin(self, grads, variables)
        result = super().apply(given, None if trainable_variables is None else variables)  # type: ignore[misc]
        reduction.end(self)
        return result

    def _clip_gradients(self, grads: Any) -> Any:
        """Reduce gradients, and then clip them: Keras calls this once per update."""
        reduction: Any = self._reduction
        return super()._clip_gradients(grads if reduction is None else reduction.reduce(self, grads))  # type: ignore[misc]


class _DistributedMulti(_Distributed):
    """Of a MultiOptimizer, whose inner optimizers reduce their own parts."""

    def build(self, variables: Any) -> None:
        """Build the inner optimizers; those that the map has made only now are distributed too."""
        super().build(variables)  # type: ignore[misc]
        if self._reduction is not None:
            _distribute_inner(self, self._reduction.options)


class _DistributedLegacy(legacy.DistributedApply, _Distributed):
    """Of an optimizer of tf_keras."""


@functools.cache
def _derive(given: Any, methods: type) -> Any:
    if issubclass(given, _Distributed):
        return given
    own = {"__module__": given.__module__, "__doc__": given.__doc__, "__qualname__": given.__qualname__}
    return type(given.__name__, (methods, given), own)


def own_class(derived: Any) -> Any:
    """Return the class that an optimizer had before it was distributed."""
    bases = derived.__bases__
    return bases[1] if bases[0] in (_DistributedOne, _DistributedMulti, _DistributedLegacy) else derived


# -- steps of distributing -----------------------------------------------------------------------------


def _distribute(optimizer: Any, options: OptimizerOptions) -> Any:
    if legacy.is_optimizer(optimizer):
        legacy.check(optimizer, options)
        _mark(optimizer, _DistributedLegacy, options)
        return optimizer
    let_ranks_agree()
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        _distribute(optimizer.inner_optimizer, options)
        return optimizer
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"DistributedOptimizer: expected an optimizer of Keras {keras.__version__}, such as"
            f" keras.optimizers.SGD(), not {type(optimizer).__module__}.{type(optimizer).__qualname__}"
        )
    multi = getattr(keras.optimizers, "MultiOptimizer", None)
    if multi is not None and isinstance(optimizer, multi):
        _mark(optimizer, _DistributedMulti, options)
        _distribute_inner(optimizer, options)
        return optimizer
    missing = [each for each in ("apply", "_clip_gradients", "_var_key") if not hasattr(optimizer, each)]
    if missing:
        raise RuntimeError(
            f"DistributedOptimizer: an optimizer of Keras {keras.__version__} has no {missing[0]}(), which"
            f" pyhvd needs to reduce gradients; pyhvd was tested with Keras {_TESTED}"
        )
    _accumulate(optimizer, options.passes)
    _mark(optimizer, _DistributedOne, options)
    return optimizer


def _distribute_inner(optimizer: Any, options: OptimizerOptions) -> None:
    for number, inner in enumerate(optimizer.optimizers):
        if inner.__dict__.get("_reduction") is None:
            name = None if options.name is None else f"{options.name}.{number}"
            _distribute(inner, replace(options, name=name))
            inner._reduction.local = optimizer._reduction.local


def _mark(optimizer: Any, methods: type, options: OptimizerOptions) -> None:
    kind: Any = type(optimizer)
    optimizer.__class__ = _derive(kind, methods)
    # Not by setattr: Keras and TensorFlow would look for variables in it.
    optimizer.__dict__["_reduction"] = GradientReduction(options)


def _parts_of(optimizer: Any) -> list[Any]:
    """Return the optimizers that have a reduction: it, the one inside of it, and those inside of that."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    parts = [inner, *getattr(inner, "optimizers", [])]
    found = [each for each in parts if getattr(each, "_reduction", None) is not None]
    if not found:
        raise ValueError("register_local_var: the optimizer is not distributed: call DistributedOptimizer")
    return found


def _accumulate(optimizer: Any, passes: int) -> None:
    """Let an optimizer accumulate the gradients of several steps.

    Raises
    ------
    ValueError
        It accumulates those of another number of steps.
    """
    own = optimizer.gradient_accumulation_steps
    if passes == 1 or own == passes:
        return
    if own:
        raise ValueError(
            f"backward_passes_per_step={passes}: the optimizer has gradient_accumulation_steps={own}: leave"
            " one of them out, or make them equal"
        )
    optimizer.gradient_accumulation_steps = passes
    if optimizer.built:
        _add_accumulators(optimizer)


def _add_accumulators(optimizer: Any) -> None:
    """Give a built optimizer accumulators, at the place where ``build()`` has them, so that files fit."""
    held = optimizer._variables
    count = len(held)
    lock = optimizer._tracker.locked
    optimizer._tracker.unlock()
    optimizer.__dict__["_accumulated_gradients"] = [
        optimizer.add_variable_from_reference(each, name="gradient_accumulator")
        for each in optimizer._trainable_variables
    ]
    if lock:
        optimizer._tracker.lock()
    added = held[count:]
    del held[count:]
    fixed = {id(optimizer._iterations), id(optimizer._learning_rate)}
    first = sum(id(each) in fixed for each in held)
    made = {id(each) for each in getattr(optimizer, "_model_variables_moving_average", [])}
    averages = sum(id(each) in made for each in held)
    # Keras 3.5 makes average and accumulator of each variable in turn; later versions all averages first.
    takes_turns = averages and not hasattr(optimizer, "add_optimizer_variables")
    for number, variable in enumerate(added):  # TensorFlow's list compares what a slice replaces
        held.insert(first + (2 * number + 1 if takes_turns else averages + number), variable)


def _checked(options: OptimizerOptions) -> OptimizerOptions:
    """Return the options.

    Raises
    ------
    ValueError
        One is not supported, or Keras or TensorFlow distributes the model itself.
    """
    options.check("DistributedOptimizer", (Average, Sum))
    if options.passes < 1:
        raise ValueError(f"backward_passes_per_step={options.passes}: expected 1 or more")
    if active := door().strategy():
        raise ValueError(
            f"DistributedOptimizer: a {type(active).__name__} is active, which distributes the model too:"
            " use one of both, with one device for each rank of pyhvd"
        )
    return options
