# Submission to the fast path: from a verb's arguments to a handle; a part of shared_memory.pyx.

cdef class FastPathHolder:
    """Holds what the functions here need of a rank's context, until the next :meth:`keep`.

    In free-threaded Python another thread may replace it, so a critical section guards each member.
    """

    cdef object _context
    cdef FastPath _fast_path  # None if all calls go by message
    cdef dict _orders  # {(id of a process set, name): CallOrder}
    cdef int generation

    def keep(self, context, FastPath fast_path, dict orders):
        """Hold a context, with its fast path and its call orders; or None."""
        with cython.critical_section(self):
            self._context, self._fast_path, self._orders = context, fast_path, orders
            self.generation = _generation

    @property
    def context(self):
        """The rank's context, or None; in a forked child that of the parent."""
        with cython.critical_section(self):
            return self._context

    cdef FastPath get(self):
        with cython.critical_section(self):
            return self._fast_path

    cdef object usable_context(self):
        """Return the context; None if there is none, or this process is a forked child."""
        with cython.critical_section(self):
            return self._context if self.generation == _generation else None

    cdef dict usable_orders(self):
        """Return the call orders; None if there is no context, or this process is a forked child."""
        with cython.critical_section(self):
            return self._orders if self.generation == _generation else None


cdef object _current_holder = None
cdef FastPathHolder _process_holder = FastPathHolder()
cdef object _set_class = None
cdef object _global_set = None
cdef object _own_name = None
cdef object _make_order = None
cdef object _reduce_by_message = None
cdef object _move_by_message = None
cdef int _rank_threads = 0

cpdef enum:
    GROUPED = 1
    IN_PLACE = 2
    WAITS = 4
    SCATTERS = 8
    PAIRS = 16
    PLACED = 32


def set_lookup(
    current_holder, FastPathHolder process_holder, set_class, global_set, own_name, make_order, reduce, move
):
    """Tell :func:`start` and :func:`start_move` how to find the caller's fast path and process set.

    ``own_name`` is the class of the names that pyhvd gives to tensors of its own. ``make_order`` takes a
    process set and such a name; it checks whether the caller may wait, and returns the CallOrder. ``reduce``
    and ``move`` submit the calls that cannot use the fast path; they take the same arguments.
    """
    global _current_holder, _process_holder, _set_class, _global_set, _own_name, _make_order
    global _reduce_by_message, _move_by_message
    _current_holder, _process_holder = current_holder, process_holder
    _set_class, _global_set, _own_name, _make_order = set_class, global_set, own_name, make_order
    _reduce_by_message, _move_by_message = reduce, move


def count_rank_threads(int change):
    """Add ``change`` to the number of ranks that are threads of this process; the caller holds a lock."""
    global _rank_threads
    _rank_threads += change


def current_context():
    """Return the caller's context; None if there is none, or this process is a forked child."""
    return find_holder().usable_context()


def start(int form, tensors, average, name, op, prescale, postscale, process_set):
    """Submit an allreduce or a reducescatter: to the fast path if the call is cached, else by message.

    Parameters
    ----------
    form : int
        Flags: GROUPED if ``tensors`` is a list, IN_PLACE if the results go into the tensors, SCATTERS for a
        reducescatter, WAITS if the caller waits at once: it flushes and makes progress itself, so no thread
        is woken. PLACED if ``tensors`` is a pair: a tensor, and one that may take the result. The call's
        result is that one if it has taken it.
    tensors, average, name, op, prescale, postscale, process_set
        The user's arguments.

    Returns
    -------
    Handle
        The call's handle.
    """
    cdef object handle = None
    cdef CachedCall call = None
    if name is None and average is None:
        handle = submit_turn(
            REDUCESCATTER if form & SCATTERS else ALLREDUCE, form, tensors, None, op, prescale, postscale,
            process_set,
        )
    elif average is None:
        call = find_call(REDUCESCATTER if form & SCATTERS else ALLREDUCE, form, tensors, name, process_set)
    if call is not None and call.first.same_terms(op, prescale, postscale):
        handle = submit_cached(call, tensors, form)
    if handle is None:
        if form & PLACED:
            tensors = tensors[0]
        return _reduce_by_message(form, tensors, average, name, op, prescale, postscale, process_set)
    return handle


cdef dict _own_files = {}  # {name of a source file: whether it is no program's}
cdef tuple _own_folders = (os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), ""),)


cdef extern from "Python.h":
    void* PyEval_GetFrame()


def hide_sites(folder):
    """Let :func:`find_site` look for callers outside of a folder too; its name ends with a slash."""
    global _own_folders
    _own_folders = (*_own_folders, folder)
    _own_files.clear()


cpdef object find_site():
    """Return the code object of the caller outside of pyhvd, and the offset of the call in it; or None."""
    cdef void* top = PyEval_GetFrame()
    cdef object frame, code, file, own
    if top == NULL:
        return None
    frame = <object>top
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        own = _own_files.get(file)
        if own is None:
            own = _own_files[file] = file.startswith(_own_folders)
        if own is False:
            return code, frame.f_lasti
        frame = frame.f_back
    return None


