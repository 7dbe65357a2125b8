"""Make the ranks start alike: broadcast variables and objects; and the names of Horovod for TensorFlow 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import tensorflow as tf

from pyhvd.api import objects
from pyhvd.api.process_sets import ProcessSet, global_process_set
from pyhvd.frameworks.agreement import agree
from pyhvd.tensorflow.collective import run
from pyhvd.tensorflow.naming import default_name
from pyhvd.tensorflow.terms import CollectiveTerms

# Variables of fewer bytes travel in a common tensor with others of their dtype.
_SMALL = 1 << 20


def broadcast_variables(
    variables: Sequence[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,  # noqa: ARG001 - Horovod's
) -> None:
    """Assign the root's values to variables, eagerly or in a graph.

    Parameters
    ----------
    variables : sequence of tf.Variable or keras.Variable
        The same ones on every rank, in the same order.
    root_rank : int
        A global rank.
    process_set : ProcessSet
        The ranks that take part.
    inplace : bool
        Has no effect.

    Raises
    ------
    MismatchError
        Numbers, shapes or dtypes of the variables differ between the ranks.
    """
    broadcast_(variables, root_rank, None, process_set)


def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Assign the root's values to variables, and return these values; see :func:`broadcast_variables`."""
    given = list(variables)
    _compare(given, process_set)
    tensors = [tf.convert_to_tensor(each) for each in given]
    results: list[Any] = [None] * len(given)
    stem = name
    if name is None and not tf.executing_eagerly():
        stem = default_name("broadcast_", with_scope=True)
    for number, places in enumerate(_parts(tensors)):
        stem = (
            default_name("broadcast_", with_scope=True)
            if name is None and not tf.executing_eagerly()
            else name
        )
        terms = CollectiveTerms(
            "broadcast", None if stem is None else f"{stem}.{number}", process_set, root_rank=root_rank
        )
        flat = [tf.reshape(tensors[place], [-1]) for place in places]
        whole = run(terms, [flat[0] if len(flat) == 1 else tf.concat(flat, 0)])[0]
        parts = tf.split(whole, [tensors[place].shape.num_elements() for place in places])
        for place, part in zip(places, parts, strict=True):
            results[place] = tf.reshape(part, tensors[place].shape)
    for variable, value in zip(given, results, strict=True):
        variable.assign(value)
    return results


def _compare(variables: list[Any], process_set: ProcessSet) -> None:
    described = {f"variable {k}": f"{_dtype(v)} {list(v.shape)}" for k, v in enumerate(variables)}
    agree(described, "broadcast_variables", process_set)


def _dtype(variable: Any) -> str:
    return str(getattr(variable.dtype, "name", variable.dtype))


def _parts(tensors: list[Any]) -> list[list[int]]:
    """Return the places of the tensors of each broadcast: small ones of a dtype together, others alone."""
    together: dict[Any, list[int]] = {}
    parts = []
    for place, tensor in enumerate(tensors):
        if tensor.shape.num_elements() * tensor.dtype.size >= _SMALL:
            parts.append([place])
        else:
            together.setdefault(tensor.dtype, []).append(place)
    return [*parts, *together.values()]


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's object on every rank; see :func:`pyhvd.broadcast_object`. A session is an error."""
    _refuse_session(session, "broadcast_object")
    return objects.broadcast_object(obj, root_rank, name, process_set)


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all ranks; see :func:`pyhvd.allgather_object`. A session is an error."""
    _refuse_session(session, "allgather_object")
    result: list[Any] = objects.allgather_object(obj, name, process_set)
    return result


def _refuse_session(session: Any, verb: str) -> None:
    if session is not None:
        raise RuntimeError(f"{verb}: sessions are TensorFlow 1's, which pyhvd does not support: leave it out")


# -- TensorFlow 1 ------------------------------------------------------------------------------------------


def broadcast_global_variables(root_rank: int) -> NoReturn:
    """Raise RuntimeError: there are no global variables in TensorFlow 2."""
    raise RuntimeError(
        "broadcast_global_variables() is for TensorFlow 1: call"
        f" broadcast_variables(model.variables, {root_rank})"
    )


def broadcast_object_fn(*_: Any, **__: Any) -> NoReturn:
    """Raise RuntimeError: it is for sessions of TensorFlow 1."""
    raise RuntimeError("broadcast_object_fn() is for TensorFlow 1: call broadcast_object()")


class BroadcastGlobalVariablesHook:
    """Raises RuntimeError: it is for sessions of TensorFlow 1."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise RuntimeError(
            "BroadcastGlobalVariablesHook is for TensorFlow 1: call broadcast_variables(model.variables, 0),"
            " or use pyhvd.keras.callbacks.BroadcastGlobalVariablesCallback"
        )
