"""Elastic training of Keras's models: Horovod's ``horovod.keras.elastic``. See docs/elastic.md.

Ranks that are started again are new processes, so that no step compiled for another number of ranks is left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import keras
import numpy as np

from pyhvd import elastic
from pyhvd.elastic import (
    ElasticSampler as ElasticSampler,
    HostsUpdatedInterrupt as HostsUpdatedInterrupt,
    ObjectState as ObjectState,
    State as State,
    StoreError as StoreError,
    VaultError as VaultError,
    enabled as enabled,
    generation as generation,
    max_size as max_size,
)
from pyhvd.elastic.handlers import Handler
from pyhvd.frameworks.failures import raising_causes
from pyhvd.keras.backend import door

__all__ = [
    *elastic.__all__,
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
]


P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=State)


def run(func: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Let a function go on from the last commit; see :func:`pyhvd.elastic.run`.

    An error of a compiled step that carries one of pyhvd becomes that one, such as HorovodInternalError.
    """
    return elastic.run(raising_causes(*door().errors())(func))


class _OfVariables(Handler):
    """Objects whose variables stay the same objects, and are assigned to."""

    def variables(self, value: Any) -> list[Any]:
        raise NotImplementedError

    def dump(self, value: Any) -> Any:
        return [np.asarray(keras.ops.convert_to_numpy(each)) for each in self.variables(value)]

    def load(self, value: Any, dumped: Any) -> Any:
        variables = self.variables(value)
        shapes = [[tuple(each.shape) for each in arrays] for arrays in (variables, dumped)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"variables of the shapes {shapes[0]}, but those that were saved have {shapes[1]}"
            )
        for variable, array in zip(variables, dumped, strict=True):
            variable.assign(array)
        return value


class _OfKerasModels(_OfVariables):
    """Models; their metrics and seed generators stay as they are."""

    def variables(self, value: Any) -> list[Any]:
        if hasattr(value, "jax_state_sync"):
            value.jax_state_sync()  # during an epoch JAX holds the state elsewhere
        weights: list[Any] = value.weights
        return weights

    def settings(self, value: Any) -> Any:  # noqa: ARG002
        return None


class _OfKerasOptimizers(_OfVariables):
    """Optimizers; the learning rate is a setting."""

    def variables(self, value: Any) -> list[Any]:
        variables: list[Any] = value.variables
        return variables

    def settings(self, value: Any) -> Any:
        rate = getattr(getattr(value, "inner_optimizer", value), "_learning_rate", None)
        return float(keras.ops.convert_to_numpy(rate)) if hasattr(rate, "assign") else None

    def load_settings(self, value: Any, settings: Any) -> Any:
        value.learning_rate = settings
        return value


_MODELS, _OPTIMIZERS = _OfKerasModels(), _OfKerasOptimizers()


class KerasState(ObjectState):
    """A state with a model and its optimizer, which stay the same objects and load what was committed.

    Arrays are committed in host memory. All other attributes are committed as in
    :class:`pyhvd.elastic.ObjectState`.

    Parameters
    ----------
    model : keras.Model
        A model that is built.
    optimizer : keras.optimizers.Optimizer, optional
        By default that with which the model was compiled. It is built if it is not.
    **attributes
        The state's other attributes, such as ``epoch=0`` and ``batch=0``.

    Raises
    ------
    ValueError
        The model is not built, or has no optimizer.
    """

    def __init__(self, model: Any, optimizer: Any = None, **attributes: Any) -> None:
        if not model.built:
            raise ValueError(
                "KerasState: the model has no variables yet: give it an Input, or call model.build(shape)"
            )
        optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
        if optimizer is None:
            raise ValueError("KerasState: give the optimizer, or compile the model before")
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
        super().__init__(model=model, optimizer=optimizer, **attributes)

    def handler(self, value: Any) -> Handler:
        """Return how an attribute's value is saved and loaded."""
        if isinstance(value, keras.Model):
            return _MODELS
        return _OPTIMIZERS if isinstance(value, keras.optimizers.Optimizer) else super().handler(value)


class CommitStateCallback(keras.callbacks.Callback):
    """Commits a state after batches and epochs, once all callbacks have seen their end.

    So its place in the list does not matter. The commit comes when the next batch or epoch begins, or when
    training ends.

    Parameters
    ----------
    state : pyhvd.elastic.State
        What is committed.
    batches_per_commit : int
        After how many batches, and at each epoch's end.
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        self._state = state
        self._every = batches_per_commit
        self._batches = 0  # since the last commit
        self._is_due = False

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        """Count from zero."""
        self._batches, self._is_due = 0, False

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Commit what the batch before has left."""
        self._commit()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Count the batch, unless a collective in its step has failed."""
        door().check_logs(logs)
        self._batches += 1
        self._is_due |= self._batches >= self._every

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Commit what the epoch before has left."""
        self._commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Let the epoch be committed."""
        self._is_due = True

    def on_train_end(self, logs: Any = None) -> None:  # noqa: ARG002
        """Commit what is left."""
        self._commit()

    def _commit(self) -> None:
        if self._is_due:
            self._batches, self._is_due = 0, False
            self._state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Counts the epoch's batches in ``state.batch``; it is 0 when an epoch has ended.

    After a restart the count goes on: train the rest of the epoch with
    ``steps_per_epoch=steps - state.batch``.

    Parameters
    ----------
    state : pyhvd.elastic.ObjectState
        A state with the attribute ``batch``.
    """

    def __init__(self, state: ObjectState) -> None:
        super().__init__()
        self._state = state
        self._before = 0  # batches of the epoch that an earlier fit() has trained

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Note where the epoch goes on."""
        self._before = self._state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count the batches of the epoch, unless a collective in the batch's step has failed."""
        door().check_logs(logs)
        self._state.batch = self._before + batch + 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Begin anew with the next epoch."""
        self._state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Counts the epochs that have ended in ``state.epoch``, over restarts too.

    Parameters
    ----------
    state : pyhvd.elastic.ObjectState
        A state with the attribute ``epoch``.
    """

    def __init__(self, state: ObjectState) -> None:
        super().__init__()
        self._state = state

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Count the epoch."""
        self._state.epoch += 1
