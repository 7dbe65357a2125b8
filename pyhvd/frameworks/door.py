"""The native door: graphs submit their collectives through an extension, in C once the ranks remember them.

The extension's C++ header ``native/graph_ops/calls.hpp`` says who calls what, and in which thread.
"""

from __future__ import annotations

import ctypes
import importlib
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyhvd.api import c_api
from pyhvd.api.handles import Handle
from pyhvd.api.lifecycle import call_after_leaving, call_before_leaving
from pyhvd.engine import context
from pyhvd.frameworks import failures
from pyhvd.frameworks.calls import TABLE, GraphCall

DRAIN_S = 5.0
"""Seconds for which ``shutdown()`` waits for collectives of graphs that are under way."""
_CLOSE_S = 5.0
Source = tuple[int, tuple[int, ...]]


class NativeDoor:
    """One extension of ``pyhvd.native``, connected to this process's table of calls.

    Parameters
    ----------
    name : str
        The extension, as ``"_jax_ops"``.

    Raises
    ------
    ImportError
        The extension was not built.
    """

    def __init__(self, name: str) -> None:
        self.ops: Any = importlib.import_module(f"pyhvd.native.{name}")
        self.ops.use(c_api.capsule(), self._submit)
        failures.read_from(self.ops.errors)
        call_before_leaving(lambda: self.ops.drain(DRAIN_S))
        call_after_leaving(lambda: self.ops.close(_CLOSE_S))

    def add(self, call: GraphCall, *, by_python: bool = False) -> int:
        """Return the key of a call, an attribute of the op that runs it.

        Parameters
        ----------
        call : GraphCall
            The call.
        by_python : bool
            Whether it must always go through Python, because its results can have other sizes in each run.
        """
        self.ops.wait_for(int(context.current().config.graph_wait_ms * 1e6))
        key = TABLE.add(call)
        self.ops.add(key, call.site, by_python)
        return key

    def _submit(
        self,
        key: int,
        run: int,
        sources: list[Source],
        targets: list[int],
        help_s: float,
        ask: bool,  # noqa: FBT001
    ) -> int | str | None:
        """Submit a run of a call, in a thread of the framework.

        Parameters
        ----------
        key, run : int
            The call, and the run as :meth:`_finish` gives it to the extension.
        sources : list of (int, tuple of int)
            Address and shape of each operand.
        targets : list of int
            Address of each result; 0 if pyhvd makes it.
        help_s : float
            Seconds to wait for the result and make progress.
        ask : bool
            Whether to return an id in place of a submission, if there is one.

        Returns
        -------
        int, str or None
            An id by which C code can submit it; the text of an error; or None, if it is submitted.
        """
        try:
            call = TABLE[key]
            given = [_array_at(*each, dtype) for each, dtype in zip(sources, call.dtypes, strict=True)]
            if ask and (number := call.c_id(given)):
                call.check()
                return number
            results = None
            if call.is_in_place:
                pairs = zip(sources, targets, given, strict=True)
                results = [
                    mine if at == source[0] else _array_at(at, source[1], mine.dtype)
                    for source, at, mine in pairs
                ]
            handle = call.start(given, results)
            if help_s:
                handle.wait(help_s)
        except BaseException as exc:
            return failures.keep(exc)
        handle.add_done_callback(lambda ended: self._finish(run, call, ended, len(targets)))
        return None

    def _finish(self, run: int, call: GraphCall, ended: Handle, count: int) -> None:
        """Tell the extension that a run has ended."""
        text, results = None, []
        try:
            results = call.results_of(ended)[:count]
        except BaseException as exc:
            text = failures.keep(exc)
        if call.is_in_place:
            self.ops.finish(run, text, [], None)
            return
        outputs = [np.asarray(each, order="C") for each in results]
        described = [(each.ctypes.data, each.nbytes, each.shape) for each in outputs]
        self.ops.finish(run, text, described, outputs)


def _array_at(address: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an array in memory that the framework owns."""
    count = int(np.prod(shape, dtype=np.int64))
    if not count:
        return np.empty(shape, dtype)
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return np.ndarray(shape, dtype, memory)  # type: ignore[arg-type]  # any buffer


_doors: dict[str, NativeDoor] = {}
_lock = threading.Lock()


def native_door(name: str) -> NativeDoor | None:
    """Return the door of an extension, as ``"_jax_ops"``; None if it was not built."""
    with _lock:
        if name not in _doors:
            try:
                _doors[name] = NativeDoor(name)
            except ImportError:
                return None
        return _doors[name]


def callbacks_are_asked_for() -> bool:
    """Return whether the knob PYHVD_GRAPH_OPS excludes the native doors."""
    return bool(context.current().config.graph_ops == "callback")
