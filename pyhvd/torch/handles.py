"""Handles of calls that are made of other calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from pyhvd.api.handles import Handle


class CombinedHandle(Handle):
    """The promise of a result that is made of the results of other handles.

    A thread that wants the result waits for these handles one after the other, and makes the result once.

    Parameters
    ----------
    name : str
        The name of the call.
    parts : sequence of Handle
        What to wait for.
    finish : callable
        ``finish(results)`` returns the result.
    """

    __slots__ = ("_finish", "_lock", "_made", "_parts", "_result", "name")
    name: str

    def __init__(self, name: str, parts: Sequence[Handle], finish: Callable[[list[Any]], Any]) -> None:
        self.name, self._parts, self._finish = name, list(parts), finish
        self._lock = threading.Lock()
        self._made = False
        self._result: Any = None

    def done(self) -> bool:
        return all(part.done() for part in self._parts)

    def finished(self) -> bool:
        ended = [part.finished() for part in self._parts]  # of each, as one may raise
        return all(ended)

    def wait(self, timeout: float | None = None) -> bool:
        until = None if timeout is None else time.monotonic() + timeout
        for part in self._parts:
            if not part.wait(None if until is None else max(until - time.monotonic(), 0.0)):
                return False
        return True

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self.wait(timeout):
            raise TimeoutError(f"{self.name!r} has not ended within {timeout:g} s")
        errors = [part.exception() for part in self._parts]
        return next((error for error in errors if error is not None), None)

    def result(self, timeout: float | None = None) -> Any:
        error = self.exception(timeout)
        if error is not None:
            raise error
        with self._lock:
            if not self._made:
                self._result = self._finish([part.result() for part in self._parts])
                self._made = True
        return self._result

    def __call__(self) -> Any:
        """Return the result, as the function does that Horovod returns in place of a handle."""
        return self.result()

    def add_done_callback(self, callback: Callable[[Handle], None]) -> None:
        left = [len(self._parts)]

        def count(_: Handle) -> None:
            with self._lock:
                left[0] -= 1
                ended = not left[0]
            if ended:
                callback(self)

        for part in self._parts:
            part.add_done_callback(count)
        if not self._parts:
            callback(self)

    def flush(self) -> None:
        for part in self._parts:
            part.flush()

    def __repr__(self) -> str:
        state = "pending" if not self.done() else "failed" if self.exception(0) is not None else "done"
        return f"<pyhvd.Handle {self.name!r} {state}>"
