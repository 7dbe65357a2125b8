"""Waiting for the work that pyhvd has queued on a device."""

from __future__ import annotations

import math

from pyhvd.engine import context


def device_synchronize(timeout: float | None = None) -> None:
    """Wait until this rank's device has ended all work that pyhvd has queued on it. Not collective.

    A handle of arrays on a device is done when its work is queued. After this function their contents are
    final. Without such arrays it returns at once.

    Parameters
    ----------
    timeout : float, optional
        Longest wait in seconds; None: no limit.

    Raises
    ------
    HorovodInternalError
        A rank has failed, so that work on this device was aborted: results may be wrong.
    TimeoutError
        The device has not ended its work in time.
    RuntimeError
        The call is in a callback of a handle.
    NotInitializedError
        Before ``init()``, or after ``shutdown()``.

    Examples
    --------
    >>> import pyhvd as hvd
    >>> hvd.init()
    >>> hvd.device_synchronize()
    """
    context.current().runtime.synchronize_device(math.inf if timeout is None else timeout)
