# Turns: the calls without a name of a process set; a part of shared_memory.pyx.

cdef str _UNNAMED = "noname"  # pyhvd.negotiation.messages.UNNAMED
cdef uint32_t NO_SLOT = 0xffffffff
cdef uint64_t NUMBER_FACTOR = 0x9E3779B97F4A7C15  # odd, so different numbers give different products
cdef Py_ssize_t MOST_REMEMBERED = 16384  # arrays of all signatures of a set


cdef class Signature:
    """What defines a call without a name, or a grouped one, except its number and its arrays."""

    cdef CachedCall like  # never submitted: it compares arrays, and makes results
    cdef pyhvd_cached_tensor meaning  # for the engine; without a call
    cdef uint64_t digest
    cdef uint32_t id
    cdef Signature next  # of the call that followed the last time


cdef class Turns:
    """The calls without a name of a process set: their count, their signatures and their turn slots.

    1. The n-th call uses turn slot n % TURNS. If that slot's last call is in flight, it goes by message.
    2. The mutex guards ``next``: a call takes its number when it is held, in one step.
    3. A critical section guards the signatures.
    """

    cdef FastPath path
    cdef int set_id
    cdef uint64_t version
    cdef object places  # of the set's hosts, for plans; written before the set is served
    cdef uint64_t next  # number of the next call
    cdef list calls  # the CachedCall of each turn slot; empty before the first signature
    cdef dict signatures  # {(verb, shape of the first array, whether grouped): [Signature]}
    cdef dict by_requests  # {(whether grouped, requests without names): Signature}
    cdef dict by_id
    cdef Py_ssize_t remembered  # arrays of all signatures
    cdef uint32_t last_id
    cdef Signature last
    cdef bint closed

    def __cinit__(self, FastPath path, int set_id, uint64_t version):
        self.path = path
        self.set_id = set_id
        self.version = version
        self.calls = []
        self.signatures = {}
        self.by_requests = {}
        self.by_id = {}

    cdef int64_t take_number(self) noexcept:
        """Return the number of a call that goes by message."""
        cdef uint64_t number
        pthread_mutex_lock(&self.path.c.submissions.mutex)
        number = self.next
        self.next += 1
        pthread_mutex_unlock(&self.path.c.submissions.mutex)
        return <int64_t>number

    cdef void restart(self) noexcept:
        """Number the calls from 0 again; none is in flight on any rank."""
        pthread_mutex_lock(&self.path.c.submissions.mutex)
        self.next = 0
        pthread_mutex_unlock(&self.path.c.submissions.mutex)

    cdef int learn(
        self, tuple requests, bint grouped, uint64_t digest, int op, double postscale, list plans
    ) except -1:
        """Remember a signature; ``requests`` have no names."""
        cdef Signature signature
        cdef CachedTensor tensor
        cdef object request = requests[0]
        cdef double prescale = request.prescale
        cdef int dtype = request.dtype
        cdef bint direct = request.window
        cdef tuple key = (int(request.type), request.shape, grouped)
        cdef uint32_t first = self.path.c.setup.table.slots - TURNS
        with cython.critical_section(self):
            if self.closed or (grouped, requests) in self.by_requests:
                return 0
            if self.remembered + len(requests) > MOST_REMEMBERED:
                self.forget()
            self.remembered += len(requests)
            if not self.calls:
                self.calls = [
                    CachedCall(
                        self.path, self.set_id, _UNNAMED, False,
                        [CachedTensor(request, first + k, self.version, plans[0])],
                    )
                    for k in range(TURNS)
                ]
            tensors = [
                CachedTensor(each, NO_SLOT, self.version, plan)
                for each, plan in zip(requests, plans, strict=True)
            ]
            tensor = <CachedTensor>tensors[0]
            signature = Signature.__new__(Signature)
            signature.like = CachedCall(self.path, self.set_id, _UNNAMED, grouped, tensors)
            signature.digest = digest
            self.last_id += 1
            signature.id = self.last_id
            if dtype < 0:
                signature.meaning.count = 0  # a barrier has no elements
            elif grouped:
                signature.meaning.count = signature.like.c.starts[len(tensors)]
            else:
                signature.meaning.count = tensor.length()
            signature.meaning.prescale = prescale
            signature.meaning.postscale = postscale
            signature.meaning.dtype = max(dtype, 0)
            signature.meaning.op = max(op, 0)
            signature.meaning.direct = direct
            tensor.describe(&signature.meaning)
            signature.like.turns = self
            signature.like.signature = signature
            self.by_requests[grouped, requests] = self.by_id[signature.id] = signature
            self.signatures.setdefault(key, []).append(signature)
        return 0

    cdef int forget(self) except -1:
        """Forget all signatures; calls in flight keep theirs."""
        self.by_requests.clear()
        self.by_id.clear()
        self.remembered = 0
        self.signatures.clear()
        if self.last is not None:
            self.last.next = None
        self.last = None
        return 0

    cdef int close(self) except -1:
        """Let no call be submitted any longer: its set goes."""
        with cython.critical_section(self):
            self.closed = True
            self.forget()
            for call in self.calls:
                (<CachedCall>call).retire()
        return 0

    cdef CachedCall expected(self):
        """Return the call that followed the last one before, or None."""
        with cython.critical_section(self):
            if self.last is None or self.last.next is None:
                return None
            return self.last.next.like

    cdef list candidates(self, int verb, object tensor, bint grouped):
        """Return the signatures that a call may have; ``tensor`` is its first one, None of a barrier."""
        cdef object shape = () if tensor is None else getattr(tensor, "shape", None)
        if not isinstance(shape, tuple):
            return []
        with cython.critical_section(self):
            return list(self.signatures.get((verb, tuple(shape), grouped), ()))

    cdef int follow(self, Signature signature) except -1:
        """Note that a call had this signature."""
        with cython.critical_section(self):
            if self.last is not None:
                self.last.next = signature
            self.last = signature
        return 0

    cdef Handle hold(
        self, Signature signature, object source, object target, const int64_t* addresses, int form
    ):
        """Submit the next call, with n addresses to read from and n to write to.

        Return None if its turn slot is in use: then the call goes by message.
        """
        cdef FastPath path = self.path
        cdef Handle handle = Handle.__new__(Handle)
        cdef CachedCall call = None
        cdef CachedCall like = signature.like
        cdef object site = find_site()
        # What the turn slot had before is released outside the mutex: objects may have finalizers.
        cdef object before = None
        cdef object old_site = None
        cdef list old_tensors = None
        cdef CachedTensor old_first = None
        cdef list calls = self.calls
        cdef int held = 0
        handle.source = source
        handle.target = target
        handle.pairs = form & PAIRS
        pthread_mutex_lock(&path.c.submissions.mutex)
        call = <CachedCall><object>PyList_GET_ITEM(<PyObject*>calls, <Py_ssize_t>(self.next % TURNS))
        if (
            pyhvd_call_finished(&call.c, call.c.started) and not call.c.retired and not path.closed
            and take_arrays(call, like, addresses)
        ):
            before, old_site, old_tensors, old_first = call.handle, call.site, call.tensors, call.first
            call.handle, call.site, call.tensors, call.first = handle, site, like.tensors, like.first
            call.c.number = self.next
            call.c.signature = signature.id
            call.c.slots.digest = signature.digest + self.next * NUMBER_FACTOR
            self.describe(&signature.meaning, call)
            held = pyhvd_fast_path_hold(&path.c, &call.c)
            handle.call = call
            handle.turn = call.c.started
            if held:
                self.next += 1
                handle.place = self.next
        pthread_mutex_unlock(&path.c.submissions.mutex)
        # A join pauses the path, marks all held calls, then tells the ranks.
        if held and path.paused:
            pthread_mutex_lock(&path.c.submissions.mutex)
            held = not pyhvd_fast_path_withdraw(&path.c, &call.c)
            if not held and self.next == call.c.number + 1:
                self.next -= 1  # it goes by message under the same number
            pthread_mutex_unlock(&path.c.submissions.mutex)
        if not held:
            handle.ended = True
            return None
        if not form & WAITS:
            pyhvd_fast_path_ring(&path.c)
        return handle

    cdef void describe(self, const pyhvd_cached_tensor* meaning, CachedCall call) noexcept:
        """Tell the engine what the turn slot means now; the samples that it counts stay."""
        cdef pyhvd_cached_tensor* cached = &self.path.c.setup.sets[self.set_id].tensors[call.c.slots.ids[0]]
        cached.call = &call.c
        cached.count = meaning.count
        cached.prescale = meaning.prescale
        cached.postscale = meaning.postscale
        cached.dtype = meaning.dtype
        cached.op = meaning.op
        cached.direct = meaning.direct
        cached.verb = meaning.verb
        cached.move = meaning.move
        cached.moves = meaning.moves
        cached.move_count = meaning.move_count
        cached.portions = meaning.portions


