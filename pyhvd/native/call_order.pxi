# CallOrder: calls of one name that wait for each other; a part of shared_memory.pyx.

@cython.final
cdef class CallOrder:
    """Context manager by which the threads of a rank make calls of one name, one after the other.

    A call within another one, as of a signal's handler, waits for that one's collective.

    Parameters
    ----------
    background_thread : int, optional
        Identifier of the rank's thread that ends calls, and so must not wait for one.
    """

    cdef object acquire  # of an RLock, which guards `last`
    cdef object release
    cdef unsigned long background_thread
    cdef Handle last  # if its wait was interrupted, the next call waits for its end

    def __init__(self, unsigned long background_thread=0):
        lock = threading.RLock()
        self.acquire, self.release = lock.acquire, lock.release
        self.background_thread = background_thread

    def __enter__(self):
        self.begin()
        return self

    def __exit__(self, kind, exc, traceback):
        self.release()

    cpdef object move(self, int verb, int form, tensors, term, name, process_set):
        """Submit a call as :func:`start_move` does, wait for it, and return its result."""
        cdef Handle handle = start_move(verb, form, tensors, term, name, process_set)
        self.last = handle
        result = handle.result()
        self.last = None
        return result

    cdef int begin(self) except -1:
        """Take the lock, and wait for the end of an earlier call."""
        self.acquire()
        if self.last is not None:
            try:
                self.last.wait()
            except BaseException:
                self.release()
                raise
        return 0


cpdef CallOrder find_order(process_set, name):
    """Return the order of a process set's calls of one of pyhvd's own names.

    Raises
    ------
    NotInitializedError
        There is no context, or this is a forked child.
    ValueError
        This rank cannot use the process set.
    RuntimeError
        The caller is a callback of a handle, which must not wait.
    """
    cdef dict orders = find_holder().usable_orders()
    cdef CallOrder order = None
    cdef object set_id = 0
    if process_set is not _global_set:
        set_id = process_set.process_set_id if isinstance(process_set, _set_class) else None
    if orders is not None:
        order = <CallOrder>orders.get((set_id, name))
    if order is None or order.background_thread == PyThread_get_thread_ident():
        order = <CallOrder?>_make_order(process_set, name)
    return order


def move_in_order(int verb, int form, tensors, term, name, process_set):
    """Make one call of one of pyhvd's own names, after the earlier ones; return its result.

    The arguments are those of :func:`start_move`, the errors also those of :func:`find_order`.
    """
    cdef CallOrder order = find_order(process_set, name)
    order.begin()
    try:
        return order.move(verb, form, tensors, term, name, process_set)
    finally:
        order.release()
