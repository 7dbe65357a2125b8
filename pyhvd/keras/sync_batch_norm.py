"""Batch normalisation over the batches of all ranks, for every backend of Keras.

Each layer adds up one array over the ranks: counts, sums and sums of squares. The gradient of that sum is
the sum of the ranks' gradients, so the backward pass adds up one more array.

Source: S. Ioffe and C. Szegedy, "Batch Normalization", 2015, https://arxiv.org/abs/1502.03167.
"""

from __future__ import annotations

from typing import Any

import keras

from pyhvd.api.process_sets import ProcessSet, global_process_set
from pyhvd.engine.context import KeptName
from pyhvd.keras.backend import door


@keras.saving.register_keras_serializable(package="pyhvd")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """Batch normalisation whose statistics are those of all ranks' batches.

    In training its outputs and moving statistics are those of ``keras.layers.BatchNormalization`` on the
    joined batch. Batches may differ in size. Every rank must call the same layers the same number of times
    in a step, and all ranks must first use their layers in the same order.

    Parameters
    ----------
    *args, **kwargs
        Those of ``keras.layers.BatchNormalization``, but ``synchronized``.
    process_set : ProcessSet
        The ranks whose batches are taken together. It is not saved: a loaded layer has all ranks.
    """

    def __init__(self, *args: Any, process_set: ProcessSet = global_process_set, **kwargs: Any) -> None:
        kwargs.pop("synchronized", None)  # Keras's own, between devices of one TensorFlow program
        super().__init__(*args, **kwargs)
        self._process_set = process_set
        self._kept_name = KeptName("keras.batch_norm")
        self._trace: Any = None
        self._calls = 0

    def get_config(self) -> dict[str, Any]:
        """Return the config, with which Keras saves the layer."""
        config: dict[str, Any] = super().get_config()
        config.pop("synchronized", None)
        return config

    def _moments(self, inputs: Any, mask: Any) -> Any:
        """Return mean and variance of the ranks' joined batch, per channel."""
        mean, variance = super()._moments(inputs, mask)
        process_set = self._process_set
        if not process_set.included() or (process_set.size() or 1) == 1:
            return mean, variance
        ops = keras.ops
        count = self._counts(inputs, mask)
        own = ops.stack([count, count * mean, count * (variance + ops.square(mean))])
        gate = door()
        gate.check_step()
        count, total, squares = ops.unstack(gate.total(own, self._call_name(), process_set), 3)
        count = ops.maximum(count, 1.0)
        mean = total / count
        return mean, ops.maximum(squares / count - ops.square(mean), 0.0)

    def _counts(self, inputs: Any, mask: Any) -> Any:
        """Return how many values this rank has, per channel."""
        ops = keras.ops
        counted = ops.ones_like(inputs)
        if mask is not None:
            counted = counted * ops.cast(ops.expand_dims(mask, axis=-1), inputs.dtype)
        return ops.sum(counted, self._reduction_axes)

    def _call_name(self) -> str:
        """Return the collective's name: the layer's, and the number of the call in the step being traced."""
        trace = door().trace()
        self._calls = self._calls + 1 if trace is not None and trace == self._trace else 0
        self._trace = trace
        name = self._kept_name.in_set(self._process_set)
        return f"{name}.{self._calls}" if self._calls else name
