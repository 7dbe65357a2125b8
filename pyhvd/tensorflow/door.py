"""The native door of TensorFlow: the ops of ``pyhvd.native._tensorflow_ops``, and their gradients."""

from __future__ import annotations

import importlib.util
import logging
import sys
import threading
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from pyhvd.engine import context
from pyhvd.frameworks.calls import GraphCall
from pyhvd.frameworks.door import NativeDoor, callbacks_are_asked_for, native_door as shared_door
from pyhvd.tensorflow.gradients import gradients_of
from pyhvd.tensorflow.internals import run_independently
from pyhvd.tensorflow.terms import CollectiveTerms

_log = logging.getLogger("pyhvd")

_EXTENSION = "_tensorflow_ops"
_MODULE = f"pyhvd.native.{_EXTENSION}"
_OPS = ("PyhvdSameShapes", "PyhvdOtherShapes")
# A longer wait gains nothing here. It keeps a thread from other collectives of the graph, for which the other
# ranks may wait: two independent ones took 51 ms a step with 50 ms.
_MOST_WAIT_MS = 1.0
_lock = threading.Lock()
_doors: list[OpDoor | None] = []
_terms: dict[int, CollectiveTerms] = {}  # by key, for gradients


class OpDoor:
    """Adds ops to graphs.

    Parameters
    ----------
    library : module
        The ops, as ``tf.load_op_library`` returns them.
    table : NativeDoor
        The extension.
    """

    def __init__(self, library: Any, table: NativeDoor) -> None:
        self._library = library
        self._table = table

    def add_same_shapes(self, call: GraphCall, terms: CollectiveTerms, tensors: Sequence[Any]) -> list[Any]:
        """Add an op whose results have the shapes of its operands."""
        results = self._library.pyhvd_same_shapes(
            list(tensors), key=self._key(call, terms), Tout=[each.dtype for each in tensors]
        )
        return _independent(results)

    def add_other_shapes(
        self, call: GraphCall, terms: CollectiveTerms, tensors: Sequence[Any], shapes: Sequence[Any]
    ) -> list[Any]:
        """Add an op whose results have the given shapes, in which rows may be unknown."""
        rows = [shape[0] if shape.rank else None for shape in shapes]
        if terms.verb == "alltoall":
            rows = [None, None]
        results = self._library.pyhvd_other_shapes(
            list(tensors),
            key=self._key(call, terms, by_python=None in rows),
            Tout=[each.dtype for each in tensors],
            rows=[-1 if each is None else each for each in rows],
        )
        for result, shape in zip(results, shapes, strict=True):
            result.set_shape(shape)
        return _independent(results)

    def _key(self, call: GraphCall, terms: CollectiveTerms, *, by_python: bool = False) -> int:
        key = self._table.add(call, by_python=by_python)
        wait_ms = min(context.current().config.graph_wait_ms, _MOST_WAIT_MS)
        self._table.ops.wait_for(int(wait_ms * 1e6))
        _terms[key] = terms
        return key


def _independent(results: Sequence[Any]) -> list[Any]:
    run_independently(results[0].op)
    return list(results)


def native_door() -> OpDoor | None:
    """Return the native door; None if it was not built, does not fit TensorFlow, or is not wanted."""
    if callbacks_are_asked_for():
        return None
    with _lock:
        if not _doors:
            _doors.append(_open())
        return _doors[0]


def _open() -> OpDoor | None:
    spec = importlib.util.find_spec(_MODULE)
    if spec is None or spec.origin is None or _MODULE in sys.modules:
        return None
    try:
        library = tf.load_op_library(spec.origin)  # before Python imports it: TensorFlow notes the new ops
    except (tf.errors.OpError, RuntimeError) as exc:
        _log.warning("%s cannot be loaded, so graphs go through tf.numpy_function: %s", _MODULE, exc)
        return None
    if not all(hasattr(library, name) for name in ("pyhvd_same_shapes", "pyhvd_other_shapes")):
        return None
    table = shared_door(_EXTENSION)
    if table is None:
        return None
    for op in _OPS:
        tf.RegisterGradient(op)(_gradient)
    return OpDoor(library, table)


def _gradient(op: Any, *upstream: Any) -> list[Any]:
    from pyhvd.tensorflow.collective import run_backward

    terms = _terms[op.get_attr("key")]
    return gradients_of(run_backward, terms, list(op.inputs), list(op.outputs), upstream)


def graph_ops() -> str:
    """Return how collectives enter graphs: ``"native"``, or ``"callback"``, through ``tf.numpy_function``."""
    return "callback" if native_door() is None else "native"
