"""The verbs of the Keras adapter: they run outside of compiled steps, and return arrays of the backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import keras
import numpy as np

from pyhvd.api import collectives
from pyhvd.api.collectives import Average
from pyhvd.api.compression import Compressor
from pyhvd.api.process_sets import ProcessSet, global_process_set
from pyhvd.api.topology import rank
from pyhvd.dtypes import ReduceOp
from pyhvd.frameworks.agreement import agree
from pyhvd.keras.backend import door
from pyhvd.keras.compression import Compression

_VARIABLES = "keras.broadcast_variables"


def _array(value: Any) -> Any:
    """Return a value as an array of the backend that no gradient follows.

    Raises
    ------
    ValueError
        A compiled step is being traced, in which arrays have no memory.
    """
    return door().eager(keras.ops.convert_to_tensor(value))


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,  # noqa: FBT001 - Horovod's
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | None = None,
    compression: type[Compressor] = Compression.none,
) -> Any:
    """Reduce a value over the ranks, outside of compiled steps.

    Parameters
    ----------
    value : tensor, keras.Variable, numpy array, or number
        The same shape and dtype on every rank.
    name : str, optional
        The same on every rank.
    average : bool, optional
        Deprecated: use `op`.
    prescale_factor, postscale_factor : float
        What multiplies the value before and after the reduction.
    op : ReduceOp, optional
        By default Average.
    compression : Compressor
        What is sent in place of the value.

    Returns
    -------
    tensor
        An array of the backend of Keras, of the same shape.
    """
    factors = (prescale_factor, postscale_factor)
    return collectives.allreduce(_array(value), average, name, compression, op, *factors)


def allgather(value: Any, name: str | None = None) -> Any:
    """Return the ranks' values, joined along their first dimension, whose length may differ."""
    return collectives.allgather(_array(value), name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return the root's value, on every rank."""
    return collectives.broadcast(_array(value), root_rank, name)


def reducescatter(value: Any, name: str | None = None, op: ReduceOp = Average) -> Any:
    """Reduce a value over the ranks, and return this rank's part of its first dimension."""
    return collectives.reducescatter(_array(value), name=name, op=op)


def broadcast_variables(
    variables: Sequence[Any], root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> None:
    """Assign the root's values to variables.

    Parameters
    ----------
    variables : sequence of keras.Variable
        Such as ``model.variables`` and ``model.optimizer.variables``; the same on every rank. Variables of
        the backend are taken too, if they have ``assign()``.
    root_rank : int
        A global rank.
    process_set : ProcessSet
        The ranks that take part.

    Raises
    ------
    MismatchError
        Shapes or dtypes differ between ranks; the text has all differences.
    """
    variables = list(variables)
    values = [np.array(keras.ops.convert_to_numpy(each)) for each in variables]
    texts = {f"variable {place}": f"{each.dtype} {list(each.shape)}" for place, each in enumerate(values)}
    agree(texts, _VARIABLES, process_set)
    handles = [
        collectives.broadcast_async_(value, root_rank, f"{_VARIABLES}: {place}", process_set)
        for place, value in enumerate(values)
    ]
    for handle in handles:
        handle.result()
    if rank() != root_rank:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)


def broadcast_global_variables(root_rank: int) -> NoReturn:
    """Raise RuntimeError: Keras has no list of all variables."""
    raise RuntimeError(
        "broadcast_global_variables: Keras 3 has no global variables: call"
        f" broadcast_variables(model.variables, {root_rank}), or give fit() the callback"
        f" BroadcastGlobalVariablesCallback({root_rank})"
    )
