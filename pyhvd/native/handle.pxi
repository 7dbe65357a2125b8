# Handle: the promise of a result; a part of shared_memory.pyx.

@cython.freelist(256)
@cython.no_gc  # once it has ended, nothing in it refers back to it; see FastPath.forget
cdef class Handle:
    """The promise of the result of one collective, or of one grouped collective.

    Returned by every ``*_async`` function. Usable from any thread, with :func:`poll` and
    :func:`synchronize`, or awaited in a coroutine.
    """

    cdef object __weakref__
    cdef CachedCall call
    cdef uint64_t turn
    cdef uint64_t place  # 1 + the number of a call without a name; else 0
    cdef bint ended
    cdef bint seen
    cdef bint pairs  # whether each result of an allgather comes with the rows from each rank
    cdef object source
    cdef object target
    cdef object error  # never raised itself: its traceback would refer to frames that refer to this handle

    def __init__(self):
        raise TypeError("cannot create a Handle: call one of pyhvd's *_async functions")

    @property
    def name(self):
        """Name of the tensor, or of the grouped call."""
        return f"{_UNNAMED}.{self.place - 1}" if self.place else self.call.name

    def done(self):
        """Return whether the collective has ended, with a result or an error. Never blocks.

        If it has not, offer the core to other threads, for half of the time at most.
        """
        if self.ended or self._look():
            return True
        with nogil:
            pyhvd_fast_path_offer_core(&self.call.path.c)
        return self._look()

    def finished(self):
        """Return whether the collective has ended, and its work on a device too. Never blocks.

        After True the contents of the result are final. For arrays in host memory it is :meth:`done`.

        Raises
        ------
        HorovodInternalError
            The collective failed, or work on this rank's device was aborted, perhaps of another call.
        """
        if not self.done():
            return False
        self.result(0)
        return True

    def wait(self, timeout=None):
        """Wait until the collective has ended.

        Parameters
        ----------
        timeout : float, optional
            Seconds; None: no limit.

        Returns
        -------
        bool
            False if it timed out; the collective continues.
        """
        return self._wait_at_most(timeout)

    def result(self, timeout=None):
        """Wait, and return the output (a list of outputs for a grouped call).

        Raises
        ------
        TimeoutError
            It did not end within ``timeout`` seconds; it continues.
        HorovodInternalError
            The collective failed; its subclass says how.
        """
        if not self._wait_at_most(timeout):
            raise TimeoutError(f"{self.name!r} has not ended within {timeout:g} s")
        self.seen = True
        if self.error is not None:
            raise copy_error(self.error)
        return self.target

    def exception(self, timeout=None):
        """Wait, and return a new object of the error that the collective ended with, or None."""
        if not self.wait(timeout):
            raise TimeoutError(f"{self.name!r} has not ended within {timeout:g} s")
        self.seen = True
        return None if self.error is None else copy_error(self.error)

    def add_done_callback(self, callback):
        """Call ``callback(handle)`` at the end: on the background thread, or now if it has ended.

        A callback may submit. It must not wait for another handle: it runs on the thread that would end
        that one.
        """
        cdef FastPath path
        if self.ended or self._look():
            callback(self)
            return
        path = self.call.path
        with path.callbacks_lock:
            path.callbacks.append((self, callback))
        if pyhvd_call_notify(&self.call.c, self.turn):
            if path.has_ended:
                path._run_callbacks()
            else:
                pyhvd_ready_table_wake(&path.c.setup.table, path.c.setup.table.rank, PYHVD_WAKE_DONE)
        elif self.call.grouped and path.generation == _generation:
            # It gains little by waiting for other calls to share a batch with.
            with nogil:
                pyhvd_fast_path_flush(&path.c, False, pyhvd_now())
            pyhvd_ready_table_wake(&path.c.setup.table, path.c.setup.table.rank, 0)

    def __await__(self):
        import asyncio
        import contextlib

        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def end():
            if not ended.done():
                ended.set_result(None)

        def tell(handle):
            # A closed loop raises RuntimeError: no coroutine awaits any longer.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(end)

        self.flush()
        self.add_done_callback(tell)
        yield from ended.__await__()
        return self.result()

    def flush(self):
        """Send all submissions that are on hold: a thread is about to wait."""
        self.call.path.flush()

    def __repr__(self):
        state = "pending"
        if self.ended or self._look():
            state = "failed" if self.exception(0) is not None else "done"
        return f"<pyhvd.Handle {self.name!r} {state}>"

    def __del__(self):
        if self.error is not None and not self.seen:
            _log.warning("the error of %r was never read; call result(): %s", self.name, self.error)

    cdef bint _look(self) except -1:
        if not pyhvd_call_finished(&self.call.c, self.turn):
            return False
        self._end()
        return True

    cdef int _end(self) except -1:
        """Drop all references that only a call in flight needs."""
        cdef CachedCall call = self.call
        cdef object source = None
        cdef object handle = None
        if self.ended:
            return 0
        self.ended = True
        pthread_mutex_lock(&call.path.c.submissions.mutex)
        # Both are released outside the mutex: their objects may have finalizers.
        source, self.source = self.source, None
        if call.handle is self:
            handle, call.handle = call.handle, None
        pthread_mutex_unlock(&call.path.c.submissions.mutex)
        return 0

    cdef bint _wait_at_most(self, timeout) except -1:
        if self.ended or self._look():
            return True
        return self._wait(-1.0 if timeout is None else max(float(timeout), 0.0))

    cdef bint _wait(self, double seconds) except -1:
        cdef FastPath path = self.call.path
        cdef int64_t left = -1 if seconds < 0 or seconds > 1e9 else <int64_t>(seconds * 1e9)
        cdef int64_t slice
        cdef int64_t began = pyhvd_now()
        cdef int64_t now = began
        cdef int64_t until = began + left
        cdef int status
        cdef bint is_long = False
        cdef bint on_background = PyThread_get_thread_ident() == path.background_thread
        if on_background or path.entries or path.generation != _generation:
            path.prepare_wait()
        try:
            while True:
                slice = PYHVD_NAP if left < 0 or left > PYHVD_NAP else left
                with nogil:
                    status = pyhvd_fast_path_wait(&path.c, &self.call.c, self.turn, now, slice)
                if status == PYHVD_DONE:
                    pyhvd_fast_path_waited(&path.c, began)
                    self._end()
                    return True
                PyErr_CheckSignals()
                if left >= 0:
                    left = until - pyhvd_now()  # a closed path returns at once
                    if left <= 0:
                        pyhvd_fast_path_waited(&path.c, began)
                        return False
                if status == PYHVD_CLOSED:
                    time.sleep(1e-3)  # the background thread is about to end this call with an error
                if not is_long:
                    is_long = True
                    pyhvd_fast_path_wait_longer(&path.c, 1)
                now = pyhvd_now()
        finally:
            if is_long:
                pyhvd_fast_path_wait_longer(&path.c, -1)