cdef bint take_arrays(CachedCall call, CachedCall like, const int64_t* addresses) noexcept:
    """Give a turn slot's call, which has ended, arrays as a signature's; return False without memory."""
    cdef uint32_t n = like.c.slots.n
    cdef int64_t* room
    if n > call.room:
        room = <int64_t*>PyMem_Malloc(2 * n * sizeof(int64_t))
        if room == NULL:
            return False
        if call.c.srcs != call.c.single_addresses:
            PyMem_Free(call.c.srcs)
        call.c.srcs, call.room = room, n
    call.grouped = like.grouped
    call.c.arrays = n if like.grouped else 0
    call.c.starts = like.c.starts  # the signature's tensors keep them
    call.c.dsts = call.c.srcs + n
    memcpy(call.c.srcs, addresses, n * sizeof(int64_t))
    memcpy(call.c.dsts, addresses + n, n * sizeof(int64_t))
    return True


cdef Handle submit_turn(
    int verb, int form, object tensors, object term, object op, object prescale, object postscale,
    object process_set
):
    """Submit a call without a name; return None if it must go by message."""
    cdef PathSet served = find_set(process_set)
    cdef Handle handle = None
    cdef CachedCall like
    cdef Signature signature
    cdef bint grouped = form & GROUPED
    cdef object first = tensors
    if served is None or served.turns is None:
        return None
    if grouped:
        if not isinstance(tensors, (list, tuple)) or not tensors:
            return None
        first = tensors[0]
    elif form & PLACED:
        first = tensors[0]
    like = served.turns.expected()
    if like is not None and like.grouped == grouped and has_terms(like, verb, term, op, prescale, postscale):
        handle = submit_cached(like, tensors, form)
    if handle is None:
        for signature in served.turns.candidates(verb, first, grouped):
            like = signature.like
            if has_terms(like, verb, term, op, prescale, postscale):
                handle = submit_cached(like, tensors, form)
            if handle is not None:
                break
    if handle is not None:
        served.turns.follow(like.signature)
    return handle


cdef bint has_terms(
    CachedCall like, int verb, object term, object op, object prescale, object postscale
) except -1:
    """Return whether a call of these arguments is like another one, apart from its array."""
    if like.first.verb != verb:
        return False
    if verb == ALLREDUCE or verb == REDUCESCATTER:
        return like.first.same_terms(op, prescale, postscale)
    return like.first.same_term(term)
