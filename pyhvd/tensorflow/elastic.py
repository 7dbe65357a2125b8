"""Elastic training with TensorFlow: Horovod's ``horovod.tensorflow.elastic``. See docs/elastic.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

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

__all__ = [*elastic.__all__, "TensorFlowKerasState", "TensorFlowState"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function go on from the last commit after ranks were started again.

    See :func:`pyhvd.elastic.run`.
    An error of a collective in a graph, which TensorFlow raises as its own, is raised as pyhvd's.
    """
    return elastic.run(raising_causes(tf.errors.OpError)(func))


class _OfLists(Handler):
    """Sequences of variables, which stay the same objects, and are assigned to."""

    def dump(self, value: Any) -> Any:
        return [tf.convert_to_tensor(each).numpy() for each in value]

    def load(self, value: Any, dumped: Any) -> Any:
        for variable, array in zip(value, dumped, strict=True):
            variable.assign(array)
        return value

    def settings(self, value: Any) -> Any:  # noqa: ARG002
        return None


class _OfHolders(_OfLists):
    """Models and optimizers: objects of Keras that have variables."""

    def dump(self, value: Any) -> Any:
        return super().dump(_variables_of(value))

    def load(self, value: Any, dumped: Any) -> Any:
        super().load(_variables_of(value), dumped)
        return value


_LISTS, _HOLDERS = _OfLists(), _OfHolders()


def _variables_of(holder: Any) -> list[Any]:
    """Return a model's weights, or an optimizer's variables; those of random numbers stay each rank's own."""
    return list(getattr(holder, "weights", None) or holder.variables)


class TensorFlowState(ObjectState):
    """A state with variables, which stay the same objects and get the values that were committed.

    Parameters
    ----------
    variables : sequence of tf.Variable, optional
        Variables; all that have no other way into the state.
    session : None
        Of TensorFlow 1; another value is a RuntimeError.
    **attributes
        The state's other attributes.
    """

    def __init__(
        self, variables: Sequence[tf.Variable] | None = None, session: Any = None, **attributes: Any
    ) -> None:
        if session is not None:
            raise RuntimeError("TensorFlowState: sessions are TensorFlow 1's, which pyhvd does not support")
        super().__init__(variables=list(variables or []), **attributes)

    def handler(self, value: Any) -> Handler:
        """Return how an attribute's value is saved and loaded."""
        if isinstance(value, list) and value and all(isinstance(each, tf.Variable) for each in value):
            return _LISTS
        return super().handler(value)


class TensorFlowKerasState(ObjectState):
    """A state with a model of Keras and its optimizer, which stay the same objects.

    Parameters
    ----------
    model : keras.Model
        A model that has its variables.
    optimizer : keras.optimizers.Optimizer, optional
        By default that with which the model was compiled. Its variables are made if there are none.
    backend : object
        Has no effect.
    **attributes
        The state's other attributes, such as ``epoch=0`` and ``batch=0``.

    Raises
    ------
    ValueError
        The model has no variables yet, or no optimizer.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **attributes: Any) -> None:  # noqa: ARG002
        if not model.built:
            raise ValueError(
                "TensorFlowKerasState: the model has no variables yet: give it an Input, or call"
                " model.build(shape)"
            )
        optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
        if optimizer is None:
            raise ValueError("TensorFlowKerasState: give the optimizer, or compile the model before")
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
        super().__init__(model=model, optimizer=optimizer, **attributes)

    def handler(self, value: Any) -> Handler:
        """Return how an attribute's value is saved and loaded."""
        return _HOLDERS if value is self.model or value is self.optimizer else super().handler(value)
