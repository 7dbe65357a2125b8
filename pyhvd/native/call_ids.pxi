# Call ids for C code outside of pyhvd; a part of shared_memory.pyx. call_ids.h has the rules.

cdef extern from "fast_path/call_ids.h" nogil:
    ctypedef struct pyhvd_tensor_layout:
        uint32_t n
        int32_t type
        int32_t ndim
        int32_t in_arena
        int64_t dims[32]
        int64_t source_bytes
        int64_t target_bytes

    ctypedef struct pyhvd_id_tensor:
        uint32_t index
        int may_be_held
        pyhvd_tensor_layout layout

    ctypedef struct pyhvd_id_facts:
        pyhvd_fast_path* path
        pyhvd_call* call
        pyhvd_id_tensor* tensors
        int64_t arena_from
        int64_t arena_to

    ctypedef struct pyhvd_c_api:
        pass

    const pyhvd_c_api pyhvd_c_functions
    uint64_t pyhvd_call_id_attach(const pyhvd_id_facts* facts)
    void pyhvd_call_id_detach(uint64_t id)
    int pyhvd_call_id_release(uint64_t id)
    void pyhvd_call_id_next_generation()


cdef object _ids_lock = threading.Lock()
cdef dict _ids = {}  # {id: CachedCall}; they live until no C thread uses them
cdef dict _stale_ids = {}  # likewise, of ids that are stale
cdef object _errors = collections.deque(maxlen=64)  # (text, error) of the last calls that failed


def error_of(text):
    """Return a new object of the last error that C code got as this text; None: it is not known."""
    for known, error in reversed(list(_errors)):
        if known == text:
            return copy_error(error)
    return None


def c_functions():
    """Return a capsule with the table of C functions, ``pyhvd_c_api`` of pyhvd.h."""
    return PyCapsule_New(<void*>&pyhvd_c_functions, "pyhvd.c_api", NULL)


def call_id(int verb, int form, tensors, term, name, op, prescale, postscale, process_set):
    """Return the id of the cached call of these arguments; None: there is none now.

    Parameters
    ----------
    verb, form : int
        As for :func:`start_move`; of ``form`` only GROUPED counts.
    tensors
        Arrays or tensors of the call's layouts; None for a barrier.
    term
        As for :func:`start_move`.
    name, op, prescale, postscale, process_set
        The user's arguments.
    """
    cdef CachedCall call = find_call(verb, form, tensors, name, process_set)
    cdef list given
    cdef Py_ssize_t k
    if call is None:
        return None
    if call.first.op >= 0 and not call.first.same_terms(op, prescale, postscale):
        return None
    if not call.first.same_term(term):
        return None
    if verb != BARRIER:
        given = list(tensors) if form & GROUPED else [tensors]
        if len(given) != <Py_ssize_t>call.c.slots.n:
            return None
        for k in range(len(given)):
            if not is_like(call, k, <PyObject*>given[k]):
                return None
    return give_id(call) or None


cdef bint is_like(CachedCall call, Py_ssize_t k, PyObject* tensor) except -1:
    """Return whether an array or tensor has the row-major layout of a call's k-th tensor."""
    cdef TensorType kind
    cdef int64_t address
    if call.layouts[k].permuted:
        return False
    if PyArray_CheckExact(tensor):
        return call.suits_array(k, <PyArray*>tensor, False)
    kind = <TensorType>_tensor_types.get(type(<object>tensor))
    return kind is not None and kind.suits(<CachedTensor>call.tensors[k], tensor, False, &address)


cdef uint64_t give_id(CachedCall call) except? 0:
    """Return the id of a call, a new one if it has none; 0: it is retired, or there is no room."""
    cdef pyhvd_id_facts facts
    cdef Py_ssize_t n = call.c.slots.n
    cdef Py_ssize_t k
    cdef list released = []  # dropped outside of the lock: it may run finalizers
    with _ids_lock:
        release_stale_ids(released)
        if call.id or call.c.retired:
            return call.id
        facts.path, facts.call = &call.path.c, &call.c
        facts.arena_from, facts.arena_to = call.path.arena_from, call.path.arena_to
        facts.tensors = <pyhvd_id_tensor*>calloc(n, sizeof(pyhvd_id_tensor))
        if facts.tensors == NULL:
            return 0
        for k in range(n):
            describe_for_c(call, k, &facts.tensors[k])
        call.id = pyhvd_call_id_attach(&facts)
        if call.id:
            _ids[call.id] = call
        else:
            free(facts.tensors)
        return call.id


