# FastPath: one rank's end of the fast lane; a part of shared_memory.pyx.

cdef int AVERAGE = 0  # pyhvd.dtypes.ReduceOp.AVERAGE
cdef int _generation = 0  # of this process, among its forked ancestors


def _count_generation():
    global _generation
    _generation += 1


os.register_at_fork(after_in_child=_count_generation)

SETS = PYHVD_BOARD_SETS
MAX_SLOTS = PYHVD_BOARD_SLOTS


def ready_table_bytes(int size, uint32_t slots):
    """Return the bytes of a board for so many ranks and slots (a multiple of 64)."""
    return pyhvd_board_bytes(size, slots)


cdef class FastPath(ReadyTableEnd):
    """One rank's end of the fast lane.

    Parameters
    ----------
    base : int
        Address of the board, :func:`ready_table_bytes` long, aligned to 128 bytes.
    memory : object
        Keeps the board alive.
    rank, size : int
        This rank, and how many there are.
    slots : int
        Cache slots per process set, a multiple of 64, at most MAX_SLOTS.
    threshold : int
        Bytes that ride together at most.
    groups_alone : bool
        Whether a grouped call's tensors ride only with each other.
    cycle : float
        Longest time (s) for which submissions gather while nobody waits.
    code_of : callable
        Returns the code of a numpy dtype, or -1.
    """

    cdef object code_of
    cdef list names
    cdef list groups
    cdef list parts
    cdef list windows
    cdef list watched
    cdef object watching
    cdef bint over
    cdef dict entries
    cdef dict busy_groups
    cdef dict refusals
    cdef object on_wait
    cdef dict gathering
    cdef unsigned long owner
    cdef int generation
    cdef public bint paused
    cdef bint closed
    cdef int64_t arena_from
    cdef int64_t arena_to

    def __cinit__(
        self, uintptr_t base, memory, int rank, int size, uint32_t slots, size_t threshold, bint groups_alone,
        double cycle, code_of
    ):
        pyhvd_board_attach(&self.c.board, <void*>base, rank, size, slots)
        self.tune(threshold, cycle)
        self.c.groups_alone = groups_alone
        self.memory = memory
        self.generation = _generation
        self.code_of = code_of
        self.names = [None] * SETS
        self.groups = [None] * SETS
        self.parts = [None] * SETS
        self.windows = [None] * SETS
        self.watched = []
        self.watching = threading.Lock()
        self.gathering = {}
        self.entries = {}
        self.busy_groups = {}
        self.refusals = {}
        if not pyhvd_lane_init(&self.c):
            raise MemoryError

    def __dealloc__(self):
        pyhvd_lane_free(&self.c)

    # -- submitting ----------------------------------------------------------------------------------

    cdef Handle submit(
        self, object set_id, object name, object tensor, object op, object prescale, object postscale,
        bint inplace, bint ring
    ):
        """Submit a tensor that is as the cache remembers it; None: it is not."""
        cdef CachedCall unit
        cdef CachedTensor part
        cdef object target
        cdef int64_t[2] addresses
        if not self.may_submit(set_id, name):
            return None
        unit = <CachedCall>(<dict>self.names[set_id]).get(name)
        if unit is None or unit.grouped or not self.is_free(unit):
            return None
        part = unit.first
        if not part.same_terms(op, prescale, postscale) or not unit.suits(0, <PyObject*>tensor, inplace):
            return None
        target = tensor if inplace else part.empty()
        addresses[0] = <int64_t>PyArray_DATA(<PyArray*>tensor)
        addresses[1] = <int64_t>PyArray_DATA(<PyArray*>target)
        return unit.hold(tensor, target, addresses, ring)

    cdef Handle submit_group(
        self, object set_id, object name, object tensors, object op, object prescale, object postscale,
        bint inplace, bint ring
    ):
        """As :meth:`submit`, for the tensors of a grouped call."""
        cdef CachedCall unit
        cdef list source
        if not self.may_submit(set_id, name) or not isinstance(tensors, (list, tuple)):
            return None
        unit = <CachedCall>(<dict>self.groups[set_id]).get((name, len(tensors)))
        if unit is None or not self.is_free(unit) or not unit.first.same_terms(op, prescale, postscale):
            return None
        fetch_all(<PyObject*>tensors)
        source = list(tensors)
        return self._submit_group(unit, source, inplace, ring) if len(source) == unit.c.post.n else None

    cdef Handle _submit_group(self, CachedCall unit, list source, bint inplace, bint ring):
        cdef Py_ssize_t n = len(source)
        cdef Py_ssize_t k
        cdef Py_ssize_t at
        cdef list target = source if inplace else []
        cdef PyObject* tensor
        cdef int64_t* addresses = <int64_t*>PyMem_Malloc(2 * n * sizeof(int64_t))
        if addresses == NULL:
            raise MemoryError
        try:
            for k in range(n):
                if k + AHEAD < n:
                    tensor = PyList_GET_ITEM(<PyObject*>source, k + AHEAD)
                    if PyArray_CheckExact(tensor):
                        fetch(PyArray_DIMS(<PyArray*>tensor))
                tensor = PyList_GET_ITEM(<PyObject*>source, k)
                if not unit.suits(k, tensor, inplace):
                    return None
                at = unit.forms[k].at
                addresses[n + at] = addresses[at] = <int64_t>PyArray_DATA(<PyArray*>tensor)
                if not inplace:
                    target.append((<CachedTensor>unit.parts[k]).empty())
                    addresses[n + at] = <int64_t>PyArray_DATA(<PyArray*>PyList_GET_ITEM(<PyObject*>target, k))
            return unit.hold(source, target, addresses, ring)
        finally:
            PyMem_Free(addresses)

    cdef bint may_submit(self, object set_id, object name) except -1:
        if self.paused or self.closed or self.generation != _generation:
            return False
        if type(name) is not str or type(set_id) is not int:
            return False
        return 0 <= set_id < PYHVD_BOARD_SETS and self.names[set_id] is not None

    cdef bint is_free(self, CachedCall unit) except -1:
        """Return whether no message speaks, or is about to speak, of a unit's names."""
        if not self.entries and not self.refusals:
            return True
        if unit.key in self.busy_groups or unit.key in self.entries or unit.key in self.refusals:
            return False
        if not unit.grouped:
            return True
        keys = [(unit.set_id, part.request.name) for part in unit.parts]
        return not any(key in self.entries or key in self.refusals for key in keys)

    def flush(self):
        """Somebody waits: post what is held, and send what has gathered."""
        self.check_thread()
        with nogil:
            pyhvd_lane_flush(&self.c, False, pyhvd_now())

    def mark_ready(self):
        """Post what has been submitted, whoever was about to do so."""
        with nogil:
            pyhvd_lane_flush(&self.c, True, pyhvd_now())

    cdef int check_thread(self) except -1:
        """See that whoever is about to wait may do so."""
        if self.generation != _generation:  # the memory is here, but no background thread
            raise RuntimeError("this process was forked from one that uses pyhvd; only the parent can wait")
        if self.entries:
            self.on_wait()
        if PyThread_get_thread_ident() == self.owner:
            raise RuntimeError(
                "a callback of a handle must not wait: it runs on the thread that would end it"
            )
        return 0

    # -- what slots mean -----------------------------------------------------------------------------

    def attach(self, dict entries, dict groups, dict refusals, on_wait):
        """Say where the names are that messages speak of, and what to call before a wait if there are any."""
        self.entries = entries
        self.busy_groups = groups
        self.refusals = refusals
        self.on_wait = on_wait

    def know_arena(self, uintptr_t start, size_t nbytes):
        """Say where this rank's arrays in shared memory are."""
        self.arena_from = <int64_t>start
        self.arena_to = <int64_t>(start + nbytes)

    def open_set(self, int set_id, Window window, arenas):
        """Let a process set's allreduces go through its window; there its ranks' ``arenas`` begin."""
        for q, start in enumerate(arenas):
            window.window.arena[<int>q] = <uint8_t*><uintptr_t>start
        if not pyhvd_lane_open(&self.c, <uint32_t>set_id, &window.window):
            raise MemoryError
        self.windows[set_id] = window
        self.names[set_id] = {}
        self.groups[set_id] = {}
        self.parts[set_id] = {}

    def close_set(self, int set_id):
        """Forget a process set. Its units have been taken, and nobody submits to it."""
        for unit in self.names[set_id].values():
            (<CachedCall>unit).retire()
        self.names[set_id] = None
        self.groups[set_id] = None
        self.parts[set_id] = None
        self.windows[set_id] = None
        self.gathering = {key: parts for key, parts in self.gathering.items() if key[0] != set_id}

    def has_set(self, int set_id):
        """Return whether a process set's allreduces can go this way."""
        return 0 <= set_id < PYHVD_BOARD_SETS and self.names[set_id] is not None

    def install(
        self, int set_id, uint32_t slot, request, uint64_t since, int op, double postscale, bint direct
    ):
        """Remember what a slot means.

        Parameters
        ----------
        set_id, slot : int
            Of which process set.
        request : Request
            This rank's own.
        since : int
            Number of the response list that gave it this meaning, on any rank.
        op : int
            What the kernels do, which have no Average.
        postscale : float
            ... and with which factor.
        direct : bool
            Whether every rank's array is in its arena.
        """
        cdef CachedTensor part = <CachedTensor>(<dict>self.parts[set_id]).get(slot)
        cdef CachedTensor new
        cdef pyhvd_record* record = &self.c.sets[set_id].records[slot]
        # Whoever submits it as the own request says has it in the arena, if the ranks have agreed on that.
        record.direct = direct
        if part is not None and part.unit is not None:
            part.unit.c.alike = PYHVD_UNKNOWN
        if part is not None and part.request == request and (part.unit is None or not part.unit.retired):
            part.renew(since)
            return
        if len(request.shape) > 32:
            return
        new = CachedTensor.__new__(CachedTensor)
        new.request = request
        new.slot = slot
        new.since = since
        new.op = request.op
        new.prescale = request.prescale
        new.postscale = request.postscale
        new.code = request.dtype
        new.ndim = len(request.shape)
        new.window = request.window
        record.count = 1
        for d, length in enumerate(request.shape):
            new.dims[d] = length
            record.count *= length
        record.prescale = request.prescale
        record.postscale = postscale
        record.dtype = request.dtype
        record.op = op
        self.parts[set_id][slot] = new
        self._assemble(set_id, new)

    def _assemble(self, int set_id, CachedTensor part):
        """Make the unit of a tensor; that of a group once all of its tensors are there."""
        request = part.request
        if not request.group:
            self.names[set_id][request.name] = CachedCall(self, set_id, request.name, False, [part])
            return
        key = (request.group, request.group_size)
        waiting = self.gathering.setdefault((set_id, key), {})
        waiting[request.name] = part
        if len(waiting) < request.group_size:
            return
        del self.gathering[set_id, key]
        names = [f"{request.group}_{i}of{request.group_size}" for i in range(1, request.group_size + 1)]
        if waiting.keys() == set(names):
            unit = CachedCall(self, set_id, request.group, True, [waiting[name] for name in names])
            self.groups[set_id][key] = unit
            for name in names:
                self.names[set_id][name] = unit

    def retire(self, int set_id, uint32_t slot, request):
        """A slot is about to mean something else; return the unit that it was in, if it is in flight.

        A slot that is to mean what it means already is left alone.
        """
        cdef CachedTensor part = <CachedTensor>self.parts[set_id].get(slot)
        cdef CachedCall unit
        if part is None or part.request == request:
            return None
        del self.parts[set_id][slot]
        unit = part.unit
        if unit is None:  # its group never came to be
            old = part.request
            waiting = self.gathering.get((set_id, (old.group, old.group_size)), {})
            waiting.pop(old.name, None)
            return None
        unit.retire()
        for each in unit.parts:
            if self.names[set_id].get(each.request.name) is unit:
                del self.names[set_id][each.request.name]
        if unit.grouped and self.groups[set_id].get((unit.name, len(unit.parts))) is unit:
            del self.groups[set_id][unit.name, len(unit.parts)]
        return unit if unit.in_flight() else None

    # -- what is in flight ---------------------------------------------------------------------------

    def requests(self, int set_id, uint32_t slot, bint alone):
        """Return this rank's requests of the unit that a slot is in, or with ``alone`` the slot's own."""
        cdef CachedTensor part = self.parts[set_id].get(slot) if self.has_set(set_id) else None
        if part is None:
            return []
        if alone or part.unit is None:
            return [part.request]
        return [each.request for each in part.unit.parts]

    def find(self, int set_id, name):
        """Return the unit in flight that holds a tensor of this name, or None."""
        cdef CachedCall unit
        if not self.has_set(set_id):
            return None
        unit = <CachedCall>self.names[set_id].get(name)
        return unit if unit is not None and unit.in_flight() else None

    def find_group(self, int set_id, name):
        """Return the unit in flight of a grouped call of this name, of any size, or None."""
        if not self.has_set(set_id):
            return None
        for (group, _), unit in list(self.groups[set_id].items()):
            if group == name and unit.in_flight():
                return unit
        return None

    def in_flight(self, set_id=None):
        """Return the units in flight, of one process set or of all."""
        which = range(PYHVD_BOARD_SETS) if set_id is None else [set_id]
        units = {}
        for each in which:
            if self.has_set(each):
                units.update((id(unit), unit) for unit in list(self.names[each].values()) if unit.in_flight())
        return list(units.values())

    def refused(self):
        """Return a unit that the board has refused, or None; it is returned until it is taken."""
        cdef pyhvd_unit* unit = NULL
        pthread_mutex_lock(&self.c.mutex)
        if self.c.refusals:
            unit = self.c.refused[0]
        pthread_mutex_unlock(&self.c.mutex)
        return None if unit == NULL else <CachedCall>unit.owner

    # -- the background thread -----------------------------------------------------------------------

    def doze(self, timeout):
        """Sleep, post and drive; return the reasons why Python is wanted, 0 after ``timeout`` seconds."""
        cdef int64_t ns = -1 if timeout is None or timeout > 1e9 else <int64_t>(max(timeout, 0.0) * 1e9)
        cdef uint32_t calls
        self.owner = PyThread_get_thread_ident()
        with nogil:
            calls = pyhvd_lane_doze(&self.c, ns)
        if calls & PYHVD_CALL_DONE:
            self._run_callbacks()
        return calls

    def enter(self, uint64_t number):
        """Drive as far as the log goes; return whether it has come to this response list.

        If so, the caller alone uses the windows until :meth:`leave`.
        """
        cdef int there
        with nogil:
            there = pyhvd_lane_enter(&self.c, number)
        return there != 0

    def leave(self):
        """Go on behind the response list."""
        with nogil:
            pyhvd_lane_leave(&self.c)

    def shut(self, bint entered):
        """Let nobody submit or wait here any longer; return when nobody else uses the windows any more.

        ``entered`` says whether the caller has entered, and not left.
        """
        pthread_mutex_lock(&self.c.mutex)
        self.closed = True
        pthread_mutex_unlock(&self.c.mutex)
        with nogil:
            pyhvd_lane_shut(&self.c)
            if not entered:
                pyhvd_lane_seize(&self.c)

    def note(self):
        """Return the note of the rank that has aborted a window, if the engine has come upon it; or None."""
        cdef uint32_t found = pyhvd_lane_aborted(&self.c)
        return (<Window>self.windows[found - 1]).note() if found else None

    def forget(self, bint keep=False):
        """Everything has ended: run what callbacks there are, and let go of all handles.

        With ``keep`` the handles stay, and with them the arrays: the engine may be in the middle of them.

        The garbage collector does not look into handles. From now on whoever adds a callback runs it.
        """
        self.over = True
        self._run_callbacks()
        if keep:
            return
        for parts in self.parts:
            for part in (parts or {}).values():
                if part.unit is not None:
                    (<CachedCall>part.unit).handle = None

    def _run_callbacks(self):
        with self.watching:
            ended = [each for each in self.watched if each[0].done()]
            self.watched = [each for each in self.watched if each not in ended]
        for handle, callback in ended:
            try:
                callback(handle)
            except BaseException:
                _log.exception("a callback of %r raised", handle.name)
