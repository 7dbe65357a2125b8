# ReadyTableEnd: one rank's end of the ready table; a part of shared_memory.pyx.

cdef tuple read_histogram(const pyhvd_histogram* histogram):
    # The words are atomic in C, so each access here is atomic.
    return [histogram.buckets[k] for k in range(PYHVD_BUCKETS)], histogram.sum


@cython.no_gc_clear  # __dealloc__ needs the agreement
cdef class ReadyTableEnd:
    """One rank's end of the ready table, and what its fast path does without tensors."""

    cdef pyhvd_fast_path c
    cdef Sampler sampler
    cdef object memory
    cdef Trace trace
    cdef Agreement agreement  # None: all ranks are on one host
    cdef list ranks  # the rank of each local one
    cdef dict local  # {rank: its number on this host}
    cdef readonly bint delegates  # whether tensors may use it

    def record_in(self, Trace trace):
        """Record what happens on the fast path in a trace; call it before any submission."""
        self.trace = trace
        self.c.setup.trace = trace.ring

    @property
    def slots(self):
        """Cache slots per process set that may be delegated."""
        return self.c.setup.table.slots - TURNS if self.delegates else 0

    @property
    def turns(self):
        """Turn slots per process set; they come after the cache slots."""
        return TURNS if self.delegates else 0

    def serves(self, int set_id, ranks):
        """Return whether the ranks of a process set can agree in the table."""
        return set_id < SETS and (self.agreement is None or self.agreement.serves(ranks))

    def keep_lock(self):
        """Take the table's lock and keep it, like a rank that was stopped while it held it. For tests."""
        with nogil:
            pyhvd_ready_table_lock(&self.c.setup.table, 1_000_000_000)

    def clear(self):
        """Zero the table; on one rank, before any rank uses it."""
        pyhvd_ready_table_clear(&self.c.setup.table)
        if self.agreement is not None:
            pyhvd_agreement_clear(&self.agreement.c, self.c.setup.table.slots)

    def open_ready_set(self, int set_id, ranks):
        """Let the members of a process set agree in the table; on each host, by any member."""
        cdef uint32_t members[256]
        cdef uint32_t count = 0
        cdef int spans = self.agreement is not None and self.agreement.spans(ranks)
        for rank in ranks:
            if rank in self.local:
                members[count] = self.local[rank]
                count += 1
        with nogil:
            pyhvd_ready_table_open_set(&self.c.setup.table, <uint32_t>set_id, members, count, spans)

    def delegate(self, int set_id, uint32_t slot, uint64_t version):
        """Let ranks mark a slot that they have cached under this version.

        With several hosts, that happens with the next announcement.
        """
        if self.agreement is not None:
            self.agreement.delegated.setdefault(set_id, {})[slot] = version
            return
        with nogil:
            pyhvd_ready_table_delegate(&self.c.setup.table, <uint32_t>set_id, slot, version)

    def delegate_turns(self, int set_id, uint64_t bits, uint64_t version):
        """Let the ranks of a set, which list ``version`` made, mark these turn slots; as :meth:`delegate`."""
        if self.agreement is not None:
            for turn in range(TURNS):
                if bits >> turn & 1:
                    self.delegate(set_id, self.slots + turn, version)
            return
        with nogil:
            pyhvd_ready_table_delegate_turns(&self.c.setup.table, <uint32_t>set_id, bits, version)

    def recall_turns(self, int set_id, uint64_t bits):
        """Take turn slots back; the ranks that had marked them submit their calls by message.

        With several hosts, that happens with the next announcement.
        """
        if self.agreement is not None:
            self.recall(set_id, <object>bits << self.slots)
            return
        with nogil:
            pyhvd_ready_table_recall_turns(&self.c.setup.table, <uint32_t>set_id, bits)

    def recall(self, int set_id, bits):
        """Take slots (a bit vector) back; return, by rank, which of them were marked.

        With several hosts, that happens with the next announcement; the ranks that had marked them submit
        their tensors again, by message.
        """
        if self.agreement is not None:
            every = int.from_bytes(b"\xff" * (8 * self.c.setup.table.words), "little")
            self.agreement.note_recall(set_id, bits & every)
            return {}
        cdef bytes wanted = bits.to_bytes(self.c.setup.table.words * 8, "little")
        cdef bytearray marked = bytearray(self.c.setup.table.words * 8 * self.c.setup.table.size)
        cdef const char* which = wanted
        cdef char* raw = marked
        with nogil:
            pyhvd_ready_table_recall(
                &self.c.setup.table, <uint32_t>set_id, <const uint64_t*>which, <uint64_t*>raw
            )
        return self._by_rank(marked)

    def look(self, int set_id):
        """Return all marks, by rank, and the slots that were used since the last look."""
        cdef bytearray marked = bytearray(self.c.setup.table.words * 8 * self.c.setup.table.size)
        cdef bytearray used = bytearray(self.c.setup.table.words * 8)
        cdef char* raw = marked
        cdef char* raw_used = used
        with nogil:
            pyhvd_ready_table_read(&self.c.setup.table, <uint32_t>set_id, <uint64_t*>raw, <uint64_t*>raw_used)
        by_rank = self._by_rank(marked)
        if self.agreement is not None:
            by_rank.update(self.agreement.look(&self.c.setup.table, set_id))
        return by_rank, int.from_bytes(used, "little")

    @property
    def partial(self):
        """Whether ``look`` knows the marks of other hosts only where all their ranks have marked a slot."""
        return self.agreement is not None

    def announce(self, uint64_t number, audience):
        """Append a response list to the ready log; return False if that is not possible now.

        ``audience`` are the ranks that it concerns, as a bit vector. With several hosts, ``number`` 0
        announces only what was recalled and delegated.
        """
        cdef pyhvd_ranks concerned
        if self.agreement is not None:
            return self.agreement.announce(&self.c.setup.table, number, audience)
        if not number:
            return True
        cdef bytes ranks = audience.to_bytes(sizeof(concerned), "little")
        memcpy(&concerned, <const char*>ranks, sizeof(concerned))
        cdef int written
        with nogil:
            written = pyhvd_fast_path_announce(&self.c, number, &concerned)
        return written != 0

    def position(self):
        """Return this rank's position in the ready log. From any thread."""
        return pyhvd_ready_table_position(&self.c.setup.table)

    def freeze(self, int set_id, uint32_t slot):
        """Let no rank mark a slot until the coordinator has recalled it."""
        with nogil:
            pyhvd_ready_table_freeze(&self.c.setup.table, <uint32_t>set_id, slot)

    # -- counters --------------------------------------------------------------------------------------

    @property
    def timed(self):
        """Whether negotiation, execution and waits are timed; may change at any time."""
        return self.c.counters.timed != 0

    @timed.setter
    def timed(self, bint value):
        self.c.counters.timed = value

    def counts(self):
        """Return this rank's histograms by name: the buckets' counts, and the sum of the values."""
        return {
            "response_tensors": read_histogram(&self.c.counters.tensors),
            "response_bytes": read_histogram(&self.c.counters.bytes),
            "negotiation": read_histogram(&self.c.counters.negotiation),
            "execution": read_histogram(&self.c.counters.execution),
            "wait": read_histogram(&self.c.counters.waits),
        }

    def verb_counts(self):
        """Return (tensors, bytes) of each verb that was carried out here, by its code."""
        cdef int k
        cdef pyhvd_counters* counters = &self.c.counters
        every = {k: (counters.verb_tensors[k], counters.verb_bytes[k]) for k in range(PYHVD_VERBS)}
        return {code: counts for code, counts in every.items() if counts[0]}

    def host_counts(self):
        """Return, by host, (bytes sent, bytes received, tensors announced last, ns awaited); [] on one host.

        The bytes are those of the agreement connection; all ranks of this host share the counts. The own host
        was last where no other was awaited. From any thread.
        """
        cdef pyhvd_peer_host* peers
        cdef uint32_t k
        if self.agreement is None:
            return []
        peers = self.agreement.c.shared.peers
        return [
            (peers[k].sent, peers[k].counters.received, peers[k].counters.late, peers[k].counters.awaited)
            for k in range(self.agreement.c.tree.hosts)
        ]

    def lateness(self):
        """Return, for each rank, how many tensors it marked last, and how long (ns) the others waited.

        Of another host it is known only if the host has one rank, and not in a tree of hosts.
        """
        cdef pyhvd_rank_state* states = self.c.setup.table.shared.rank_states
        cdef int number
        late = [(0, 0)] * (self.c.setup.table.size if self.agreement is None else len(self.agreement.places))
        for number, rank in enumerate(self.ranks):
            late[rank] = states[number].late, states[number].awaited
        for host, (_, _, tensors, waited) in enumerate(self.host_counts()):
            if self.agreement.tells_last_rank(host):
                late[self.agreement.hosts[host][0]] = tensors, waited
        return late

    def _by_rank(self, bytearray marked):
        step = self.c.setup.table.words * 8
        by_rank = {}
        for rank in range(self.c.setup.table.size):
            bits = int.from_bytes(marked[rank * step : (rank + 1) * step], "little")
            if bits:
                by_rank[self.ranks[rank]] = bits
        return by_rank

    def tune(self, size_t threshold, double cycle):
        """Set the most bytes of a batch and the longest hold (s); while entered, or before any use."""
        self.c.progress.threshold = threshold
        self.c.background.cycle_ns = <int64_t>(min(cycle, 1e9) * 1e9)

    def measure(self, Sampler sampler):
        """Let a sampler count the batches; call it before any submission."""
        self.sampler = sampler
        self.c.setup.sampler = &sampler.c

    def call(self, int rank, uint32_t reasons=PYHVD_WAKE_WORK):
        """Wake a rank's background thread, for work in Python. From any thread."""
        cdef int host, number
        if rank in self.local:
            number = self.local[rank]
            pyhvd_ready_table_wake(&self.c.setup.table, number, reasons)
            return
        host, number = self.agreement.places[rank]
        with nogil:
            pyhvd_agreement_ring(&self.c.setup.table, <uint32_t>host, <uint32_t>number)

    # -- other hosts -----------------------------------------------------------------------------------

    def lost(self):
        """Return (host, the host that found it so, errno or 0, note) of a lost or failed host; or None."""
        return None if self.agreement is None else self.agreement.lost()

    def await_lost(self, double seconds):
        """Wait, at most some seconds, until a host is lost or has sent a note; return it as :meth:`lost`."""
        if self.agreement is not None:
            with nogil:
                pyhvd_agreement_await_lost(&self.c.setup.table, <int64_t>(seconds * 1e9))
        return self.lost()

    def watch(self, Exchange exchange):
        """Let an exchange end when a host is lost."""
        exchange.c.lost_host = <const void*>&self.agreement.c.shared.lost

    def wake_by(self, int messages):
        """Also wake the background thread when this descriptor is readable; before that thread starts."""
        self.agreement.c.messages = messages

    def start_beats(self):
        """Send beats to the other hosts, and look for silent ones; all ranks use the table already.

        Raises
        ------
        RuntimeError
            There can be no further thread.
        """
        if self.agreement is not None and not pyhvd_agreement_start_beats(&self.c.setup.table):
            raise RuntimeError("cannot start a thread")

    def tell_hosts(self, bytes note):
        """Send a note to all hosts: this rank fails."""
        cdef const uint8_t* start = <const uint8_t*><const char*>note
        cdef size_t length = <size_t>len(note)
        if self.agreement is not None:
            with nogil:
                pyhvd_agreement_abort(&self.c.setup.table, start, length)

    def leave_hosts(self):
        """Send no more beats; as the last local rank, tell all hosts that this one closes its connections."""
        if self.agreement is not None:
            with nogil:
                pyhvd_agreement_stop_beats(&self.c.setup.table)
                pyhvd_agreement_leave(&self.c.setup.table)

    def has_long_waits(self):
        """Return whether a thread has waited for some 0.1 s and still does. From any thread."""
        return pyhvd_fast_path_long_waits(&self.c) != 0

    def is_running(self):
        """Return whether a batch is being carried out. From any thread."""
        return pyhvd_fast_path_is_running(&self.c) != 0
