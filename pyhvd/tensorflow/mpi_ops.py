"""The verbs for TensorFlow, eager and in ``tf.function``; names and order of arguments are Horovod's.

Each verb takes tensors, variables, numpy arrays and numbers, and takes part in automatic differentiation.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from pyhvd.api import collectives as core, topology
from pyhvd.api.call import resolve_op
from pyhvd.api.collectives import Average
from pyhvd.api.compression import Compressor, compress_all, decompress_all
from pyhvd.api.process_sets import ProcessSet, global_process_set
from pyhvd.dtypes import ReduceOp
from pyhvd.engine import context
from pyhvd.tensorflow.collective import run
from pyhvd.tensorflow.compression import Compression
from pyhvd.tensorflow.naming import default_name
from pyhvd.tensorflow.sparse import reduce_slices
from pyhvd.tensorflow.terms import LINEAR, CollectiveTerms

_told: set[str] = set()


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Reduce a tensor over the ranks; see :func:`pyhvd.allreduce`.

    Parameters
    ----------
    tensor : tensor, variable, array, number, or tf.IndexedSlices
        Of the same shape and dtype on every rank. The ranks gather each other's rows of IndexedSlices, whose
        numbers may differ.
    average : bool, optional
        Deprecated: True means ``op=Average``, False means ``op=Sum``.
    device_dense, device_sparse : str
        Have no effect.
    compression : Compressor
        ``Compression.fp16`` or ``.bf16`` sends float32 and float64 in 16 bits; not of IndexedSlices.
    op : ReduceOp
        Average (default), Sum, Adasum, Min, Max or Product; Average or Sum of IndexedSlices.
    prescale_factor, postscale_factor : float
        Factors before and after the reduction; 1 for IndexedSlices.
    name : str, optional
        The same on every rank.
    process_set : ProcessSet
        The ranks that take part.
    ignore_name_scope : bool
        Whether the default name in a graph leaves out name scopes.

    Returns
    -------
    tf.Tensor or tf.IndexedSlices
        Of the tensor's shape and dtype.

    Raises
    ------
    NotImplementedError
        Another op, or factors, of IndexedSlices.
    tf.errors.InternalError
        In a graph, when it runs: an error of :func:`pyhvd.allreduce`, with its text.
    """
    _warn_of_devices(device_dense, device_sparse)
    chosen = resolve_op(op, average=average)
    name = _name(name, "allreduce", ignore_name_scope)
    if isinstance(tensor, tf.IndexedSlices):
        factors = (prescale_factor, postscale_factor)
        return reduce_slices(tensor, chosen, factors, name, process_set)
    terms = CollectiveTerms("allreduce", name, process_set, chosen, prescale_factor, postscale_factor)
    return _reduced(terms, [tensor], compression)[0]


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Reduce several tensors as one unit; list in, list out; see :func:`allreduce`.

    IndexedSlices among them are reduced one by one.
    """
    _warn_of_devices(device_dense, device_sparse)
    chosen = resolve_op(op, average=average)
    name = _name(name, "grouped_allreduce", ignore_name_scope)
    results: list[Any] = list(tensors)
    dense = [place for place, each in enumerate(results) if not isinstance(each, tf.IndexedSlices)]
    terms = CollectiveTerms(
        "allreduce", name, process_set, chosen, prescale_factor, postscale_factor, grouped=True
    )
    if dense:
        reduced = _reduced(terms, [results[place] for place in dense], compression)
        for place, each in zip(dense, reduced, strict=True):
            results[place] = each
    factors = (prescale_factor, postscale_factor)
    for place in sorted(set(range(len(results))).difference(dense)):
        own = None if name is None else f"{name}.slices{place}"
        results[place] = reduce_slices(results[place], chosen, factors, own, process_set)
    return results


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Concatenate the ranks' tensors along dimension 0; see :func:`pyhvd.allgather`.

    The gradient is the Average of the ranks' gradients of this rank's rows.
    """
    terms = CollectiveTerms("allgather", _name(name, "allgather", ignore_name_scope), process_set)
    return run(terms, [tf.convert_to_tensor(tensor)])[0]


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Gather several tensors as one unit; list in, list out; see :func:`allgather`."""
    name = _name(name, "grouped_allgather", ignore_name_scope)
    terms = CollectiveTerms("allgather", name, process_set, grouped=True)
    return run(terms, [tf.convert_to_tensor(each) for each in tensors])


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's tensor on every rank; see :func:`pyhvd.broadcast`.

    On the root the gradient is the Average of the ranks' gradients, elsewhere zero.
    """
    name = _name(name, "broadcast", ignore_name_scope)
    return run(
        CollectiveTerms("broadcast", name, process_set, root_rank=root_rank), [tf.convert_to_tensor(tensor)]
    )[0]


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send a part of dimension 0 to each rank; see :func:`pyhvd.alltoall`.

    Parameters
    ----------
    tensor : tensor, variable or array
        Rows for rank 0 first, then for rank 1, ....
    splits : tensor or sequence of int, optional
        The number of rows for each rank of the set; None divides the rows evenly.
    name, ignore_name_scope, process_set
        See :func:`allreduce`.

    Returns
    -------
    output : tf.Tensor
        The received rows. Their gradient is the alltoall in the other direction.
    received_splits : tf.Tensor of int32
        The number of rows from each rank; returned only if ``splits`` was given.
    """
    terms = CollectiveTerms("alltoall", _name(name, "alltoall", ignore_name_scope), process_set)
    chosen = tf.zeros(0, tf.int32) if splits is None else tf.cast(tf.convert_to_tensor(splits), tf.int32)
    output, received = run(terms, [tf.convert_to_tensor(tensor), chosen])
    return output if splits is None else (output, received)


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce a tensor over the ranks, and give each rank its part; see :func:`pyhvd.reducescatter`.

    The gradient is the allgather of the ranks' gradients, times the factors, and for Sum times the number of
    ranks.
    """
    _warn_of_devices(device_dense, "")
    name = _name(name, "reducescatter", ignore_name_scope)
    terms = CollectiveTerms("reducescatter", name, process_set, op, prescale_factor, postscale_factor)
    return _compressed(terms, [tensor], compression)[0]


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Reduce and scatter several tensors as one unit; list in, list out; see :func:`reducescatter`."""
    _warn_of_devices(device_dense, "")
    name = _name(None, "grouped_reducescatter", ignore_name_scope=False)
    terms = CollectiveTerms(
        "reducescatter", name, process_set, op, prescale_factor, postscale_factor, grouped=True
    )
    return _compressed(terms, list(tensors), compression)


def join() -> Any:
    """Announce that this rank has no more data; return the rank that joined last, a tensor of int32.

    See :func:`pyhvd.join`. In a graph it is a call of Python, in the order of the program.
    """
    return _read(core.join, None)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the process set has called it; in a graph when every rank has run it.

    A graph runs it after the stateful ops before it; collectives, which run in any order, may pass it.
    """
    if tf.executing_eagerly():
        core.barrier(process_set)
        return

    def wait() -> Any:
        core.barrier(process_set)
        return np.int32(0)

    tf.numpy_function(wait, [], tf.int32, stateful=True)


