# FastPath: one rank's end of the fast lane; a part of shared_memory.pyx.

cdef int AVERAGE = 0  # pyhvd.dtypes.ReduceOp.AVERAGE
cdef int _generation = 0  # how often the process was forked, counted from the one that imported this module


def _count_generation():
    global _generation
    _generation += 1


os.register_at_fork(after_in_child=_count_generation)


def ready_table_bytes(int size, uint32_t slots, Agreement agreement=None):
    """Return the bytes of a ready table for ``size`` ranks, with ``slots`` per process set."""
    return _table_bytes(size, slots + TURNS) + (
        0 if agreement is None else pyhvd_agreement_bytes(&agreement.c, slots + TURNS)
    )


cdef size_t _table_bytes(int size, uint32_t slots):
    return (pyhvd_ready_table_bytes(size, slots) + 127) // 128 * 128


cdef class PathSet:
    """A process set that the fast path serves."""

    cdef Window window
    cdef dict calls  # {name of a tensor: its CachedCall}
    cdef dict groups  # {(name of a grouped call, size): CachedCall}
    cdef dict tensors  # {slot: CachedTensor}
    cdef dict incomplete  # {(name of a grouped call, size): {name of a tensor: CachedTensor}}
    cdef Turns turns  # calls without a name; None: all go by message

    def __cinit__(self, Window window, Turns turns):
        self.window = window
        self.turns = turns
        self.calls = {}
        self.groups = {}
        self.tensors = {}
        self.incomplete = {}

    cdef list every_call(self):
        """Return all calls that may be in flight."""
        return [*list(self.calls.values()), *([] if self.turns is None else self.turns.calls)]

    cdef int enter(self, FastPath path, int set_id, CachedTensor tensor) except -1:
        """Make the call of a tensor; of a grouped call, once all of its tensors are there."""
        request = tensor.request
        if not request.group:
            self.calls[request.name] = CachedCall(path, set_id, request.name, False, [tensor])
            return 0
        key = (request.group, request.group_size)
        present = self.incomplete.setdefault(key, {})
        present[request.name] = tensor
        if len(present) < request.group_size:
            return 0
        del self.incomplete[key]
        names = [f"{request.group}_{i}of{request.group_size}" for i in range(1, request.group_size + 1)]
        if present.keys() == set(names):
            call = CachedCall(path, set_id, request.group, True, [present[name] for name in names])
            self.groups[key] = call
            self.calls.update(dict.fromkeys(names, call))
        return 0


