# CachedCall and CachedTensor: the calls that the ranks remember; a part of shared_memory.pyx.

cpdef enum:  # of these verbs; the codes are those of pyhvd.negotiation.messages.RequestType
    ALLREDUCE = 0
    ALLGATHER = 1
    BROADCAST = 2
    ALLTOALL = 5
    BARRIER = 6
    REDUCESCATTER = 7


cdef struct ArrayLayout:
    # The array that suits a cached tensor. A call's layouts lie side by side in memory, as a thousand objects
    # are rarely in the cache. The pointers lead into the CachedTensor, which keeps their targets alive.
    void* dtype
    cnp.npy_intp length  # the first of dims
    cnp.npy_intp* dims
    uint32_t index  # of the tensor among the call's slots
    int ndim
    bint permuted  # whether its dimensions lie in memory in another order, which numpy arrays never do here
    bint in_arena  # whether the array and its result must lie in the arena
    bint unscaled  # whether it may be reduced there


cdef class CachedTensor:
    """One tensor of a cached call, as it was cached; ``plan`` is a :class:`pyhvd.engine.plans.Plan`."""

    cdef readonly object request
    cdef readonly uint32_t slot
    cdef readonly uint64_t version
    cdef readonly CachedCall call
    cdef readonly object plan
    cdef int verb
    cdef bint own_name  # whether pyhvd has made up the name
    # They point into the arrays of the plan.
    cdef pyhvd_local_move move
    cdef pyhvd_move* moves
    cdef pyhvd_portions portions
    cdef object dtype
    cdef double prescale
    cdef double postscale
    cdef int op
    cdef int code
    cdef int ndim
    cdef bint in_arena
    cdef str layout
    cdef cnp.npy_intp dims[32]
    cdef cnp.npy_intp result_dims[32]
    cdef size_t result_bytes
    cdef int64_t strides[32]  # of a tensor, in elements

    def __cinit__(self, request, uint32_t slot, uint64_t version, plan):
        cdef Py_ssize_t d
        cdef int64_t step = 1
        self.request = request
        self.slot = slot
        self.version = version
        self.plan = plan
        self.verb = request.type
        self.own_name = plan.own_name
        self.op = request.op
        self.prescale = request.prescale
        self.postscale = request.postscale
        self.code = request.dtype
        self.ndim = len(request.shape)
        self.in_arena = request.window
        self.layout = request.layout
        for d, length in enumerate(request.shape):
            self.dims[d] = self.result_dims[d] = length
        if plan.rows >= 0:
            self.result_dims[0] = plan.rows
        self.result_bytes = pyhvd_itemsize(self.code)
        for d in range(self.ndim):
            self.result_bytes *= <size_t>self.result_dims[d]
        in_memory = list(map(int, self.layout.split(","))) if self.layout else list(range(self.ndim))
        for d in reversed(in_memory):
            self.strides[d] = step
            step *= self.dims[d]
        if plan.move is not None:
            self._lay_out(plan.move, plan.moves)
        elif plan.portions is not None:
            describe_portions(&self.portions, plan.portions)

    def __dealloc__(self):
        PyMem_Free(self.moves)

    cdef int _lay_out(self, move, moves) except -1:
        cdef const int64_t[:, ::1] sources = move.sources
        cdef const int64_t[:, ::1] targets = move.targets
        cdef const int64_t[::1] origins = move.origins
        cdef const int64_t[::1] starts
        self.move.source_count = <size_t>sources.shape[0]
        self.move.target_count = <size_t>targets.shape[0]
        self.move.sources = <const pyhvd_part*>&sources[0, 0]
        self.move.targets = <const pyhvd_part*>&targets[0, 0]
        self.move.own_from, self.move.own_to, self.move.own_bytes = move.own
        self.move.origins = &origins[0]
        self.move.longest, self.move.total = move.longest, move.total
        if move.starts is not None:
            starts = move.starts
            self.move.starts = &starts[0]
        if moves:
            self.moves = <pyhvd_move*>PyMem_Calloc(len(moves), sizeof(pyhvd_move))
            if self.moves == NULL:
                raise MemoryError
            for k, each in enumerate(moves):
                describe_move(&self.moves[<Py_ssize_t>k], each, len(each.out))
        return 0

    cdef void describe(self, pyhvd_cached_tensor* cached) noexcept:
        """Tell the engine what to do with the tensor."""
        cached.verb = self.verb
        cached.move = &self.move if self.plan.move is not None else NULL
        cached.moves = self.moves
        cached.move_count = <size_t>len(self.plan.moves)
        cached.portions = &self.portions if self.plan.portions is not None else NULL

    cdef int64_t length(self) noexcept:
        """Return the number of its elements."""
        cdef int64_t length = 1
        cdef int d
        for d in range(self.ndim):
            length *= self.dims[d]
        return length

    cdef bint is_sized(self) noexcept:
        """Return whether the size of its result depends on the other ranks."""
        return self.verb == ALLGATHER or self.verb == ALLTOALL

    cdef bint means(self, object request, uint64_t version) except -1:
        """Return whether it stands for this rank's request, and for sizes of that version."""
        return self.request == request and (self.version == version or not self.is_sized())

    cdef object with_rows(self, object result, bint pairs):
        """Return what the caller gets for a result: with ``pairs``, also the rows from each rank."""
        if self.verb == ALLTOALL:
            return result, self.plan.beside.copy()
        return (result, self.plan.beside) if pairs else result

    cdef bint same_term(self, object term) except -1:
        """Return whether a call has the root or the splits of the cached one; None for other verbs."""
        if self.verb == BROADCAST:
            return type(term) is int and term == self.request.root
        if self.verb != ALLTOALL:
            return True
        if term is None:
            return self.plan.even
        if type(term) is list or type(term) is tuple:
            return all([type(each) is int for each in term]) and tuple(term) == self.plan.splits
        if type(term) is not cnp.ndarray or term.dtype.kind not in "iu" or term.ndim != 1:
            return False
        return tuple(term.tolist()) == self.plan.splits

    cdef void renew(self, uint64_t version) noexcept:
        """Mark it under another version from now on: another rank's request has changed, this rank's has not.

        Marks made before that version were answered by its response list. Marks made later under the old
        version are refused, and their calls go by message.
        """
        cdef CachedCall call = self.call
        if version == self.version:
            return
        self.version = version
        if call is None:  # its group is not complete
            return
        pthread_mutex_lock(&call.path.c.submissions.mutex)
        pyhvd_slot_list_renew(
            &call.c.slots, call.path.c.setup.sets[call.set_id].tensors[self.slot].index, version
        )
        pthread_mutex_unlock(&call.path.c.submissions.mutex)

    cdef bint same_terms(self, object op, object prescale, object postscale) except -1:
        """Return whether a call has the op and the factors of the cached one."""
        if type(prescale) is not float or type(postscale) is not float:
            return False
        if op is not None and not isinstance(op, int):
            return False
        if self.op != (AVERAGE if op is None else <int>op):
            return False
        return prescale == self.prescale and postscale == self.postscale

    cdef bint learn(self, ArrayLayout* layout, object dtype) except -1:
        """Return whether another dtype object means the same dtype; if so, remember it, in the layout too."""
        cdef FastPath path = self.call.path
        cdef object before
        if path.code_of(dtype) != self.code:
            return False
        pthread_mutex_lock(&path.c.submissions.mutex)
        before = self.dtype  # released outside the mutex, when the layout no longer points to it
        layout.dtype = <void*>dtype
        self.dtype = dtype
        pthread_mutex_unlock(&path.c.submissions.mutex)
        return True


