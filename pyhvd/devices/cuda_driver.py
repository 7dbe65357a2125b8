"""Functions of CUDA's driver that CuPy lacks, or that it calls with a side effect."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@functools.cache
def driver() -> Any:
    """Return the driver's library."""
    return ctypes.CDLL("libcuda.so.1")


def relax_captures() -> None:
    """Let the calling thread query events and allocate memory while other threads capture graphs.

    A thread's default is that these calls invalidate a capture on any other thread.
    """
    driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))


def query_event(event: int) -> int:
    """Return an event's status: 0 if it has passed, 600 if it has not, else an error.

    The runtime's query would leave "not ready" as the thread's last error, which the next check of another
    library reports: of torch, after it has launched a kernel.
    """
    return int(driver().cuEventQuery(ctypes.c_void_p(event)))
