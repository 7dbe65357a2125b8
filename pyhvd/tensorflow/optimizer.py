"""DistributedOptimizer, under the name and with the arguments of Horovod's TensorFlow module."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from pyhvd.api.collectives import Average
from pyhvd.api.compression import Compressor
from pyhvd.api.process_sets import ProcessSet, global_process_set
from pyhvd.dtypes import ReduceOp
from pyhvd.tensorflow.compression import Compression


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,  # noqa: ARG001 - Horovod's
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Make an optimizer of Keras apply the gradients of all ranks; see ``pyhvd.keras.DistributedOptimizer``.

    Parameters
    ----------
    optimizer : keras.optimizers.Optimizer
        It is returned.
    use_locking : bool
        Has no effect.
    name, device_dense, device_sparse, compression, sparse_as_dense, backward_passes_per_step, op,
    gradient_predivide_factor, average_aggregated_gradients, num_groups, groups, process_set,
    scale_local_gradients
        As there.

    Raises
    ------
    TypeError
        The optimizer is of TensorFlow 1.
    """
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        raise TypeError(
            f"DistributedOptimizer: {type(optimizer).__name__} is an optimizer of TensorFlow 1: pass one of"
            " keras.optimizers, or reduce the gradients with DistributedGradientTape"
        )
    return importlib.import_module("pyhvd.keras").DistributedOptimizer(
        optimizer,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
