# The way in: from a verb to the lane of the rank that calls it; a part of shared_memory.pyx.

cdef class FastPathSlot:
    """Where :func:`start` finds the lane of a rank; None: everything goes by message."""

    cdef FastPath _lane

    @property
    def lane(self):
        """The rank's lane, or None."""
        return self.get()

    @lane.setter
    def lane(self, FastPath lane):
        with cython.critical_section(self):
            self._lane = lane

    cdef FastPath get(self):
        with cython.critical_section(self):  # without the GIL, another thread may let go of it meanwhile
            return self._lane


cdef object _current_slot = None
cdef FastPathSlot _process_slot = None
cdef object _set_class = None
cdef object _global_set = None
cdef object _by_message = None
cdef int _rank_threads = 0

cdef enum:
    _GROUPED = 1
    _IN_PLACE = 2
    _WAITS = 4

GROUPED, IN_PLACE, WAITS = _GROUPED, _IN_PLACE, _WAITS


def set_lookup(current_slot, FastPathSlot process_slot, set_class, global_set, by_message):
    """Tell :func:`start` how to find the caller's lane, what process sets are, and who takes all other calls."""
    global _current_slot, _process_slot, _set_class, _global_set, _by_message
    _current_slot, _process_slot = current_slot, process_slot
    _set_class, _global_set = set_class, global_set
    _by_message = by_message


def count_rank_threads(int change):
    """One more thread, or one less, plays a rank of its own; under a lock of the caller's."""
    global _rank_threads
    _rank_threads += change


def start(int form, tensors, average, name, op, prescale, postscale, process_set):
    """Submit an allreduce: to the fast path if the ranks remember the call, else by message.

    Parameters
    ----------
    form : int
        Flags: GROUPED if ``tensors`` is a list, IN_PLACE if the results go into them, and WAITS if the caller
        waits at once, so that no other thread need be woken.
    tensors, average, name, op, prescale, postscale, process_set
        The user's arguments.

    Returns
    -------
    Handle
        The promise of the result.
    """
    cdef object handle = _submit_cached(form, tensors, average, name, op, prescale, postscale, process_set)
    if handle is None:
        return _by_message(form, tensors, average, name, op, prescale, postscale, process_set)
    return handle


cdef object _submit_cached(
    int form, object tensors, object average, object name, object op, object prescale, object postscale,
    object process_set
):
    """Submit a call that the ranks remember; return None for any other call."""
    cdef FastPathSlot slot = _process_slot if _rank_threads == 0 else _current_slot()
    cdef FastPath lane = slot.get()
    cdef object set_id = 0
    cdef bint in_place = form & _IN_PLACE
    cdef bint ring = not form & _WAITS
    if lane is None or average is not None:
        return None
    if process_set is not _global_set:
        if not isinstance(process_set, _set_class):
            return None
        set_id = process_set.process_set_id
    if form & _GROUPED:
        return lane.submit_group(set_id, name, tensors, op, prescale, postscale, in_place, ring)
    return lane.submit(set_id, name, tensors, op, prescale, postscale, in_place, ring)
