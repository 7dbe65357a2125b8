# Handle: the promise of a result; a part of shared_memory.pyx.

@cython.freelist(256)
@cython.no_gc  # it holds nothing that leads back to it once it has ended; see FastPath.forget
cdef class Handle:
    """The promise of the result of one collective, or of one grouped collective.

    Returned by every ``*_async`` function. Usable from any thread, with :func:`poll` and
    :func:`synchronize`, or awaited in a coroutine.
    """

    cdef object __weakref__
    cdef CachedCall unit
    cdef uint64_t turn
    cdef bint ended
    cdef bint seen
    cdef object source
    cdef object target
    cdef object error

    def __init__(self):
        raise TypeError("a Handle is what pyhvd's *_async functions return, and is not made by hand")

    @property
    def name(self):
        """Name of the tensor, or of the grouped call."""
        return self.unit.name

    def done(self):
        """Return whether the collective has ended, well or not. Never blocks."""
        return self.ended or self._look()

    def wait(self, timeout=None):
        """Wait until the collective has ended.

        Parameters
        ----------
        timeout : float, optional
            Seconds; None waits as long as it takes.

        Returns
        -------
        bool
            False if it timed out; the collective goes on.
        """
        if self.ended or self._look():
            return True
        return self._wait(-1.0 if timeout is None else max(float(timeout), 0.0))

    def result(self, timeout=None):
        """Wait, and return the output (a list of outputs for a grouped call).

        Raises
        ------
        TimeoutError
            It did not end within ``timeout`` seconds; it goes on.
        HorovodInternalError
            The collective failed; its subclass says how.
        """
        if not self.ended and not self._look() and not self.wait(timeout):
            raise TimeoutError(f"{self.name!r} has not ended within {timeout:g} s")
        self.seen = True
        if self.error is not None:
            raise self.error.with_traceback(None)
        return self.target

    def exception(self, timeout=None):
        """Wait, and return the error that the collective ended with, or None."""
        if not self.wait(timeout):
            raise TimeoutError(f"{self.name!r} has not ended within {timeout:g} s")
        self.seen = True
        return self.error

    def add_done_callback(self, callback):
        """Call ``callback(handle)`` once it has ended, from the thread that ends it, or now if it has.

        A callback may submit; it must not wait for another handle: nothing would end it.
        """
        cdef FastPath lane
        if self.done():
            callback(self)
            return
        lane = self.unit.lane
        with lane.watching:
            lane.watched.append((self, callback))
        if pyhvd_unit_notify(&self.unit.c, self.turn):
            if lane.over:
                lane._run_callbacks()
            else:
                lane.call(lane.c.board.rank, PYHVD_CALL_DONE)

    def __await__(self):
        import asyncio
        import contextlib

        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def end():
            if not ended.done():
                ended.set_result(None)

        def tell(handle):
            # Where the loop has been closed, nobody awaits any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(end)

        self.flush()
        self.add_done_callback(tell)
        yield from ended.__await__()
        return self.result()

    def flush(self):
        """Send what has gathered: somebody waits."""
        self.unit.lane.flush()

    def __repr__(self):
        state = "pending" if not self.done() else "failed" if self.exception(0) is not None else "done"
        return f"<pyhvd.Handle {self.name!r} {state}>"

    def __del__(self):
        if self.error is not None and not self.seen:
            _log.warning("nobody looked at the error of %r: %s", self.unit.name, self.error)

    cdef bint _look(self) except -1:
        if not pyhvd_unit_finished(&self.unit.c, self.turn):
            return False
        self._end()
        return True

    cdef int _end(self) except -1:
        """It has ended, and its owner knows: nothing need be kept alive any longer."""
        cdef CachedCall unit = self.unit
        cdef object source = None
        cdef object handle = None
        if self.ended:
            return 0
        self.ended = True
        pthread_mutex_lock(&unit.lane.c.mutex)
        # Both are let go of outside the mutex: what they hold may have a finalizer.
        source, self.source = self.source, None
        if unit.handle is self:
            handle, unit.handle = unit.handle, None
        pthread_mutex_unlock(&unit.lane.c.mutex)
        return 0

    cdef bint _wait(self, double seconds) except -1:
        cdef FastPath lane = self.unit.lane
        cdef int64_t left = -1 if seconds < 0 or seconds > 1e9 else <int64_t>(seconds * 1e9)
        cdef int64_t slice
        cdef int64_t began = pyhvd_now()
        cdef int64_t now = began
        cdef int64_t until = began + left
        cdef int status
        lane.check_thread()
        while True:
            slice = PYHVD_NAP if left < 0 or left > PYHVD_NAP else left
            with nogil:
                status = pyhvd_lane_wait(&lane.c, &self.unit.c, self.turn, now, slice)
            if status == PYHVD_DONE:
                pyhvd_lane_waited(&lane.c, began)
                self._end()
                return True
            PyErr_CheckSignals()
            if left >= 0:
                left = until - pyhvd_now()  # an engine that has given up returns at once
                if left <= 0:
                    pyhvd_lane_waited(&lane.c, began)
                    return False
            if status == PYHVD_CLOSED:
                time.sleep(1e-3)  # the background thread is about to fail this one
            now = pyhvd_now()
