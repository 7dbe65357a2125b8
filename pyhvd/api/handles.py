"""Handles: the promise of a collective's result; ``poll`` and ``synchronize`` over them.

Owns :class:`QueuedHandle`, the handle of calls that go by message. Its base :class:`Handle` is the fast
path's handle: an extension type can have no base in Python. A queued handle knows two things of the runtime:
the number of tensors to wait for, and a function that flushes.

Memory ordering:

1. The completing thread writes ``_results`` and ``_error``, then releases ``_latch``.
2. Other threads read them after they acquired ``_latch``, or saw ``_done``, which is written last, under
   ``_lock``.
3. The latch is a lock that is held until completion; each waiter passes it on.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from pyhvd.devices.pending import DeviceWaits, pending_in
from pyhvd.errors import copy_error
from pyhvd.native.shared_memory import Handle
from pyhvd.observe.metrics import Meter

__all__ = ["Handle", "QueuedHandle", "poll", "synchronize"]

_log = logging.getLogger("pyhvd")


_OPEN = object()
"""Placeholder of a missing result."""


class QueuedHandle(Handle):
    """The handle of a call that goes by message; :class:`Handle` documents its methods.

    Parameters
    ----------
    name : str
        Name of the tensor, or of the grouped call.
    parts : int
        Number of tensors to wait for.
    flush : callable
        Makes the runtime send the gathered submissions.
    result : callable
        Builds the call's result from the tensors' results.
    device : DeviceWaits
        What to ask of this rank's device.
    meter : Meter
        Counts waits and errors.
    """

    __slots__ = (
        *("_callbacks", "_device", "_done", "_error", "_flush", "_latch", "_left", "_lock", "_meter"),
        *("_result", "_results", "_seen", "name"),
    )
    name: str

    def __init__(
        self,
        name: str,
        parts: int,
        flush: Callable[[], None],
        result: Callable[[list[Any]], Any],
        device: DeviceWaits,
        meter: Meter,
    ) -> None:
        self.name = name
        self._meter = meter
        self._left = parts
        self._flush = flush
        self._result = result
        self._device = device
        self._results: list[Any] = [_OPEN] * parts
        self._error: BaseException | None = None
        self._done = False
        self._seen = False
        self._callbacks: list[Callable[[Handle], None]] = []
        self._lock = threading.Lock()
        self._latch = threading.Lock()
        self._latch.acquire()
        if not parts:
            self._finish()

    # -- for the caller ------------------------------------------------------------------------------

    def done(self) -> bool:
        return self._done

    def finished(self) -> bool:
        if not self._done:
            return False
        error = self.exception(0)
        if error is not None:
            raise error
        pending = pending_in(self._results)
        if not all(each.has_ended for each in pending):
            return False
        if pending:
            self._device.check()  # aborted work ends, too
        return True

    def wait(self, timeout: float | None = None) -> bool:
        if self._done:
            return True
        seconds = -1 if timeout is None else min(max(timeout, 0.0), threading.TIMEOUT_MAX)
        began = self._meter.clock()
        try:
            self._flush()
            if not self._latch.acquire(timeout=seconds):
                return False
            self._latch.release()
            return True
        finally:
            self._meter.waited(began)

    def result(self, timeout: float | None = None) -> Any:
        until = math.inf if timeout is None else time.monotonic() + timeout
        error = self.exception(timeout)
        if error is not None:
            raise error
        result = self._result(self._results)
        if self._device.wait is not None and (pending := pending_in(self._results)):
            self._device.wait(pending, max(until - time.monotonic(), 0.0))
        return result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self.wait(timeout):
            raise TimeoutError(f"{self.name!r} has not ended within {timeout:g} s")
        self._seen = True
        return None if self._error is None else copy_error(self._error)

    def add_done_callback(self, callback: Callable[[Handle], None]) -> None:
        with self._lock:
            if not self._done:
                self._callbacks.append(callback)
                return
        callback(self)

    def flush(self) -> None:
        self._flush()

    def __repr__(self) -> str:
        state = "pending" if not self._done else "failed" if self._error is not None else "done"
        return f"<pyhvd.Handle {self.name!r} {state}>"

    def __del__(self) -> None:
        if getattr(self, "_error", None) is not None and not self._seen:
            _log.warning("the error of %r was never read; call result(): %s", self.name, self._error)

    # -- for the runtime -----------------------------------------------------------------------------

    def complete(self, part: int, result: Any, error: BaseException | None) -> None:
        """Complete one tensor of the call; later completions of the same tensor have no effect."""
        with self._lock:
            if self._results[part] is not _OPEN:
                return
            self._results[part] = result
            if error is not None:
                self._error = error if self._error is None else self._error
                self._meter.failed(type(error).__name__)
            self._left -= 1
            if self._left:
                return
        self._finish()

    def _finish(self) -> None:
        with self._lock:
            self._done = True
            callbacks, self._callbacks = self._callbacks, []
        self._latch.release()
        for callback in callbacks:
            try:
                callback(self)
            except BaseException:
                _log.exception("a callback of %r raised", self.name)


def poll(handle: Handle) -> bool:
    """Return whether a handle's collective has ended; after True, :func:`synchronize` does not block.

    With ``PYHVD_DEVICE_WAIT=host`` it may still wait for a device: ask :meth:`Handle.finished`.

    Raises
    ------
    ValueError
        ``handle`` was not returned by an ``*_async`` function.
    """
    return _checked(handle).done()


def synchronize(handle: Handle) -> Any:
    """Wait for a handle's collective and return its output (a list for a grouped call).

    May be called again, and then returns the same output.

    Raises
    ------
    ValueError
        ``handle`` was not returned by an ``*_async`` function.
    HorovodInternalError
        The collective failed.
    """
    return _checked(handle).result()


def _checked(handle: Handle) -> Handle:
    if not isinstance(handle, Handle):
        raise ValueError(f"expected a handle from one of pyhvd's *_async functions, not {handle!r}")
    return handle