cpdef object start_move(int verb, int form, tensors, term, name, process_set):
    """Submit a call that reduces nothing: to the fast path if the call is cached, else by message.

    Parameters
    ----------
    verb : int
        ALLGATHER, BROADCAST, ALLTOALL or BARRIER.
    form : int
        Flags as for :func:`start`; PAIRS if each result of an allgather comes with the rows from each rank.
    tensors
        The user's tensor or tensors; None for a barrier.
    term
        The root of a broadcast, the splits of an alltoall, else None.
    name, process_set
        The user's arguments.

    Returns
    -------
    Handle
        The call's handle.
    """
    cdef object handle = None
    cdef CachedCall call = None
    if name is None and not form & GROUPED:
        handle = submit_turn(verb, form, tensors, term, None, None, None, process_set)
    else:
        call = find_call(verb, form, tensors, name, process_set)
    if call is not None and call.first.same_term(term):
        handle = submit_cached(call, tensors, form)
    if handle is None:
        if form & PLACED:
            tensors = tensors[0]
        return _move_by_message(verb, form, tensors, term, name, process_set)
    return handle


cdef FastPathHolder find_holder():
    """Return the holder of the caller's rank; before :func:`set_lookup` an empty one."""
    return _process_holder if _rank_threads == 0 or _current_holder is None else _current_holder()


cdef PathSet find_set(object process_set):
    """Return the caller's process set if the fast path serves it now, else None."""
    cdef FastPath path = find_holder().get()
    cdef object set_id = 0
    if path is None:
        return None
    if process_set is not _global_set:
        if not isinstance(process_set, _set_class):
            return None
        set_id = process_set.process_set_id
    if path.paused or path.closed or path.generation != _generation:
        return None
    if type(set_id) is not int or not 0 <= set_id < SETS:
        return None
    return <PathSet>path.sets[set_id]


cdef CachedCall find_call(int verb, int form, object tensors, object name, object process_set):
    """Return the cached call of these arguments; None if the call must go by message."""
    cdef PathSet served = find_set(process_set)
    cdef bint grouped = form & GROUPED
    cdef CachedCall call = None
    if served is None or (type(name) is not str and type(name) is not _own_name):
        return None
    if not grouped:
        call = <CachedCall>served.calls.get(name)
    elif isinstance(tensors, (list, tuple)):
        call = <CachedCall>served.groups.get((name, len(tensors)))
    if call is None or call.grouped != grouped or call.first.verb != verb:
        return None
    if call.first.own_name != (type(name) is _own_name):
        return None
    if (call.path.entries or call.path.refusals) and not call.path.is_free(call):
        return None
    return call


cdef Handle submit_cached(CachedCall call, object tensors, int form):
    cdef int64_t[2] nothing
    if call.first.verb == BARRIER:
        nothing[0] = nothing[1] = 0
        return call.hold(None, None, nothing, form)
    if form & GROUPED:
        return submit_group(call, tensors, form)
    return submit_one(call, tensors, form)


cdef Handle submit_one(CachedCall call, object tensor, int form):
    cdef object target = None
    cdef bint inplace = form & IN_PLACE
    cdef int64_t[2] addresses
    if form & PLACED:
        tensor, target = tensor
    if not call.suits(0, <PyObject*>tensor, inplace, &addresses[0]):
        return None
    addresses[1] = addresses[0]
    if not inplace:
        if target is None or not call.can_take(target, addresses):
            target = call.empty_like(0, <PyObject*>tensor, &addresses[1])
        if target is None:
            return None
        if call.first.is_sized():
            target = call.first.with_rows(target, form & PAIRS)
    else:
        target = tensor
        if not PyArray_CheckExact(<PyObject*>tensor):
            (<TensorType>_tensor_types[type(tensor)]).note_changes([tensor])
    return call.hold(tensor, target, addresses, form)


cdef Handle submit_group(CachedCall call, object tensors, int form):
    prefetch_all(<PyObject*>tensors)
    cdef bint inplace = form & IN_PLACE
    cdef bint sized = call.first.is_sized()
    cdef list source = list(tensors)
    cdef list target = source if inplace else []
    cdef list written = []  # tensors whose library must know
    cdef Py_ssize_t n = len(source)
    cdef Py_ssize_t k
    cdef Py_ssize_t index
    cdef PyObject* tensor
    cdef int64_t* addresses
    cdef object made
    if n != call.c.slots.n:  # another thread may have changed the list
        return None
    addresses = <int64_t*>PyMem_Malloc(2 * n * sizeof(int64_t))
    if addresses == NULL:
        raise MemoryError
    try:
        for k in range(n):
            if k + AHEAD < n:
                tensor = PyList_GET_ITEM(<PyObject*>source, k + AHEAD)
                if PyArray_CheckExact(tensor):
                    prefetch(PyArray_DIMS(<PyArray*>tensor))
            tensor = PyList_GET_ITEM(<PyObject*>source, k)
            index = call.layouts[k].index
            if not call.suits(k, tensor, inplace, &addresses[index]):
                return None
            addresses[n + index] = addresses[index]
            if inplace and not PyArray_CheckExact(tensor):
                written.append(<object>tensor)
            if not inplace:
                made = call.empty_like(k, tensor, &addresses[n + index])
                if made is None:
                    return None
                if sized:
                    made = (<CachedTensor>call.tensors[k]).with_rows(made, form & PAIRS)
                target.append(made)
        if written:
            (<TensorType>_tensor_types[type(written[0])]).note_changes(written)
        return call.hold(source, target, addresses, form)
    finally:
        PyMem_Free(addresses)
