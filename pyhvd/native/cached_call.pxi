# Units: calls that the cache remembers; a part of shared_memory.pyx.

cdef struct ArrayLayout:
    # What the cache remembers of an array, side by side for the tensors of a unit: a thousand objects are
    # seldom in the cache. The pointers are to what the tensor's CachedTensor keeps alive.
    void* dtype
    cnp.npy_intp first  # the first of dims
    cnp.npy_intp* dims
    uint32_t at  # its place among the unit's slots
    int ndim
    bint window  # whether it must be in the arena
    bint unscaled  # whether it may be reduced there


cdef class CachedTensor:
    """One tensor of a unit, as it was cached."""

    cdef readonly object request
    cdef readonly uint32_t slot
    cdef readonly uint64_t since
    cdef readonly CachedCall unit
    cdef object dtype
    cdef double prescale
    cdef double postscale
    cdef int op
    cdef int code
    cdef int ndim
    cdef bint window
    cdef cnp.npy_intp dims[32]

    cdef void describe(self, ArrayLayout* form) noexcept:
        """Say what an array must look like to be this tensor; the form points into this object."""
        form.dtype = <void*>self.dtype
        form.first = self.dims[0]
        form.dims = self.dims
        form.ndim = self.ndim
        form.window = self.window
        form.unscaled = self.prescale == 1.0

    cdef void renew(self, uint64_t since) noexcept:
        """Post it from now on under the number of another response list, which changed another rank's part.

        What has not been posted yet is as it was: this rank's own request is the same. What was posted before
        that list has been answered by it, and what comes behind it under the old number is refused, and goes
        by message.
        """
        cdef CachedCall unit = self.unit
        if since == self.since:
            return
        self.since = since
        if unit is None:  # its group is not complete
            return
        pthread_mutex_lock(&unit.lane.c.mutex)
        pyhvd_posting_renew(&unit.c.post, unit.lane.c.sets[unit.set_id].records[self.slot].at, since)
        pthread_mutex_unlock(&unit.lane.c.mutex)

    cdef bint same_terms(self, object op, object prescale, object postscale) except -1:
        """Return whether a call is made as the cached one was."""
        if type(prescale) is not float or type(postscale) is not float:
            return False
        if op is None:
            return self.op == AVERAGE and prescale == self.prescale and postscale == self.postscale
        if not isinstance(op, int):
            return False
        return <int>op == self.op and prescale == self.prescale and postscale == self.postscale

    cdef bint learn(self, ArrayLayout* form, object dtype) except -1:
        """Return whether another dtype object means the same, and remember it, in the form too, if so."""
        cdef FastPath lane = self.unit.lane
        cdef object before
        if lane.code_of(dtype) != self.code:
            return False
        pthread_mutex_lock(&lane.c.mutex)
        before = self.dtype  # let go of outside the mutex, when the form no longer points to it
        form.dtype = <void*>dtype
        self.dtype = dtype
        pthread_mutex_unlock(&lane.c.mutex)
        return True

    cdef object empty(self):
        Py_INCREF(self.dtype)  # stolen
        return PyArray_Empty(self.ndim, self.dims, <void*>self.dtype, 0)