@cython.final
cdef class CachedCall:
    """A call that the ranks remember: one tensor, or a grouped call.

    ``progress.h`` has its states. The engine reads and writes the C half, :attr:`c`.
    """

    cdef pyhvd_call c
    cdef ArrayLayout* layouts
    cdef FastPath path
    cdef readonly int set_id
    cdef readonly bint grouped
    cdef readonly list tensors
    cdef CachedTensor first
    cdef tuple key
    cdef object handle
    cdef uint64_t id  # for C code outside of pyhvd; 0: none. Under _ids_lock
    cdef bytes error_text  # of a call that C code has submitted, once Python has taken it
    # Of a signature's: what it stands for, and where to submit it.
    cdef Signature signature
    cdef Turns turns
    cdef uint32_t room  # of a turn slot's call: for the addresses of so many arrays
    cdef readonly object site  # of a turn slot's call: where the program made it, as TensorEntry.site

    def __cinit__(self, FastPath path, int set_id, str name, bint grouped, list tensors):
        cdef Py_ssize_t n = len(tensors)
        self.path = path
        self.set_id = set_id
        self.grouped = grouped
        self.tensors = tensors
        self.first = tensors[0]
        self.key = (set_id, name)
        self.c.set = <uint32_t>set_id
        self.c.grouped = grouped
        self.c.owner = <void*>self
        self.c.slots.n = <uint32_t>n
        self.c.slots.ids = <uint32_t*>PyMem_Calloc(n, sizeof(uint32_t))
        self.c.slots.versions = <uint64_t*>PyMem_Calloc(n, sizeof(uint64_t))
        self.layouts = <ArrayLayout*>PyMem_Calloc(n, sizeof(ArrayLayout))
        self.c.srcs = self.c.single_addresses
        self.room = 1
        if grouped:
            self.c.srcs = <int64_t*>PyMem_Calloc(2 * n, sizeof(int64_t))
            self.c.starts = <int64_t*>PyMem_Calloc(n + 1, sizeof(int64_t))
        if (
            self.c.slots.ids == NULL or self.c.slots.versions == NULL or self.layouts == NULL
            or self.c.srcs == NULL or (grouped and self.c.starts == NULL)
        ):
            raise MemoryError
        self.c.dsts = self.c.srcs + n
        self._connect()

    cdef int _connect(self) except -1:
        """Enter its tensors, in the order of their slots."""
        cdef Py_ssize_t index
        cdef CachedTensor tensor
        cdef ArrayLayout* layout
        cdef pyhvd_cached_tensor* cached
        slots = [(<CachedTensor>each).slot for each in self.tensors]
        for index, k in enumerate(sorted(range(len(slots)), key=slots.__getitem__)):
            tensor = <CachedTensor>self.tensors[k]
            tensor.call = self
            layout = &self.layouts[k]
            layout.dtype = <void*>tensor.dtype
            layout.length = tensor.dims[0]
            layout.dims = tensor.dims
            layout.index = <uint32_t>index
            layout.ndim = tensor.ndim
            layout.permuted = tensor.layout != ""
            layout.in_arena = tensor.in_arena
            layout.unscaled = tensor.verb == ALLREDUCE and tensor.prescale == 1.0
            self.c.slots.ids[index] = tensor.slot
            self.c.slots.versions[index] = tensor.version
            if tensor.slot == NO_SLOT:
                if self.grouped:
                    self.c.starts[index + 1] = self.c.starts[index] + tensor.length()
                continue
            cached = &self.path.c.setup.sets[self.set_id].tensors[tensor.slot]
            cached.call = &self.c
            cached.index = <uint32_t>index
            if self.grouped:
                self.c.starts[index + 1] = self.c.starts[index] + cached.count
        return 0

    cdef void _disconnect(self) noexcept:
        """Leave no pointer to this call in the slots that no other call has taken."""
        cdef pyhvd_cached_tensor* tensors
        cdef uint32_t k
        if self.path is None or self.c.slots.ids == NULL or self.c.slots.ids[0] == NO_SLOT:
            return
        pthread_mutex_lock(&self.path.c.submissions.mutex)
        tensors = self.path.c.setup.sets[self.set_id].tensors
        for k in range(self.c.slots.n):
            if tensors != NULL and tensors[self.c.slots.ids[k]].call == &self.c:
                tensors[self.c.slots.ids[k]].call = NULL
        pthread_mutex_unlock(&self.path.c.submissions.mutex)

    def __dealloc__(self):
        self._disconnect()
        PyMem_Free(self.c.slots.ids)
        PyMem_Free(self.c.slots.versions)
        PyMem_Free(self.layouts)
        if self.c.srcs != self.c.single_addresses:
            PyMem_Free(self.c.srcs)
        if not self.c.arrays:  # else they are a signature's
            PyMem_Free(self.c.starts)

    cdef bint suits(self, Py_ssize_t k, PyObject* tensor, bint inplace, int64_t* address) except -1:
        """Return whether an array or tensor is like the cached one of the k-th tensor; store its address."""
        cdef ArrayLayout* layout = &self.layouts[k]
        cdef TensorType kind
        cdef bint held
        if PyArray_CheckExact(tensor):
            if not self.suits_array(k, <PyArray*>tensor, inplace):
                return False
            address[0] = <int64_t>PyArray_DATA(<PyArray*>tensor)
        else:
            kind = <TensorType>_tensor_types.get(type(<object>tensor))
            if kind is None or not kind.suits(<CachedTensor>self.tensors[k], tensor, inplace, address):
                return False
        held = layout.unscaled and self.path.arena_from <= address[0] < self.path.arena_to
        if inplace:
            return layout.in_arena == held
        return not layout.in_arena or (held and PyArray_CheckExact(tensor))

    cdef bint suits_array(self, Py_ssize_t k, PyArray* array, bint inplace) except -1:
        cdef ArrayLayout* layout = &self.layouts[k]
        cdef int d
        if PyArray_DESCR(array) != layout.dtype:
            if not (<CachedTensor>self.tensors[k]).learn(layout, <object>PyArray_DESCR(array)):
                return False
        if PyArray_NDIM(array) != layout.ndim or not PyArray_IS_C_CONTIGUOUS(array) or layout.permuted:
            return False
        if inplace and not PyArray_ISWRITEABLE(array):
            return False
        if layout.ndim and PyArray_DIMS(array)[0] != layout.length:
            return False
        for d in range(1, layout.ndim):
            if PyArray_DIMS(array)[d] != layout.dims[d]:
                return False
        return True

    cdef bint can_take(self, object tensor, int64_t* addresses) except -1:
        """Return whether a tensor can take the result of a call of one; store its address as the second."""
        cdef TensorType kind = <TensorType>_tensor_types.get(type(tensor))
        cdef int64_t source = addresses[0]
        cdef int64_t own = 0
        cdef int64_t nbytes = self.first.length() * <int64_t>pyhvd_itemsize(self.first.code)
        if kind is None or self.first.in_arena:
            return False
        if not kind.can_take(self.first, <PyObject*>tensor, &addresses[1]):
            return False
        if source >= addresses[1] + <int64_t>self.first.result_bytes or addresses[1] >= source + nbytes:
            return True
        # In an allgather this rank's part may lie where it goes: nobody writes there.
        if self.first.verb == ALLGATHER and self.first.plan.move is not None:
            own = <int64_t>self.first.move.own_to
            return source == addresses[1] + own
        return False

    cdef object empty_like(self, Py_ssize_t k, PyObject* tensor, int64_t* address):
        """Return new memory for the k-th result, in the tensor's library, and store its address.

        Without memory return None: the call goes by message, which tells the other ranks.
        """
        cdef CachedTensor cached = <CachedTensor>self.tensors[k]
        cdef object result
        if PyArray_CheckExact(tensor):
            try:
                if cached.in_arena:
                    result = self.path.arena.result(cached.request.shape, <object>cached.dtype)
                elif cached.result_bytes >= _POOL_LEAST:
                    result = pooled_array(cached.ndim, cached.result_dims, cached.dtype)
                else:
                    Py_INCREF(cached.dtype)  # PyArray_Empty steals a reference
                    result = PyArray_Empty(cached.ndim, cached.result_dims, <void*>cached.dtype, 0)
            except (MemoryError, OSError):
                return None
            address[0] = <int64_t>PyArray_DATA(<PyArray*>result)
            return result
        return (<TensorType>_tensor_types[type(<object>tensor)]).empty_like(cached, tensor, address)

    @property
    def name(self):
        """Name of the tensor or the grouped call; while a turn slot's call is in flight, with its number."""
        return f"{self.key[1]}.{self.c.number}" if self.c.signature else self.key[1]

    @property
    def has_turn(self):
        """Whether it is a turn slot's, and so has no name of its own."""
        return self.c.signature != 0

    def in_flight(self):
        """Return whether it was submitted and has not ended."""
        cdef uint64_t started
        pthread_mutex_lock(&self.path.c.submissions.mutex)
        started = self.c.started
        pthread_mutex_unlock(&self.path.c.submissions.mutex)
        return not pyhvd_call_finished(&self.c, started)

    def marked_ns(self):
        """Return when (CLOCK_MONOTONIC, ns) it was marked ready, if it waits for other ranks; else 0."""
        cdef int64_t marked = 0
        pthread_mutex_lock(&self.path.c.submissions.mutex)
        if self.c.state == PYHVD_MARKED and not pyhvd_call_finished(&self.c, self.c.started):
            marked = self.c.marked_ns
        pthread_mutex_unlock(&self.path.c.submissions.mutex)
        return marked

    def is_open(self):
        """Return whether it is in flight, and not taken: it may yet be refused, and then go by message."""
        cdef bint taken
        pthread_mutex_lock(&self.path.c.submissions.mutex)
        taken = self.c.state == PYHVD_TAKEN
        pthread_mutex_unlock(&self.path.c.submissions.mutex)
        return not taken and self.in_flight()

    def slots(self):
        """Return the slots of its tensors, ascending."""
        return [self.c.slots.ids[k] for k in range(self.c.slots.n)]

    def take(self):
        """Take it off the fast path: from now on Python alone ends it.

        Returns
        -------
        (int, list of (request, source, target, splits)), or None
            When (monotonic ns) the ready table got its marks, 0 if it did not; and its tensors. A target is
            None if the size of the result may change. None if it is not in flight, or was taken before.
            If C code has submitted it, sources and targets are (address, shape).
        """
        cdef Handle handle = None
        cdef int was
        cdef bint by_c
        if not self.in_flight():
            return None
        pthread_mutex_lock(&self.path.c.submissions.mutex)
        was = pyhvd_fast_path_take(&self.path.c, &self.c)
        handle = self.handle
        by_c = self.c.ending.done != NULL
        pthread_mutex_unlock(&self.path.c.submissions.mutex)
        if was == PYHVD_TAKEN:
            return None
        if by_c:
            self.error_text = None
            sources, targets = memory_of(self, False), memory_of(self, True)
        else:
            sources = handle.source if self.grouped else [handle.source]
            targets = handle.target if self.grouped else [handle.target]
        if self.first.is_sized():
            targets = [None] * len(sources)
        requests = [tensor.request for tensor in self.tensors]
        splits = [tensor.plan.splits for tensor in self.tensors]
        marked_ns = self.c.marked_ns if was == PYHVD_MARKED else 0
        return marked_ns, list(zip(requests, sources, targets, splits, strict=True))

    def settle(self, Py_ssize_t k, result, error):
        """End the k-th tensor of the call, which was taken; ``result`` counts if its size was not known."""
        cdef Handle handle = self.handle
        cdef bytes error_text = None
        if self.c.ending.done != NULL:
            settle_for_c(self, k, result, error)
            error_text = self.error_text  # stays until the call's last tensor has told the C code
        elif error is not None:
            if handle is not None and handle.error is None:
                handle.error = copy_error(error)
        elif handle is not None and self.first.is_sized():
            made = result if handle.pairs or self.first.verb == ALLTOALL else result[0]
            if self.grouped:
                handle.target[k] = made
            else:
                handle.target = made
        with nogil:
            pyhvd_fast_path_settle(&self.path.c, &self.c)
        if self.c.retired:
            self.retire()

    cdef int retire(self) except -1:
        """Let it be submitted no more. Once it has ended, drop its handle.

        The call and its handle refer to each other: without this, neither would be freed.
        """
        cdef object handle = None
        pthread_mutex_lock(&self.path.c.submissions.mutex)
        self.c.retired = True
        if pyhvd_call_finished(&self.c, self.c.started):
            handle, self.handle = self.handle, None  # released outside the mutex
        pthread_mutex_unlock(&self.path.c.submissions.mutex)
        forget_id(self)
        return 0

    cdef Handle hold(self, object source, object target, const int64_t* addresses, int form):
        """Submit it, with n addresses to read from and n to write to, by slot; None: it is in flight."""
        if self.signature is not None:
            return self.turns.hold(self.signature, source, target, addresses, form)
        cdef FastPath path = self.path
        cdef Handle handle = Handle.__new__(Handle)
        cdef Handle before = None
        cdef int held = 0
        cdef uint32_t n = self.c.slots.n
        handle.call = self
        handle.source = source
        handle.target = target
        handle.pairs = form & PAIRS
        pthread_mutex_lock(&path.c.submissions.mutex)
        if pyhvd_call_finished(&self.c, self.c.started) and not self.c.retired and not path.closed:
            self.c.ending.done = NULL
            memcpy(self.c.srcs, addresses, n * sizeof(int64_t))
            memcpy(self.c.dsts, addresses + n, n * sizeof(int64_t))
            before = self.handle  # released outside the mutex
            self.handle = handle
            held = pyhvd_fast_path_hold(&path.c, &self.c)
            handle.turn = self.c.started
        pthread_mutex_unlock(&path.c.submissions.mutex)
        # The queue enters its names, then looks for calls in flight; here it is the other way round. So if
        # both come at once, one sees the other. A join pauses the path, marks all held calls, then tells the
        # ranks.
        if held and (path.paused or ((path.entries or path.refusals) and not path.is_free(self))):
            pthread_mutex_lock(&path.c.submissions.mutex)
            held = not pyhvd_fast_path_withdraw(&path.c, &self.c)
            pthread_mutex_unlock(&path.c.submissions.mutex)
        if not held:
            handle.ended = True
            return None
        if not form & WAITS:
            pyhvd_fast_path_ring(&path.c)
        return handle
