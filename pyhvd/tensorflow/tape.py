"""DistributedGradientTape: a tape whose gradients are those of all ranks."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from pyhvd.api.collectives import Adasum, Average, Sum
from pyhvd.api.compression import Compressor
from pyhvd.api.process_sets import ProcessSet, global_process_set
from pyhvd.dtypes import ReduceOp
from pyhvd.engine import context
from pyhvd.frameworks.agreement import agree, name_without_numbers
from pyhvd.frameworks.gradients import GradientOptions
from pyhvd.frameworks.grouping import checked_groups, divide
from pyhvd.tensorflow.compression import Compression
from pyhvd.tensorflow.mpi_ops import grouped_allreduce
from pyhvd.tensorflow.naming import default_name

_NAME = "DistributedGradientTape"
# What the ranks have compared, since init().
_compared: weakref.WeakKeyDictionary[Any, set[Any]] = weakref.WeakKeyDictionary()


def DistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: Any,
    device_dense: str = "",  # noqa: ARG001 - Horovod's
    device_sparse: str = "",  # noqa: ARG001 - Horovod's
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Let a tape's ``gradient()`` return the gradients of all ranks; see docs/tensorflow.md.

    Parameters
    ----------
    gradtape : tf.GradientTape
        It is returned, with a class that derives from its own, and that also has
        ``register_local_source(source)``.
    device_dense, device_sparse : str
        Have no effect.
    compression : Compressor
        ``Compression.fp16`` or ``.bf16`` sends float32 and float64 in 16 bits.
    sparse_as_dense : bool
        Whether tf.IndexedSlices become dense gradients; else the ranks gather their rows.
    op : ReduceOp
        Average, Sum or Adasum.
    gradient_predivide_factor : float
        With Average: a divisor before the sum, and a factor after it.
    num_groups, groups : int, or sequence of sequences of variables
        So many units, or these and each other gradient alone; by default one. num_groups is deprecated.
    process_set : ProcessSet
        The ranks that take part; a rank outside gets its own gradients.
    scale_local_gradients : bool
        Whether the gradients of local sources are divided by the number of ranks.

    Raises
    ------
    TypeError
        gradtape is no tf.GradientTape.
    ValueError
        The factor needs op=Average; or the groups are neither a positive number nor lists of variables.
    MismatchError
        In ``gradient()``: the ranks differ in which sources have gradients, in dtypes, shapes of variables,
        or options.
    """
    if num_groups:
        warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=2)
    options = GradientOptions(
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        predivide=gradient_predivide_factor,
        groups=checked_groups(groups, num_groups),
        process_set=process_set,
        scales_local=scale_local_gradients,
    )
    return _distribute(gradtape, options)


def _distribute(gradtape: Any, options: GradientOptions) -> Any:
    """Give a tape the class that derives from its own."""
    if not isinstance(gradtape, tf.GradientTape):
        raise TypeError(f"DistributedGradientTape takes a tf.GradientTape, not {type(gradtape).__name__}")
    options.check(_NAME, (Average, Sum, Adasum))
    own = type(gradtape)
    gradtape.__class__ = type(own.__name__, (_DistributedTape, own), {"__module__": own.__module__})
    gradtape._pyhvd_options = options
    gradtape._pyhvd_local = set()
    return gradtape


def PartialDistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Let a tape return the gradients of all ranks, but for local layers.

    See :func:`DistributedGradientTape`, also for the other arguments.

    Parameters
    ----------
    local_layers : keras layer, or iterable of them, optional
        Layers of which each rank has its own; they must have been built.
    """
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    layers = local_layers if isinstance(local_layers, Iterable) else [local_layers]
    for layer in layers if local_layers is not None else ():
        for variable in layer.trainable_weights:
            tape.register_local_source(variable)
    return tape


class _DistributedTape:
    """The methods of every distributed tape, before those of the class that it had."""

    _pyhvd_options: GradientOptions
    _pyhvd_local: set[int]
    _pyhvd_is_off = False

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        use_generic_names: bool = False,  # noqa: ARG002 - Horovod's
    ) -> Any:
        """Return the gradients of all ranks, in the structure of the sources."""
        own = super().gradient(  # type: ignore[misc]
            target, sources, output_gradients=output_gradients, unconnected_gradients=unconnected_gradients
        )
        if self._pyhvd_is_off:
            return own
        variables, gradients = tf.nest.flatten(sources), tf.nest.flatten(own)
        reduced = _reduced(self._pyhvd_options, self._pyhvd_local, variables, gradients)
        return tf.nest.pack_sequence_as(sources, reduced)

    def jacobian(self, *arguments: Any, **options: Any) -> Any:
        """Return this rank's jacobian; see :meth:`tf.GradientTape.jacobian`."""
        with self._only_own():
            return super().jacobian(*arguments, **options)  # type: ignore[misc]

    def batch_jacobian(self, *arguments: Any, **options: Any) -> Any:
        """Return this rank's jacobian of each example; see :meth:`tf.GradientTape.batch_jacobian`."""
        with self._only_own():
            return super().batch_jacobian(*arguments, **options)  # type: ignore[misc]

    @contextlib.contextmanager
    def _only_own(self) -> Iterator[None]:
        """Let ``gradient()``, which TensorFlow's jacobians call, reduce nothing meanwhile."""
        self._pyhvd_is_off = True
        try:
            yield
        finally:
            self._pyhvd_is_off = False

    def register_local_source(self, source: Any) -> None:
        """Leave the gradients of a variable to each rank."""
        self._pyhvd_local.add(_key(source))

    def get_local_and_global_gradients(
        self, gradients: Sequence[Any], sources: Sequence[Any]
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Return the pairs (gradient, source) of local sources, and those of the others."""
        pairs = list(zip(gradients, sources, strict=True))
        local = [pair for pair in pairs if _key(pair[1]) in self._pyhvd_local]
        return local, [pair for pair in pairs if _key(pair[1]) not in self._pyhvd_local]


def _key(source: Any) -> int:
    """Return by what a source is known: a variable of Keras is the one of TensorFlow that it holds."""
    value = getattr(source, "_value", None)
    return id(value if isinstance(value, tf.Variable) else source)


def _reduced(
    options: GradientOptions, local: set[int], sources: list[Any], gradients: list[Any]
) -> list[Any]:
    """Return the gradients of all ranks, and this rank's of local sources."""
    if not options.is_needed:
        return gradients
    keys = [_key(source) for source in sources]
    _compare(options, [key in local for key in keys], sources, gradients)
    results = list(gradients)
    shared = [place for place, key in enumerate(keys) if key not in local and gradients[place] is not None]
    known = options.groups
    if isinstance(known, list):
        known = [[_key(variable) for variable in group] for group in known]
    for group in divide([keys[place] for place in shared], known):
        places = [shared[index] for index in group]
        for place, new in zip(places, _reduce(options, [gradients[p] for p in places]), strict=True):
            results[place] = new
    size = options.process_set.size()
    for place, key in enumerate(keys):
        if key in local and options.scales_local and gradients[place] is not None:
            results[place] = _divided(gradients[place], size)
    return results


def _reduce(options: GradientOptions, gradients: list[Any]) -> list[Any]:
    """Reduce gradients as one unit."""
    if options.sparse_as_dense:
        gradients = [tf.convert_to_tensor(each) for each in gradients]
    return grouped_allreduce(
        gradients,
        compression=options.compression,
        op=options.op,
        prescale_factor=1.0 / options.predivide,
        postscale_factor=options.predivide,
        process_set=options.process_set,
        name=None if tf.executing_eagerly() else default_name(_NAME, with_scope=True),
    )


def _divided(gradient: Any, size: int | None) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values / tf.cast(size, gradient.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(size, gradient.dtype)


def _compare(options: GradientOptions, local: list[bool], sources: list[Any], gradients: list[Any]) -> None:
    """Compare what the ranks would reduce, once for each set of sources since ``init()``."""
    described = options.described()
    for place, (source, gradient) in enumerate(zip(sources, gradients, strict=True)):
        described[f"gradient {place}"] = _in_words(source, gradient, local=local[place])
    seen = _compared.setdefault(context.current(), set())
    known = (options.process_set.process_set_id, *described.items())
    if known not in seen:
        agree(described, _NAME, options.process_set)
        seen.add(known)


def _in_words(source: Any, gradient: Any, *, local: bool) -> str:
    if gradient is None:
        text = "no gradient"
    elif isinstance(gradient, tf.IndexedSlices):
        text = f"slices of {gradient.dtype.name}"
    else:
        text = gradient.dtype.name
    if local:
        text += ", local"
    if not hasattr(source, "assign"):  # a tensor: it may have another shape in each step, and no name
        return text
    return f"{text} of {name_without_numbers(source)} {list(source.shape)}"