@cython.final
cdef class CachedCall:
    """What is submitted together: one tensor, or a grouped call."""

    cdef pyhvd_unit c
    cdef ArrayLayout* forms
    cdef FastPath lane
    cdef readonly str name
    cdef readonly int set_id
    cdef readonly bint grouped
    cdef readonly list parts
    cdef CachedTensor first
    cdef tuple key
    cdef object handle
    cdef bint retired

    def __cinit__(self, FastPath lane, int set_id, str name, bint grouped, list parts):
        cdef Py_ssize_t n = len(parts)
        cdef Py_ssize_t at
        cdef pyhvd_record* record
        cdef CachedTensor part
        self.c.post.slots = <uint32_t*>PyMem_Calloc(n, sizeof(uint32_t))
        self.c.post.since = <uint64_t*>PyMem_Calloc(n, sizeof(uint64_t))
        self.forms = <ArrayLayout*>PyMem_Calloc(n, sizeof(ArrayLayout))
        self.grouped = grouped
        self.c.srcs = self.c.own
        if grouped:
            self.c.srcs = <int64_t*>PyMem_Calloc(2 * n, sizeof(int64_t))
            self.c.starts = <int64_t*>PyMem_Calloc(n + 1, sizeof(int64_t))
        if (
            self.c.post.slots == NULL or self.c.post.since == NULL or self.forms == NULL
            or self.c.srcs == NULL or (grouped and self.c.starts == NULL)
        ):
            raise MemoryError
        self.c.dsts = self.c.srcs + n
        self.lane = lane
        self.set_id = set_id
        self.name = name
        self.parts = parts
        self.first = parts[0]
        self.key = (set_id, name)
        self.c.set = <uint32_t>set_id
        self.c.post.n = <uint32_t>n
        self.c.grouped = grouped
        self.c.owner = <void*>self
        for at, k in enumerate(sorted(range(n), key=[(<CachedTensor>each).slot for each in parts].__getitem__)):
            part = <CachedTensor>parts[k]
            part.unit = self
            part.describe(&self.forms[k])
            self.forms[k].at = <uint32_t>at
            self.c.post.slots[at] = part.slot
            self.c.post.since[at] = part.since
            record = &lane.c.sets[set_id].records[part.slot]
            record.unit = &self.c
            record.at = <uint32_t>at
            if grouped:
                self.c.starts[at + 1] = self.c.starts[at] + record.count

    def __dealloc__(self):
        PyMem_Free(self.c.post.slots)
        PyMem_Free(self.c.post.since)
        PyMem_Free(self.forms)
        if self.grouped:
            PyMem_Free(self.c.srcs)
            PyMem_Free(self.c.starts)

    cdef bint suits(self, Py_ssize_t k, PyObject* tensor, bint inplace) except -1:
        """Return whether an object is an array as the cache remembers it for the k-th tensor."""
        cdef ArrayLayout* form = &self.forms[k]
        cdef PyArray* array = <PyArray*>tensor
        cdef int64_t address
        cdef int d
        if not PyArray_CheckExact(tensor):
            return False
        if PyArray_DESCR(array) != form.dtype:
            if not (<CachedTensor>self.parts[k]).learn(form, <object>PyArray_DESCR(array)):
                return False
        if PyArray_NDIM(array) != form.ndim or not PyArray_IS_C_CONTIGUOUS(array):
            return False
        if inplace and not PyArray_ISWRITEABLE(array):
            return False
        if form.ndim and PyArray_DIMS(array)[0] != form.first:
            return False
        for d in range(1, form.ndim):
            if PyArray_DIMS(array)[d] != form.dims[d]:
                return False
        address = <int64_t>PyArray_DATA(array)
        return form.window == (
            inplace and form.unscaled and self.lane.arena_from <= address < self.lane.arena_to
        )

    def in_flight(self):
        """Return whether it has been submitted and has not ended."""
        cdef uint64_t started
        pthread_mutex_lock(&self.lane.c.mutex)
        started = self.c.started
        pthread_mutex_unlock(&self.lane.c.mutex)
        return not pyhvd_unit_finished(&self.c, started)

    def take(self):
        """Take it out of the engine's hands: Python alone ends it from now on.

        Returns
        -------
        (int, list of (request, source, target)), or None
            When (monotonic ns) the board got it, 0 if it did not, and its tensors; None if it is not in
            flight, or taken already.
        """
        cdef Handle handle = None
        cdef int was
        if not self.in_flight():
            return None
        pthread_mutex_lock(&self.lane.c.mutex)
        was = pyhvd_lane_take(&self.lane.c, &self.c)
        handle = self.handle
        pthread_mutex_unlock(&self.lane.c.mutex)
        if was == PYHVD_TAKEN:
            return None
        sources = handle.source if self.grouped else [handle.source]
        targets = handle.target if self.grouped else [handle.target]
        requests = [part.request for part in self.parts]
        return self.c.posted if was == PYHVD_POSTED else 0, list(zip(requests, sources, targets, strict=True))

    def settle(self, error):
        """One tensor of a unit that was taken has ended."""
        cdef Handle handle = self.handle
        if error is not None and handle is not None and handle.error is None:
            handle.error = error
        with nogil:
            pyhvd_lane_settle(&self.lane.c, &self.c)
        if self.retired:
            self.retire()

    cdef int retire(self) except -1:
        """Let it be submitted no more. Once it has ended, nobody but who has its handle keeps its arrays.

        Nobody would ever let go of them otherwise: the two refer to each other.
        """
        cdef object handle = None
        pthread_mutex_lock(&self.lane.c.mutex)
        self.retired = True
        if pyhvd_unit_finished(&self.c, self.c.started):
            handle, self.handle = self.handle, None  # let go of outside the mutex
        pthread_mutex_unlock(&self.lane.c.mutex)
        return 0

    cdef Handle hold(self, object source, object target, const int64_t* addresses, bint ring):
        """Submit it: n addresses to read from, n to write to, by slot. None if it is in flight."""
        cdef FastPath lane = self.lane
        cdef Handle handle = Handle.__new__(Handle)
        cdef Handle before = None
        cdef int held = 0
        cdef uint32_t n = self.c.post.n
        handle.unit = self
        handle.source = source
        handle.target = target
        pthread_mutex_lock(&lane.c.mutex)
        if pyhvd_unit_finished(&self.c, self.c.started) and not self.retired and not lane.closed:
            memcpy(self.c.srcs, addresses, n * sizeof(int64_t))
            memcpy(self.c.dsts, addresses + n, n * sizeof(int64_t))
            before = self.handle  # let go of outside the mutex
            self.handle = handle
            held = pyhvd_lane_hold(&lane.c, &self.c)
            handle.turn = self.c.started
        pthread_mutex_unlock(&lane.c.mutex)
        # The queue puts its names there before it looks here: if both have come at once, one of us sees it. A
        # join is told to the others once the lane has been paused, and then what was held has been posted.
        if held and (lane.paused or not lane.is_free(self)):
            pthread_mutex_lock(&lane.c.mutex)
            held = not pyhvd_lane_withdraw(&lane.c, &self.c)
            pthread_mutex_unlock(&lane.c.mutex)
        if not held:
            handle.ended = True
            return None
        if ring:
            pyhvd_lane_ring(&lane.c)
        return handle
