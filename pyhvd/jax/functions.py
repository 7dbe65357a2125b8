"""Objects, variables, barrier and join: what is called outside of compiled functions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pyhvd.api import collectives, objects
from pyhvd.api.process_sets import ProcessSet, global_process_set
from pyhvd.jax.collective import in_trace
from pyhvd.jax.verbs import broadcast, require_no_trace


def broadcast_variables(
    tree: Any, root_rank: int = 0, *, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the root's leaves on every rank; all arrays are in flight together.

    Parameters
    ----------
    tree : pytree of arrays
        Of the same structure, shapes and dtypes on every rank.
    root_rank : int
        A global rank.
    name : str, optional
        How the names of the broadcasts begin; the default is ``"broadcast_variables"``.
    process_set : ProcessSet
        The ranks that take part.

    Returns
    -------
    pytree of jax.Array
        The root's.

    Raises
    ------
    MismatchError
        A leaf's shape or dtype differs between the ranks; in a trace see :func:`pyhvd.jax.allreduce`.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    named = [(f"{name or 'broadcast_variables'}{jax.tree_util.keystr(path)}", each) for path, each in paths]
    if in_trace():
        results = [broadcast(each, root_rank, name=own, process_set=process_set) for own, each in named]
    else:
        handles = [
            collectives.broadcast_async(jnp.asarray(each), root_rank, own, process_set) for own, each in named
        ]
        results = [handle.result() for handle in handles]
    return jax.tree.unflatten(structure, results)


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's object, which is pickled; see :func:`pyhvd.broadcast_object`. Not in a trace."""
    require_no_trace("broadcast_object", obj, remedy="use broadcast")
    return objects.broadcast_object(obj, root_rank, name, process_set)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all ranks, pickled; see :func:`pyhvd.allgather_object`. Not in a trace."""
    require_no_trace("allgather_object", obj, remedy="use allgather")
    gathered: list[Any] = objects.allgather_object(obj, name, process_set)
    return gathered


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the process set has called it. Not in a trace."""
    _require_no_outer_trace("barrier")
    collectives.barrier(process_set)


def join() -> int:
    """Announce that this rank has no more data; see :func:`pyhvd.join`. Not in a trace."""
    _require_no_outer_trace("join")
    return collectives.join()


def _require_no_outer_trace(what: str) -> None:
    """Raise TypeError in a function that JAX compiles: it would run when traced, and never again."""
    if in_trace():
        raise TypeError(f"{what} cannot be compiled: call it outside of jit, grad and vmap")
