"""The callback door: a framework's callback into Python runs the collectives of a graph, one at a time."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyhvd.api.lifecycle import call_before_leaving
from pyhvd.errors import HorovodInternalError
from pyhvd.frameworks import failures
from pyhvd.frameworks.calls import TABLE
from pyhvd.frameworks.door import DRAIN_S


class RunsUnderWay:
    """Counts the runs under way, in any threads: each is a ``with`` block."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = threading.Condition()

    def __enter__(self) -> None:
        with self._changed:
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def drain(self, seconds: float) -> bool:
        """Wait for at most some seconds until no run is under way; return whether none is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._count, seconds)


_runs = RunsUnderWay()
call_before_leaving(lambda: _runs.drain(DRAIN_S))


def run_now(key: int, *arrays: Any) -> tuple[NDArray[Any], ...]:
    """Run a call of the table on arrays, and wait for its results.

    Raises
    ------
    HorovodInternalError
        The collective failed; the text ends with the call site, and the cause is the collective's exception.
    """
    call = TABLE[key]
    try:
        in_place = call.is_in_place
        # The arrays of a callback are the framework's: results need memory of their own.
        given = [np.array(each, order="C") if in_place else np.asarray(each, order="C") for each in arrays]
        with _runs:
            return tuple(call.run_on(given, in_place=in_place))
    except Exception as exc:
        text = failures.keep(exc)
        raise HorovodInternalError(f"{text} (the call is at {call.site})") from exc
