"""The callback door: a framework's callback into Python runs the collectives of a graph, one at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyhvd.errors import HorovodInternalError
from pyhvd.frameworks import failures
from pyhvd.frameworks.calls import TABLE


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
        return tuple(call.run_on(given, in_place=in_place))
    except Exception as exc:
        text = failures.keep(exc)
        raise HorovodInternalError(f"{text} (the call is at {call.site})") from exc
