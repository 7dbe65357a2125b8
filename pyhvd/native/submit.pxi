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
cdef int _rank_threads = 0


def set_lookup(current_slot, FastPathSlot process_slot, set_class, global_set):
    """Tell :func:`start` how to find the caller's lane, and what process sets are."""
    global _current_slot, _process_slot, _set_class, _global_set
    _current_slot, _process_slot = current_slot, process_slot
    _set_class, _global_set = set_class, global_set


def count_rank_threads(int change):
    """One more thread, or one less, plays a rank of its own; under a lock of the caller's."""
    global _rank_threads
    _rank_threads += change


def start(
    bint grouped, bint inplace, bint waits, tensors, average, name, op, prescale, postscale, process_set
):
    """Submit an allreduce to the fast lane, if it is one that the ranks remember.

    Parameters
    ----------
    grouped, inplace : bool
        Whether ``tensors`` is a list, and whether the results go into them.
    waits : bool
        Whether the caller is about to wait: then nobody else need be rung.
    tensors, average, name, op, prescale, postscale, process_set
        As the user gave them.

    Returns
    -------
    Handle or None
        None: it has to go by message.
    """
    cdef FastPathSlot slot = _process_slot if _rank_threads == 0 else _current_slot()
    cdef FastPath lane = slot.get()
    cdef object set_id = 0
    if lane is None or average is not None:
        return None
    if process_set is not _global_set:
        if not isinstance(process_set, _set_class):
            return None
        set_id = process_set.process_set_id
    if grouped:
        return lane.submit_group(set_id, name, tensors, op, prescale, postscale, inplace, not waits)
    return lane.submit(set_id, name, tensors, op, prescale, postscale, inplace, not waits)