# -- what is read when a graph runs ------------------------------------------------------------------------


def rank_op(name: str | None = None) -> Any:
    """Return this rank, a tensor of int32 that a graph reads whenever it runs."""
    return _read(topology.rank, name)


def local_rank_op(name: str | None = None) -> Any:
    """Return the rank among those of this host; see :func:`rank_op`."""
    return _read(topology.local_rank, name)


def local_size_op(name: str | None = None) -> Any:
    """Return the number of ranks of this host; see :func:`rank_op`."""
    return _read(topology.local_size, name)


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return the number of ranks of a process set, the global one by default; see :func:`rank_op`."""
    return _read(lambda: len(_members(process_set_id)), name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return 1 if this rank is in a process set, else 0; see :func:`rank_op`."""
    return _read(lambda: int(topology.rank() in _members(process_set_id)), name)


def _members(process_set_id: int) -> Sequence[int]:
    members = context.current().process_sets.get(process_set_id)
    if members is None:
        raise ValueError(f"no process set has the id {process_set_id}: pass that of a registered ProcessSet")
    return members


def _read(function: Callable[[], int], name: str | None) -> Any:
    if tf.executing_eagerly():
        return tf.constant(function(), tf.int32)
    value = tf.numpy_function(lambda: np.int32(function()), [], tf.int32, stateful=True, name=name)
    value.set_shape(())
    return value


# -- arguments ---------------------------------------------------------------------------------------------


def _name(name: str | None, verb: str, ignore_name_scope: bool) -> str | None:
    """Return the call's name; None: pyhvd numbers eager calls."""
    if name is not None or tf.executing_eagerly():
        return name
    return default_name(verb, with_scope=not ignore_name_scope)


def _warn_of_devices(dense: str, sparse: str) -> None:
    for which, device in (("device_dense", dense), ("device_sparse", sparse)):
        if device and which not in _told:
            _told.add(which)
            text = f"{which}={device!r} has no effect: pyhvd reduces where the tensor is"
            warnings.warn(text, UserWarning, stacklevel=3)


def _reduced(terms: CollectiveTerms, tensors: Sequence[Any], compression: type[Compressor]) -> list[Any]:
    """Reduce tensors; factors of an op that is not linear are ops of their own, for their gradients."""
    if terms.op in LINEAR or (terms.prescale, terms.postscale) == (1.0, 1.0):
        return _compressed(terms, tensors, compression)
    scaled = [_scaled(tf.convert_to_tensor(each), terms.prescale) for each in tensors]
    plain = CollectiveTerms(terms.verb, terms.name, terms.process_set, terms.op, grouped=terms.grouped)
    return [_scaled(each, terms.postscale) for each in _compressed(plain, scaled, compression)]


def _scaled(tensor: Any, factor: float) -> Any:
    return tensor if factor == 1.0 else tensor * tf.cast(factor, tensor.dtype)


def _compressed(terms: CollectiveTerms, tensors: Sequence[Any], compression: type[Compressor]) -> list[Any]:
    if not hasattr(compression, "compress"):
        raise ValueError(
            f"compression is Compression.none, .fp16, .bf16 or a Compressor, not {compression!r}"
        )
    sent, contexts = compress_all(compression, [tf.convert_to_tensor(each) for each in tensors])
    return decompress_all(compression, run(terms, sent), contexts)
