"""load_model: a saved model, ready to train on with all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import keras

from pyhvd.api.compression import Compressor
from pyhvd.keras.compression import Compression
from pyhvd.keras.legacy import library
from pyhvd.keras.optimizer import DistributedOptimizer


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: type[Compressor] = Compression.none,
    legacy_opts: bool = False,  # noqa: FBT001, FBT002 - Horovod's
) -> Any:
    """Load a model, and let its optimizer apply the gradients of all ranks.

    The optimizer goes on with its iterations and slots, but from HDF5 Keras restores none. If the
    file's optimizer accumulates gradients, the steps between updates stay; for another option call
    :func:`DistributedOptimizer` again.

    Parameters
    ----------
    filepath : str or path
        What ``model.save`` has written: ``.keras`` or ``.h5``.
    custom_optimizers : iterable of classes, optional
        Optimizers of the program's own that the file names.
    custom_objects : dict, optional
        See ``keras.saving.load_model``.
    compression : Compressor
        What is sent in place of a gradient.
    legacy_opts : bool
        No effect with tf_keras, whose files name the family. Else it must be False: Keras 3 has no
        legacy optimizers.

    Returns
    -------
    keras.Model
        A model without an optimizer is returned as it was saved.

    Raises
    ------
    ValueError
        `legacy_opts` is True in Keras 3.
    """
    chosen = library()
    if legacy_opts and chosen is keras:
        raise ValueError("load_model(legacy_opts=True): Keras 3 has no legacy optimizers: leave it out")
    known = {each.__name__: each for each in custom_optimizers or ()} | (custom_objects or {})
    model = chosen.models.load_model(filepath, custom_objects=known)
    if getattr(model, "optimizer", None) is not None:
        is_new = chosen is keras
        if (
            is_new
            and model.optimizer.built
            and len(model.optimizer._trainable_variables) < len(model.trainable_variables)
        ):
            model.optimizer = _anew(model, filepath)
        DistributedOptimizer(model.optimizer, compression=compression)
    return model


def _anew(model: Any, filepath: Any) -> Any:
    """Return an optimizer for a model whose own one was built without variables, as Keras does after HDF5."""
    warnings.warn(
        f"load_model: Keras {keras.__version__} restores no state of the optimizer from {filepath}: it begins"
        " anew. Save the model as .keras to keep the state",
        stacklevel=3,
    )
    made = type(model.optimizer).from_config(model.optimizer.get_config())
    made.build(model.trainable_variables)
    return made
