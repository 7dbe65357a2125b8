"""tf_keras, Keras 2 under a name of its own: which library the callbacks serve, and its optimizers.

Both families of its optimizers, ``optimizers.SGD`` and ``optimizers.legacy.SGD``, get all gradients and
variables of a step in ``apply_gradients``, before they clip: there pyhvd reduces.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import keras

if TYPE_CHECKING:
    from pyhvd.keras.reduction import GradientReduction, OptimizerOptions

_SWITCH = "TF_USE_LEGACY_KERAS"


def library() -> Any:
    """Return the Keras whose classes the adapter's own derive from.

    Returns
    -------
    module
        tf_keras if ``TF_USE_LEGACY_KERAS`` asks TensorFlow for it, else Keras 3; of other backends always
        Keras 3.

    Raises
    ------
    ImportError
        It is asked for, and not installed.
    """
    if keras.backend.backend() != "tensorflow" or os.environ.get(_SWITCH, "").lower() not in ("1", "true"):
        return keras
    try:
        return importlib.import_module("tf_keras")
    except ModuleNotFoundError as exc:
        raise ImportError(f"{_SWITCH} is set, but tf_keras is missing: pip install tf_keras") from exc


def layer_classes() -> tuple[Any, ...]:
    """Return the classes of layers of Keras 3, and of tf_keras if the program has imported it."""
    loaded = _loaded()
    return (keras.layers.Layer,) if loaded is None else (keras.layers.Layer, loaded.layers.Layer)


def is_optimizer(value: Any) -> bool:
    """Return whether an object is an optimizer of tf_keras, of one of its two families."""
    loaded = _loaded()
    return loaded is not None and isinstance(
        value, loaded.optimizers.Optimizer | loaded.optimizers.legacy.Optimizer
    )


def check(optimizer: Any, options: OptimizerOptions) -> None:
    """Check that an optimizer of tf_keras can be distributed.

    Raises
    ------
    ValueError
        It scales losses; an option needs Keras 3; or Keras 3 has another backend than TensorFlow.
    """
    if hasattr(optimizer, "inner_optimizer"):
        raise ValueError(
            f"DistributedOptimizer: a {type(optimizer).__name__} of tf_keras lets each rank skip other steps:"
            " use Keras 3 for loss scaling"
        )
    if options.passes > 1:
        raise ValueError(
            f"backward_passes_per_step={options.passes}: an optimizer of tf_keras cannot accumulate"
            " gradients: leave it out, or use Keras 3"
        )
    if keras.backend.backend() != "tensorflow":
        raise ValueError(
            f"DistributedOptimizer: tf_keras runs on TensorFlow, and KERAS_BACKEND is"
            f" {keras.backend.backend()!r}: unset it"
        )


class DistributedApply:
    """The method of a distributed optimizer of tf_keras, before that of the class that it had."""

    _reduction: GradientReduction | None

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]], *args: Any, **kwargs: Any) -> Any:
        """Update variables with the gradients of all ranks; see tf_keras's ``Optimizer.apply_gradients``."""
        pairs = list(grads_and_vars)
        if self._reduction is not None and pairs:
            _check_precision()
            gradients, variables = zip(*pairs, strict=True)
            reduced = self._reduction.reduce_given(self, gradients, variables)
            pairs = list(zip(reduced, variables, strict=True))
        return super().apply_gradients(pairs, *args, **kwargs)  # type: ignore[misc]


# -- what Keras 3 has under other names ----------------------------------------------------------------


def build_optimizer(optimizer: Any, variables: Sequence[Any]) -> None:
    """Make the slots of an optimizer of any Keras, unless it has them."""
    if hasattr(optimizer, "_create_all_weights"):  # the older family of tf_keras; twice does no harm
        optimizer._create_all_weights(variables)
    elif not getattr(optimizer, "built", getattr(optimizer, "_built", False)):
        optimizer.build(variables)


def optimizer_variables(optimizer: Any) -> list[Any]:
    """Return the variables of an optimizer of any Keras: the older family of tf_keras has a method."""
    held = optimizer.variables
    return list(held() if callable(held) else held)


def has_settable_rate(optimizer: Any) -> bool:
    """Return whether an optimizer of any Keras has a number as learning rate, not a schedule."""
    hyper = getattr(optimizer, "_hyper", None)
    if hyper is not None:
        return not callable(hyper["learning_rate"])
    return hasattr(getattr(optimizer, "_learning_rate", None), "assign")


# -- helpers -------------------------------------------------------------------------------------------


def _loaded() -> Any:
    """Return tf_keras if the program has imported it: else nothing in it is tf_keras's."""
    return sys.modules.get("tf_keras")


def _check_precision() -> None:
    """Raise ValueError if tf_keras scales losses, by which each rank would skip other steps."""
    policy = _loaded().mixed_precision.global_policy().name
    if policy == "mixed_float16":
        raise ValueError(
            "DistributedOptimizer: under the policy 'mixed_float16' of tf_keras each rank skips other steps:"
            " use 'mixed_bfloat16', or Keras 3"
        )
