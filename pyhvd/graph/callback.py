"""The callback door: a framework's callback into Python runs the collectives of a graph, one at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyhvd.errors import HorovodInternalError
from pyhvd.graph import failures
from pyhvd.graph.calls import TABLE


def run_now(key: int, *arrays: Any) -> tuple[NDArray[Any], ...]:
    """Run a call of the table on arrays, and wait for its results.

    Raises
    ------
    HorovodInternalError
        The collective failed; the text ends with the call site, and the cause is the collective's exception.
    """
    call = TABLE[key]
    try:
        given = [np.ascontiguousarray(each) for each in arrays]
        # The arrays of a callback are the framework's: results need memory of their own.
        results = [each.copy() for each in given] if call.is_in_place else None
        handle = call.start(results if results is not None else given, results)
        return tuple(call.results_of(handle))
    except Exception as exc:
        text = failures.keep(exc)
        raise HorovodInternalError(f"{text} (the call is at {call.site})") from exc
