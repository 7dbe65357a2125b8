"""The names of collectives in graphs: equal on ranks that trace equal programs, in whatever order."""

from __future__ import annotations

import re
import threading
import weakref
from collections import Counter
from typing import Any

import tensorflow as tf

_UNUSUAL = re.compile(r"[^\w./-]")
_lock = threading.Lock()
_taken: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()


def default_name(verb: str, *, with_scope: bool) -> str:
    """Return the name of a call that has none: verb, traced function, name scope, and a number if needed."""
    graph = tf.compat.v1.get_default_graph()
    scope = graph.get_name_scope() if with_scope else ""
    function = getattr(_outermost(graph), "name", "graph")
    return distinct_name(".".join(part for part in (verb, function, scope) if part))


def distinct_name(name: str) -> str:
    """Return a name, with a number if a call of the traced function has it already."""
    name = _UNUSUAL.sub("_", name)
    with _lock:
        counts = _taken.setdefault(_outermost(tf.compat.v1.get_default_graph()), Counter())
        counts[name] += 1
        return name if counts[name] == 1 else f"{name}.{counts[name]}"


def _outermost(graph: Any) -> Any:
    """Return the outermost function that is being traced: branches and loops are graphs of their own."""
    while getattr(outer := getattr(graph, "outer_graph", None), "outer_graph", None) is not None:
        graph = outer
    return graph
