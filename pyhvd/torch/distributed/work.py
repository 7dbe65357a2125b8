"""Works: what torch.distributed returns for a collective, over a handle; and their futures.

A work ends when a thread asks for it: the caller in ``wait()``, or, if somebody has asked for its future, a
thread of :class:`CompletionThreads`. Callbacks of a future run in the thread that completes it, and may wait
for other works. So this is never pyhvd's background thread, and there is always one more such thread.

Memory ordering: ``_ended`` is written last, under ``lock``; who has seen it may read all else.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pyhvd.api.lifecycle import call_after_leaving
from pyhvd.errors import HorovodInternalError, copy_error
from pyhvd.torch.distributed.errors import CollectiveError, CollectiveTimeoutError
from pyhvd.torch.distributed.tensors import Store
from pyhvd.torch.distributed.untraced import untraced
from pyhvd.torch.handles import CombinedHandle

_KEEPS_NO_WORK = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7)
"""Whether torch's C++ code refers to a Work without keeping its Python object."""


@untraced
class Work(dist.Work):
    """The promise of one collective; made by :func:`make_work`.

    Attributes
    ----------
    handle : Handle
        Of the call; None once its result is stored.
    outputs : list of torch.Tensor
        What :meth:`result` and the future return.
    limit : float or None
        For how many seconds :meth:`wait` waits without a time of its own; None is for ever.
    store : callable or None
        ``store(result)`` writes the call's result into the outputs.
    """

    # Defaults, which are set for all works at once.
    handle: Any = None
    outputs: list[Any]
    limit: float | None = None
    store: Store | None = None
    lock = threading.Lock()
    _ended = False
    _error: BaseException | None = None
    _future: Any = None
    _open_future: Any = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait, and store the result; raise CollectiveError if the collective failed."""
        if not self._ended:
            self.end(timeout.total_seconds() if timeout and timeout > _NO_TIME else self.limit)
        if _KEEPS_NO_WORK:
            _kept.pop(id(self), None)
        if self._error is not None:
            raise copy_error(self._error)
        return True

    def synchronize(self) -> None:
        """Wait, as :meth:`wait` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the collective has ended."""
        handle = self.handle
        return self._ended or handle is None or handle.done()

    def is_success(self) -> bool:
        """Return whether the collective has ended without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of a collective that has ended."""
        if not self._ended and self.is_completed():
            self.end(None)
        return self._error

    def result(self) -> list[Any]:
        """Return the tensors that the collective has written."""
        self.wait()
        return self.outputs

    def source_rank(self) -> int:
        """Return the rank in the group that a received tensor is from."""
        raise CollectiveError("only a receive from any rank has a source rank")

    def _source_rank(self) -> int:
        return self.source_rank()

    def end(self, seconds: float | None, waited: float | None = None) -> None:
        """Wait for the collective, and store its result, once; never raises.

        ``waited`` are the seconds that an error tells, if the wait has begun before.
        """
        handle = self.handle
        if handle is None or handle.wait(seconds):
            with self.lock:
                if not self._ended:
                    self._store_result()
        else:
            self._error = CollectiveTimeoutError.late(handle, waited or seconds)
            self._ended = True

    def _store_result(self) -> None:
        try:
            result = self.handle.result()
            if self.store is not None:
                self.store(result)
        except HorovodInternalError as exc:
            self._error = CollectiveError.of(exc)
        except Exception as exc:
            self._error = exc
        self.handle = self.store = None
        self._ended = True

    def get_future(self) -> Any:
        """Return a future with the outputs; its callbacks run on a thread for completions."""
        with self.lock:
            if self._future is not None:
                return self._future
            base: Any = torch.futures.Future()
            # An exception that Python sets is only a value: C++ code would take it for tensors.
            self._open_future, self._future = base, base.then(_value_of)
            handle = self.handle
        if _KEEPS_NO_WORK:
            _kept.pop(id(self), None)
        if handle is None:
            self.complete()
        else:
            _unfinished.add(self, self.limit)
            handle.flush()
            handle.add_done_callback(self._complete_soon)
        return self._future

    def _complete_soon(self, _: Any) -> None:
        _threads.run(self.complete)

    def complete(self) -> None:
        """End, if that is due, and complete the future, once; on a thread for completions."""
        _unfinished.remove(self)
        if not self._ended:
            self.end(0.0, self.limit)
        with self.lock:
            base, self._open_future = self._open_future, None
        if base is not None:
            base.set_result(self.outputs if self._error is None else copy_error(self._error))


def make_work(
    handle: Any,
    outputs: list[Any],
    limit: float | None,
    store: Store | None = None,
    kind: type[Work] = Work,
) -> Work:
    """Return the work of a call that has been submitted."""
    work = kind()
    work.handle, work.outputs, work.limit, work.store = handle, outputs, limit, store
    work.lock = threading.Lock()
    if _KEEPS_NO_WORK:
        _kept[id(work)] = work
    return work


def end_now(handle: Any, limit: float | None, store: Store | None) -> Work:
    """Wait for a call whose caller waits at once, and store its result; return a work that has ended.

    torch's functions wait so if ``async_op`` is false, and then return nothing. So this work is the same each
    time, and has no outputs.
    """
    try:
        result = handle.result(limit)
    except TimeoutError:
        raise CollectiveTimeoutError.late(handle, limit) from None
    except HorovodInternalError as exc:
        raise CollectiveError.of(exc) from exc
    if store is not None:
        store(result)
    return _ENDED


def join_works(works: list[Work], outputs: list[Any], limit: float | None) -> Work:
    """Return one work that ends when all of these have."""
    handles = [work.handle for work in works if work.handle is not None]
    handle = CombinedHandle("coalesced calls", handles, lambda _: None)

    def store(_: Any) -> None:
        for work in works:
            work.wait()

    return make_work(handle, outputs, limit, store)


class _EndedWork(Work):
    outputs: list[Any] = []  # noqa: RUF012 - nobody changes it
    _ended = True


_ENDED = _EndedWork()
_NO_TIME = timedelta(0)
_FINISH_S = 1.0
_kept: dict[int, Work] = {}


def _value_of(future: Any) -> Any:
    value = future.value()
    if isinstance(value, BaseException):
        raise value
    return value


class CompletionThreads:
    """Threads that run short functions in order; while all are inside one, another thread is started."""

    def __init__(self) -> None:
        mutex = threading.Lock()
        self._lock, self._quiet = threading.Condition(mutex), threading.Condition(mutex)
        self._jobs: deque[Callable[[], None]] = deque()
        self._idle = self._busy = 0
        self._pid = os.getpid()

    def run(self, job: Callable[[], None]) -> None:
        """Let a thread run a function soon; from any thread."""
        with self._lock:
            self._jobs.append(job)
            if self._idle >= len(self._jobs):
                self._lock.notify()
                return
        threading.Thread(target=self._main, name="pyhvd-completions", daemon=True).start()

    def _main(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
                has_job = self._lock.wait_for(lambda: self._jobs, 10.0)
                self._idle -= 1
                if not has_job:
                    return
                job = self._jobs.popleft()
                self._busy += 1
            job()
            with self._lock:
                self._busy -= 1
                self._quiet.notify()

    def finish(self) -> None:
        """Wait until no function runs or is due, at most 1 s.

        The interpreter ends a thread that comes back to Python after the main thread's end. C++ code of torch
        does not expect this, and aborts the process. A forked child has no such threads.
        """
        if os.getpid() == self._pid:
            with self._quiet:
                self._quiet.wait_for(lambda: not self._jobs and not self._busy, _FINISH_S)


class Unfinished:
    """Works whose futures are not complete: a thread completes those that are late with an error."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._until: dict[Work, float] = {}
        self._wakes = math.inf  # when the thread looks again; inf: there is none

    def add(self, work: Work, seconds: float | None) -> None:
        """Complete a work after some seconds, unless it is removed before; None is never."""
        until = math.inf if seconds is None else time.monotonic() + seconds
        with self._lock:
            self._until[work] = until
            if until >= self._wakes:
                return
            is_new, self._wakes = self._wakes == math.inf, until
            self._lock.notify()
        if is_new:
            threading.Thread(target=self._main, name="pyhvd-time-limits", daemon=True).start()

    def remove(self, work: Work) -> None:
        """Forget a work."""
        with self._lock:
            self._until.pop(work, None)

    def _main(self) -> None:
        while True:
            with self._lock:
                now = time.monotonic()
                late = [work for work, until in self._until.items() if until <= now]
                for work in late:
                    del self._until[work]
                self._wakes = min(self._until.values(), default=math.inf)
                if not late and self._wakes == math.inf:
                    return
                if not late:
                    self._lock.wait(min(self._wakes - now, threading.TIMEOUT_MAX))
            for work in late:
                _threads.run(work.complete)


_threads = CompletionThreads()
call_after_leaving(_threads.finish)  # pyhvd's end fails the calls that are pending
_unfinished = Unfinished()
