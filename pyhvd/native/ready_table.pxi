# One rank's end of the board, and what the coordinator does with it; a part of shared_memory.pyx.

cdef tuple read_histogram(const pyhvd_histogram* histogram):
    # The words are atomic in C, and so is each access here.
    return [histogram.buckets[k] for k in range(PYHVD_BUCKETS)], histogram.sum


cdef class BoardEnd:
    """One rank's end of the board, and what of its engine concerns no tensor."""

    cdef pyhvd_lane c
    cdef Sampler sampler
    cdef object memory
    cdef Trace trace

    def record_in(self, Trace trace):
        """Say where this rank records what happens on the lane; before anybody submits."""
        self.trace = trace
        self.c.trace = trace.ring

    @property
    def slots(self):
        """Cache slots per process set that can be lent."""
        return self.c.board.slots

    def serves(self, int set_id):
        """Return whether there is room for a process set of this id."""
        return set_id < PYHVD_BOARD_SETS

    def seize(self):
        """Take the board's lock for good, as a rank does that is stopped at the wrong moment. For tests."""
        with nogil:
            pyhvd_board_lock(&self.c.board, 1_000_000_000)

    def clear(self):
        """Zero the board; on one rank, before any uses it."""
        pyhvd_board_clear(&self.c.board)

    def open_ready_set(self, int set_id, ranks):
        """Let the members of a process set agree here."""
        cdef uint32_t members[256]
        for k, rank in enumerate(ranks):
            members[k] = rank
        cdef uint32_t count = <uint32_t>len(ranks)
        with nogil:
            pyhvd_board_open(&self.c.board, <uint32_t>set_id, members, count)

    def delegate(self, int set_id, uint32_t slot, uint64_t since):
        """Let ranks post a slot that means to them what response list ``since`` said."""
        with nogil:
            pyhvd_board_lend(&self.c.board, <uint32_t>set_id, slot, since)

    def recall(self, int set_id, bits):
        """Take slots (a bit vector) back; return, by rank, which of them were posted."""
        cdef bytes wanted = bits.to_bytes(self.c.board.words * 8, "little")
        cdef bytearray posted = bytearray(self.c.board.words * 8 * self.c.board.size)
        cdef const char* which = wanted
        cdef char* raw = posted
        with nogil:
            pyhvd_board_recall(&self.c.board, <uint32_t>set_id, <const uint64_t*>which, <uint64_t*>raw)
        return self._by_rank(posted)

    def look(self, int set_id):
        """Return, by rank, what is posted; and the slots that were used since the last look."""
        cdef bytearray posted = bytearray(self.c.board.words * 8 * self.c.board.size)
        cdef bytearray used = bytearray(self.c.board.words * 8)
        cdef char* raw = posted
        cdef char* raw_used = used
        with nogil:
            pyhvd_board_look(&self.c.board, <uint32_t>set_id, <uint64_t*>raw, <uint64_t*>raw_used)
        return self._by_rank(posted), int.from_bytes(used, "little")

    def announce(self, uint64_t number, ranks):
        """Put a response list into the log; False if that cannot be done just now."""
        cdef pyhvd_ranks audience
        audience.ranks[:] = [0, 0, 0, 0]
        for rank in ranks:
            audience.ranks[<int>rank // 64] |= <uint64_t>1 << (<int>rank % 64)
        cdef int written
        with nogil:
            written = pyhvd_lane_announce(&self.c, number, &audience)
        return written != 0

    def position(self):
        """Return how far this rank has come in what the ranks agree on here. From any thread."""
        return pyhvd_board_position(&self.c.board)

    def freeze(self, int set_id, uint32_t slot):
        """Let nobody post a slot, until the coordinator has heard what this rank has to say of it."""
        with nogil:
            pyhvd_board_freeze(&self.c.board, <uint32_t>set_id, slot)

    # -- what has been counted -----------------------------------------------------------------------

    @property
    def timed(self):
        """Whether negotiation, execution and waits are timed; may be changed at any time."""
        return self.c.tally.timed != 0

    @timed.setter
    def timed(self, bint value):
        self.c.tally.timed = value

    def counts(self):
        """Return this rank's histograms by name: the counts of the buckets, and the sum of the values."""
        return {
            "response_tensors": read_histogram(&self.c.tally.tensors),
            "response_bytes": read_histogram(&self.c.tally.bytes),
            "negotiation": read_histogram(&self.c.tally.negotiation),
            "execution": read_histogram(&self.c.tally.execution),
            "wait": read_histogram(&self.c.tally.waits),
        }

    def lateness(self):
        """Return, for each rank, tensors that it was the last to post, and the ns that others had waited."""
        return [
            (self.c.board.seats[rank].late, self.c.board.seats[rank].awaited)
            for rank in range(self.c.board.size)
        ]

    def _by_rank(self, bytearray posted):
        step = self.c.board.words * 8
        by_rank = {}
        for rank in range(self.c.board.size):
            bits = int.from_bytes(posted[rank * step : (rank + 1) * step], "little")
            if bits:
                by_rank[rank] = bits
        return by_rank

    def tune(self, size_t threshold, double cycle):
        """Change what rides together (bytes), and how long submissions gather (s); while entered."""
        self.c.threshold = threshold
        self.c.cycle = <int64_t>(min(cycle, 1e9) * 1e9)

    def measure(self, Sampler sampler):
        """Let a sampler count what the engine carries out. Before anything is submitted."""
        self.sampler = sampler
        self.c.sampler = &sampler.c

    def call(self, int rank, uint32_t reasons=PYHVD_CALL_WORK):
        """Let a rank's background thread come to Python. From any thread."""
        pyhvd_board_call(&self.c.board, rank, reasons)

    def is_running(self):
        """Return whether a batch is being carried out. From any thread."""
        return pyhvd_lane_is_running(&self.c) != 0
