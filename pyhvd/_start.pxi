# The way in: from a verb to the lane of the rank that calls it; a part of _lane.pyx.

cdef object _current_slot = None
cdef object _process_slot = None
cdef object _set_class = None
cdef object _global_set = None
cdef int _players = 0


def meet(current_slot, process_slot, set_class, global_set):
    """Tell :func:`start` how to find a context, and what process sets are."""
    global _current_slot, _process_slot, _set_class, _global_set
    _current_slot, _process_slot = current_slot, process_slot
    _set_class, _global_set = set_class, global_set


def count_players(int change):
    """One more thread, or one less, plays a rank of its own; under a lock of the caller's."""
    global _players
    _players += change


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
    cdef object slot = _process_slot if _players == 0 else _current_slot()
    cdef object active = slot.context
    cdef object set_id = 0
    cdef Lane lane
    if active is None or average is not None:
        return None
    lane = active.lane
    if lane is None:
        return None
    if process_set is not _global_set:
        if not isinstance(process_set, _set_class):
            return None
        set_id = process_set.process_set_id
    if grouped:
        return lane.submit_group(set_id, name, tensors, op, prescale, postscale, inplace, not waits)
    return lane.submit(set_id, name, tensors, op, prescale, postscale, inplace, not waits)