cdef int describe_for_c(CachedCall call, Py_ssize_t k, pyhvd_id_tensor* out) except -1:
    cdef CachedTensor tensor = <CachedTensor>call.tensors[k]
    cdef int d
    out.index = call.layouts[k].index
    out.may_be_held = call.layouts[k].unscaled
    out.layout.n = call.c.slots.n
    out.layout.type = tensor.code
    out.layout.ndim = tensor.ndim
    out.layout.in_arena = call.layouts[k].in_arena
    if tensor.code < 0:  # a barrier
        return 0
    out.layout.source_bytes = <int64_t>pyhvd_itemsize(tensor.code)
    for d in range(tensor.ndim):
        out.layout.dims[d] = tensor.dims[d]
        out.layout.source_bytes *= tensor.dims[d]
    out.layout.target_bytes = <int64_t>tensor.result_bytes
    return 0


cdef int forget_id(CachedCall call) except -1:
    """Make a retired call's id stale, if it has one."""
    cdef list released = []
    with _ids_lock:
        make_stale(call)
        release_stale_ids(released)
    return 0


cdef int forget_ids(FastPath path) except -1:
    """Make all ids of a path stale: it has ended."""
    cdef list released = []
    with _ids_lock:
        for each in list(_ids.values()):
            if (<CachedCall>each).path is path:
                make_stale(<CachedCall>each)
        release_stale_ids(released)
        pyhvd_call_id_next_generation()
    return 0


cdef int make_stale(CachedCall call) except -1:
    if call.id in _ids:
        _stale_ids[call.id] = _ids.pop(call.id)
        pyhvd_call_id_detach(call.id)
        call.id = 0
    return 0


cdef int release_stale_ids(list released) except -1:
    """Move to ``released`` the calls of stale ids that no C thread uses; the others follow later."""
    for each in list(_stale_ids):
        if pyhvd_call_id_release(each):
            released.append(_stale_ids.pop(each))
    return 0


# -- calls that C code has submitted, and that Python ends ---------------------------------------------


cdef tuple memory_of(CachedCall call, bint targets):
    """Return (address, shape) of each source or target of a call in flight; None for a barrier."""
    cdef Py_ssize_t k
    cdef int d
    cdef CachedTensor tensor
    cdef list found = []
    for k in range(call.c.slots.n):
        tensor = <CachedTensor>call.tensors[k]
        if tensor.code < 0:
            found.append(None)
        elif targets:
            shape = tuple([tensor.result_dims[d] for d in range(tensor.ndim)])
            found.append((call.c.dsts[call.layouts[k].index], shape))
        else:
            shape = tuple([tensor.dims[d] for d in range(tensor.ndim)])
            found.append((call.c.srcs[call.layouts[k].index], shape))
    return tuple(found)


cdef int settle_for_c(CachedCall call, Py_ssize_t k, result, error) except -1:
    """Keep the error with which the k-th tensor ends, or copy its result if no target was known."""
    cdef CachedTensor tensor = <CachedTensor>call.tensors[k]
    if error is None and tensor.is_sized():
        made = result[0]
        if <size_t>made.nbytes == tensor.result_bytes:
            memcpy(
                <void*><uintptr_t>call.c.dsts[call.layouts[k].index],
                PyArray_DATA(<PyArray*><PyObject*>made), tensor.result_bytes
            )
        else:
            error = HorovodInternalError(
                f"{tensor.request.name!r}: the result has {made.nbytes} bytes, but the C code that submitted"
                f" it gave memory for {tensor.result_bytes}: another rank has changed its number of rows"
            )
    if error is not None and call.error_text is None:
        text = str(error).replace("\0", "")
        _errors.append((text, copy_error(error)))
        call.error_text = text.encode("utf-8", "replace")
        call.c.ending.error = <const char*>call.error_text
    return 0