@cython.no_gc_clear  # __dealloc__ needs the agreement
cdef class FastPath(ReadyTableEnd):
    """One rank's end of the fast lane.

    Parameters
    ----------
    base : int
        Address of the ready table, :func:`ready_table_bytes` long, aligned to 128 bytes.
    memory : object
        Keeps the ready table alive.
    rank, size : int
        This rank, and the number of ranks, on this host.
    slots : int
        Cache slots per process set, a multiple of 64, at most MAX_SLOTS.
    threshold : int
        Bytes of a batch, at most.
    groups_alone : bool
        Whether a grouped call's tensors share a batch only with each other.
    cycle : float
        Longest time (s) for which calls are held while no thread waits.
    code_of : callable
        Returns the code of a numpy dtype, or -1.
    agreement : Agreement, optional
        With the other hosts, if there are any.
    delegates : bool
        Whether tensors may use it. Without them it serves only lists, beats and notes between hosts.
    """

    cdef list sets  # PathSet by id, None where the path does not serve the set, or not yet
    cdef list turns_of  # Turns by id, also of sets that are served later: their calls are counted
    # The queue's, read here; None before `attach`:
    cdef dict entries
    cdef dict busy_groups
    cdef dict refusals
    cdef object on_wait
    cdef object code_of
    cdef list callbacks
    cdef object callbacks_lock
    cdef bint has_ended
    cdef unsigned long background_thread
    cdef int generation
    cdef public bint paused
    cdef bint closed
    cdef object arena
    cdef int64_t arena_from
    cdef int64_t arena_to

    def __cinit__(
        self, uintptr_t base, memory, int rank, int size, uint32_t slots, size_t threshold, bint groups_alone,
        double cycle, code_of, Agreement agreement=None, bint delegates=True
    ):
        slots += TURNS
        pyhvd_ready_table_attach(&self.c.setup.table, <void*>base, rank, size, slots)
        self.c.setup.table.has_turns = True
        self.delegates = delegates
        self.ranks = list(range(size))
        if agreement is not None:
            pyhvd_agreement_attach(&agreement.c, <void*>(base + _table_bytes(size, slots)), slots)
            self.agreement = agreement
            self.c.setup.table.agreement = &agreement.c
            self.ranks = agreement.hosts[agreement.c.tree.host]
        self.local = {each: number for number, each in enumerate(self.ranks)}
        self.tune(threshold, cycle)
        self.c.setup.groups_alone = groups_alone
        self.memory = memory
        self.generation = _generation
        self.code_of = code_of
        self.sets, self.turns_of = [None] * SETS, [None] * SETS
        self.callbacks = []
        self.callbacks_lock = threading.Lock()
        if not pyhvd_fast_path_init(&self.c):
            raise MemoryError

    def __dealloc__(self):
        if self.c.setup.table.agreement != NULL:
            pyhvd_agreement_stop_beats(&self.c.setup.table)
        pyhvd_fast_path_free(&self.c)

    # -- submissions and waits -------------------------------------------------------------------------

    cdef bint is_free(self, CachedCall call) except -1:
        """Return whether no message is about a tensor of the call, nor will be."""
        if call.key in self.busy_groups or call.key in self.entries or call.key in self.refusals:
            return False
        if not call.grouped:
            return True
        keys = [(call.set_id, tensor.request.name) for tensor in call.tensors]
        return not any(key in self.entries or key in self.refusals for key in keys)

    def flush(self):
        """Send all submissions that are on hold, here and in the queue: a thread is about to wait."""
        self.prepare_wait()
        with nogil:
            pyhvd_fast_path_flush(&self.c, False, pyhvd_now())

    def mark_ready(self):
        """Mark all calls that were submitted before; wait for other threads that are doing so."""
        with nogil:
            pyhvd_fast_path_flush(&self.c, True, pyhvd_now())

    cdef int prepare_wait(self) except -1:
        """Send the queue's submissions; raise an error in a thread that must not wait."""
        if self.generation != _generation:  # the child has the memory, but no background thread
            raise RuntimeError("this process was forked from one that uses pyhvd; only the parent can wait")
        if self.entries:
            self.on_wait()
        if PyThread_get_thread_ident() == self.background_thread:
            raise RuntimeError(
                "a callback of a handle must not wait: it runs on the thread that would end it"
            )
        return 0

    # -- the meaning of slots --------------------------------------------------------------------------

    def attach(self, dict entries, dict groups, dict refusals, on_wait):
        """Set the queue's names, and the function to call before a wait while there are entries."""
        self.entries = entries
        self.busy_groups = groups
        self.refusals = refusals
        self.on_wait = on_wait
        pyhvd_call_id_next_generation()

    @property
    def has_messages(self):
        """Whether the queue has entries or refusals: then C code cannot submit (``call_ids.h``)."""
        return pyhvd_read_word(&self.c.has_messages) != 0

    @has_messages.setter
    def has_messages(self, bint has_messages):
        pyhvd_set_word(&self.c.has_messages, has_messages)

    def know_arena(self, arena):
        """Set this rank's :class:`pyhvd.transport.arena.Arena`."""
        self.arena = arena
        self.arena_from = arena.start
        self.arena_to = self.arena_from + <int64_t>arena.nbytes

    def add_set(self, int set_id, uint64_t version):
        """Count the calls without a name of a process set, which response list ``version`` made.

        They go by message until :meth:`open_set`. A set that was there from the start has version 0.
        """
        self.turns_of[set_id] = Turns(self, set_id, version) if self.delegates else None

    def open_set(self, int set_id, Window window, arenas, places=None):
        """Serve a process set's calls through its window, given its ranks' arenas (addresses).

        ``places`` are the set's :class:`pyhvd.engine.plans.HostPlaces`, if it has several hosts.
        """
        cdef Turns turns = self.turns_of[set_id]
        for q, start in enumerate(arenas):
            window.window.arena[<int>q] = <uint8_t*><uintptr_t>start
        window.window.arena_bytes = self.arena_to - self.arena_from
        if not pyhvd_fast_path_open(&self.c, <uint32_t>set_id, &window.window):
            raise MemoryError
        if turns is not None:
            turns.places = places
        self.sets[set_id] = PathSet(window, turns)

    def retire_set(self, int set_id):
        """Let the calls of a process set be submitted no more."""
        for call in (<PathSet>self.sets[set_id]).calls.values():
            (<CachedCall>call).retire()
        if (<PathSet>self.sets[set_id]).turns is not None:
            (<PathSet>self.sets[set_id]).turns.close()

    def close_set(self, int set_id):
        """Forget a process set. Its calls were retired and taken."""
        if 0 <= set_id < SETS:
            self.sets[set_id] = self.turns_of[set_id] = None

    cdef PathSet get_set(self, int set_id):
        return self.sets[set_id] if 0 <= set_id < SETS else None

    cdef Turns get_turns(self, int set_id):
        return self.turns_of[set_id] if 0 <= set_id < SETS else None

    def has_set(self, int set_id):
        """Return whether the path serves a process set."""
        return self.get_set(set_id) is not None

    def install(
        self, int set_id, uint32_t slot, request, uint64_t version, int op, double postscale, bint direct,
        plan
    ):
        """Remember the meaning of a slot.

        Parameters
        ----------
        set_id, slot : int
            The process set, and its slot.
        request : Request
            This rank's own.
        version : int
            Number of the response list that gave the slot this meaning, on any rank.
        op : int
            The kernels' op; they have no Average.
        postscale : float
            The kernels' factor.
        direct : bool
            Whether every rank's array and its result are in its arena.
        plan : Plan
            What the ranks' sizes make of it.
        """
        cdef PathSet served = self.sets[set_id]
        cdef CachedTensor before = <CachedTensor>served.tensors.get(slot)
        cdef CachedTensor tensor
        cdef pyhvd_cached_tensor* cached = &self.c.setup.sets[set_id].tensors[slot]
        # A rank whose request says so submits arrays in its arena, once the ranks have agreed on that.
        cached.direct = direct
        if before is not None and before.call is not None:
            before.call.c.alike = PYHVD_UNKNOWN
        if before is not None and before.means(request, version):
            if before.call is None or not before.call.c.retired:
                before.renew(version)
                return
        if len(request.shape) > 32:
            return
        cached.count = request.dtype >= 0  # a barrier has no elements
        for length in request.shape:
            cached.count *= length
        cached.prescale = request.prescale
        cached.postscale = postscale
        cached.dtype = max(request.dtype, 0)
        cached.op = max(op, 0)
        tensor = CachedTensor(request, slot, version, plan)
        tensor.describe(cached)
        served.tensors[slot] = tensor
        served.enter(self, set_id, tensor)

    def retire(self, int set_id, uint32_t slot, request, uint64_t version):
        """Forget what a slot means, unless it means this request; return its call if that is in flight."""
        cdef PathSet served = self.sets[set_id]
        cdef CachedTensor tensor = <CachedTensor>served.tensors.get(slot)
        cdef CachedCall call
        if tensor is None or tensor.means(request, version):
            return None
        del served.tensors[slot]
        call = tensor.call
        if call is None:  # its group never became complete
            old = tensor.request
            served.incomplete.get((old.group, old.group_size), {}).pop(old.name, None)
            return None
        call.retire()
        for each in call.tensors:
            if served.calls.get(each.request.name) is call:
                del served.calls[each.request.name]
        key = (call.name, len(call.tensors))
        if served.groups.get(key) is call:
            del served.groups[key]
        return call if call.in_flight() else None

    # -- calls without a name --------------------------------------------------------------------------

    def next_number(self, int set_id):
        """Return the number of a set's next unnamed call, which goes by message; -1: count elsewhere."""
        cdef Turns turns = self.get_turns(set_id)
        return -1 if turns is None else turns.take_number()

    def restart_numbers(self, int set_id):
        """Number a set's calls without a name from 0 again; none is in flight on any rank."""
        cdef Turns turns = self.get_turns(set_id)
        if turns is not None:
            turns.restart()

    def places_of(self, int set_id):
        """Return what :meth:`open_set` was told of a set's hosts."""
        cdef PathSet served = self.get_set(set_id)
        return None if served is None or served.turns is None else served.turns.places

    def learn(
        self, int set_id, tuple requests, bint grouped, uint64_t digest, int op, double postscale, list plans
    ):
        """Remember a call without a name.

        Parameters
        ----------
        set_id : int
            The process set.
        requests : tuple of Request
            This rank's own, with empty names; one, unless the call is grouped.
        grouped : bool
            Whether it is a grouped call.
        digest : int
            Of the requests; equal only if all ranks' requests are.
        op, postscale
            As for :meth:`install`.
        plans : list
            By request, as for :meth:`install`, if all ranks make the same call.
        """
        cdef PathSet served = self.get_set(set_id)
        if served is None or served.turns is None or any([len(each.shape) > 32 for each in requests]):
            return
        served.turns.learn(requests, grouped, digest, op, postscale, plans)

    def signature(self, int set_id, uint32_t signature):
        """Return this rank's requests of a signature, with empty names, and whether they are a group.

        Without requests if it was forgotten.
        """
        cdef PathSet served = self.get_set(set_id)
        cdef Signature found = None
        if served is not None and served.turns is not None:
            found = served.turns.by_id.get(signature)
        if found is None:
            return [], False
        return [each.request for each in found.like.tensors], found.like.grouped

    # -- calls in flight -------------------------------------------------------------------------------

    def requests(self, int set_id, uint32_t slot, bint alone):
        """Return this rank's requests of a slot's call; with ``alone``, of the slot only."""
        cdef PathSet served = self.get_set(set_id)
        cdef CachedTensor tensor = None if served is None else served.tensors.get(slot)
        if tensor is None:
            return []
        if alone or tensor.call is None:
            return [tensor.request]
        return [each.request for each in tensor.call.tensors]

    def find(self, int set_id, name):
        """Return the call in flight that has a tensor of this name, or None."""
        cdef PathSet served = self.get_set(set_id)
        cdef CachedCall call = None if served is None else served.calls.get(name)
        return call if call is not None and call.in_flight() else None

    def find_group(self, int set_id, name):
        """Return the grouped call in flight of this name, of any size, or None."""
        return next((call for call in self.in_flight(set_id) if call.grouped and call.name == name), None)

    def in_flight(self, set_id=None):
        """Return the calls in flight, of one process set or of all."""
        cdef PathSet served
        calls = {}
        for each in range(SETS) if set_id is None else [set_id]:
            served = self.get_set(each)
            if served is not None:
                calls.update((id(call), call) for call in served.every_call() if call.in_flight())
        return list(calls.values())

    def refused(self):
        """Return a call that the ready table has refused, until it is taken; or None."""
        cdef pyhvd_call* call
        pthread_mutex_lock(&self.c.submissions.mutex)
        call = self.c.submissions.refused
        pthread_mutex_unlock(&self.c.submissions.mutex)
        return None if call == NULL else <CachedCall>call.owner

    # -- the background thread -------------------------------------------------------------------------

    def sleep(self, timeout):
        """Sleep, flush and make progress; return the reasons of a wake-up, or 0 after ``timeout`` seconds."""
        cdef int64_t ns = -1 if timeout is None or timeout > 1e9 else <int64_t>(max(timeout, 0.0) * 1e9)
        cdef uint32_t reasons
        self.background_thread = PyThread_get_thread_ident()
        with nogil:
            reasons = pyhvd_fast_path_sleep(&self.c, ns)
        if reasons & PYHVD_WAKE_DONE:
            self._run_callbacks()
        return reasons

    def enter(self, uint64_t number):
        """Make progress to the end of the ready log; return whether this response list is next there.

        If so, the caller alone uses the windows until it calls :meth:`leave`.
        """
        cdef int is_next
        with nogil:
            is_next = pyhvd_fast_path_enter(&self.c, number)
        return is_next != 0

    def leave(self):
        """Step past the response list, and let other threads make progress."""
        with nogil:
            pyhvd_fast_path_leave(&self.c)

    def end(self, bint entered):
        """Let no thread submit or wait here any longer; return once no other thread uses the windows.

        ``entered`` says whether the caller has entered, and not left.
        """
        pthread_mutex_lock(&self.c.submissions.mutex)
        self.closed = True
        pthread_mutex_unlock(&self.c.submissions.mutex)
        with nogil:
            pyhvd_fast_path_end(&self.c)
            if not entered:
                pyhvd_fast_path_keep_lock(&self.c)

    def note(self):
        """Return the note of the rank that aborted a window, once this rank has found it aborted; or None."""
        cdef uint32_t found = pyhvd_fast_path_aborted(&self.c)
        return (<PathSet>self.sets[found - 1]).window.note() if 0 < found <= SETS else None

    def has_given_up(self):
        """Return whether a window was aborted, or another host is lost: the path is closed."""
        return pyhvd_fast_path_aborted(&self.c) != 0

    def forget(self, bint keep=False):
        """Run the last callbacks and release all handles: every call has ended.

        With ``keep`` the handles stay, and with them the arrays: a batch may still be using them. The garbage
        collector does not look into handles. From now on a callback runs in the thread that adds it.
        """
        self.has_ended = True
        forget_ids(self)
        self._run_callbacks()
        if keep:
            return
        for served in self.sets:
            if served is None:
                continue
            for tensor in (<PathSet>served).tensors.values():
                if tensor.call is not None:
                    (<CachedCall>tensor.call).handle = None
            if (<PathSet>served).turns is not None:
                for call in (<PathSet>served).turns.calls:
                    (<CachedCall>call).handle = None

    def _run_callbacks(self):
        with self.callbacks_lock:
            ended = [each for each in self.callbacks if each[0].done()]
            self.callbacks = [each for each in self.callbacks if each not in ended]
        for handle, callback in ended:
            try:
                callback(handle)
            except BaseException:
                _log.exception("a callback of %r raised", handle.name)
