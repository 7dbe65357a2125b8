# Mapping, Trace and Window: what ranks of a node share; a part of shared_memory.pyx.

cdef extern from "stdlib.h" nogil:
    void* aligned_alloc(size_t alignment, size_t size)


cdef extern from "sys/mman.h" nogil:
    int munmap(void* address, size_t length)
    int madvise(void* address, size_t length, int advice)


cdef extern from "common/huge_pages.h" nogil:
    size_t PYHVD_HUGE
    void* pyhvd_map(int fd, size_t nbytes)
    int PYHVD_COLLAPSE
    int PYHVD_REMOVE

HUGE = PYHVD_HUGE
CHUNK_UNIT = 128


def area_bytes(Py_ssize_t capacity, int slots=SLOTS):
    """Return the bytes of one rank's area in a window with ``slots`` slots of ``capacity`` bytes."""
    return pyhvd_window_area(<size_t>capacity, slots)


cdef class Mapping:
    """Map a file that processes share, for as long as the object lives.

    Parameters
    ----------
    fd : int
        The file; it may be closed afterwards.
    nbytes : int
        The length, a multiple of the page size.

    Attributes
    ----------
    start : int
        The address, a multiple of HUGE (bytes of a huge page).

    Raises
    ------
    OSError
        The file cannot be mapped.
    """

    cdef void* memory
    cdef size_t nbytes

    def __cinit__(self, int fd, size_t nbytes):
        self.memory = pyhvd_map(fd, nbytes)
        self.nbytes = nbytes
        if self.memory == NULL:
            PyErr_SetFromErrno(OSError)

    def __dealloc__(self):
        if self.memory != NULL:
            munmap(self.memory, self.nbytes)

    @property
    def start(self):
        return <uintptr_t>self.memory

    def enlarge(self, size_t offset, size_t nbytes):
        """Turn existing memory into huge pages, if the kernel does."""
        with nogil:
            madvise(<uint8_t*>self.memory + offset, nbytes, PYHVD_COLLAPSE)

    def drop(self, size_t offset, size_t nbytes):
        """Free memory in all processes that map the file, if the system can."""
        with nogil:
            madvise(<uint8_t*>self.memory + offset, nbytes, PYHVD_REMOVE)


cdef class Trace:
    """Records of what one rank's C code does, while recording is on; see ``trace_ring.h``.

    One thread at a time may call :meth:`start`, :meth:`stop` and :meth:`take`.
    """

    def __cinit__(self):
        # It must begin at a cache line, and Python's memory is not aligned to those.
        self.ring = <pyhvd_trace*>aligned_alloc(128, (sizeof(pyhvd_trace) + 127) // 128 * 128)
        if self.ring == NULL:
            raise MemoryError
        memset(self.ring, 0, sizeof(pyhvd_trace))

    def __dealloc__(self):
        if self.ring != NULL:
            pyhvd_trace_free(self.ring)
            free(self.ring)

    def start(self, uint64_t cells):
        """Start recording into a ring of ``cells`` records (a power of two); the first call sets the size."""
        if not cells or cells & (cells - 1):
            raise ValueError(f"the number of cells must be a power of two, not {cells}")
        if not pyhvd_trace_start(self.ring, cells):
            raise MemoryError

    def stop(self):
        """Stop recording; earlier records can still be taken."""
        pyhvd_trace_stop(self.ring)

    def take(self, Py_ssize_t limit):
        """Return the oldest records, at most ``limit``, as (kind, begin, end, number, set, slot, rank).

        Times are ns of CLOCK_MONOTONIC; kinds are this module's constants, explained in ``trace_ring.h``.
        """
        cdef pyhvd_event event
        cdef list taken = []
        while len(taken) < limit and pyhvd_trace_take(self.ring, &event):
            what = (event.kind, event.begin, event.end, event.number, event.set, event.slot, event.rank)
            taken.append(what)
        return taken

    @property
    def dropped(self):
        """How many records were dropped because the ring was full."""
        return pyhvd_trace_dropped(self.ring)


cdef class MpiCarrier:
    """MPI as a carrier of links; see ``links/mpi.h``.

    Parameters
    ----------
    functions : mapping of str to int
        The addresses of MPI_Isend, MPI_Issend, MPI_Irecv, MPI_Improbe, MPI_Imrecv and MPI_Test.
    communicator, byte, no_request : int
        Handles: a communicator of the links' own, which returns errors; MPI_BYTE; MPI_REQUEST_NULL.
    """

    cdef pyhvd_mpi c

    def __cinit__(self, functions, uint64_t communicator, uint64_t byte, uint64_t no_request):
        self.c.isend = <void*><uintptr_t>functions["MPI_Isend"]
        self.c.issend = <void*><uintptr_t>functions["MPI_Issend"]
        self.c.irecv = <void*><uintptr_t>functions["MPI_Irecv"]
        self.c.improbe = <void*><uintptr_t>functions["MPI_Improbe"]
        self.c.imrecv = <void*><uintptr_t>functions["MPI_Imrecv"]
        self.c.test = <void*><uintptr_t>functions["MPI_Test"]
        self.c.communicator, self.c.byte = <int64_t>communicator, <int64_t>byte
        self.c.no_request = <int64_t>no_request


cdef class RailCounters:
    """What one rank counts of each of ``hosts`` hosts, over the exchanges of all its process sets."""

    def __cinit__(self, int hosts):
        self.hosts = hosts
        self.c = <pyhvd_rail_counters*>PyMem_Calloc(hosts, sizeof(pyhvd_rail_counters))
        if self.c == NULL:
            raise MemoryError

    def __dealloc__(self):
        PyMem_Free(self.c)

    def read(self):
        """Return, by host, (bytes sent, bytes received, how often it was last, ns slept for it).

        The own host was last where no other was awaited. From any thread.
        """
        # The words are atomic in C, so each access here is atomic.
        return [
            (self.c[k].sent, self.c[k].received, self.c[k].last, self.c[k].slept) for k in range(self.hosts)
        ]


cdef class Exchange:
    """One rank's end of a process set's exchange between hosts, for its :class:`Window`.

    Parameters
    ----------
    host, hosts : int
        This rank's host, and how many hosts the set has.
    rank, ranks : int
        This rank among the ranks of its host, and how many there are.
    slices : int
        How many ranks the host with the most ranks has.
    rails : sequence of sequence of int
        For each slice that this rank owns, by host, the descriptor of a connected, non-blocking socket to the
        slice's owner there; -1 for the own host. The caller closes them after the last use.
    bells : sequence of int
        By local rank, a descriptor of an eventfd or a pipe: a write wakes the rank.

    Raises
    ------
    ValueError
        Too many hosts, or not one rail for each slice that the rank owns.
    """

    def __cinit__(self, int host, int hosts, int rank, int ranks, int slices, rails, bells):
        if not 0 <= host < hosts <= MAX_HOSTS or hosts < 2:
            raise ValueError(f"an exchange has 2 to {MAX_HOSTS} hosts, not {hosts}")
        self.c.host = host
        self.c.hosts = hosts
        self.c.slices = slices
        self.c.first = pyhvd_first_slice(&self.c, rank, ranks)
        self.c.owned = pyhvd_first_slice(&self.c, rank + 1, ranks) - self.c.first
        if len(rails) != self.c.owned or len(bells) != ranks:
            owns = f"owns {self.c.owned} of {slices} slices"
            raise ValueError(f"rank {rank} of {ranks} {owns}, not {len(rails)}")
        self.rails = [list(each) for each in rails]
        for k, bell in enumerate(bells):
            self.c.bells[<int>k] = bell

    def __dealloc__(self):
        pyhvd_exchange_free(&self.c)

    cdef int open(self, size_t capacity) except -1:
        """Allocate the memory for chunks of ``capacity`` bytes, and begin to use the connections."""
        if not pyhvd_exchange_init(&self.c, capacity):
            raise MemoryError
        for own, rails in enumerate(self.rails):
            for host, fd in enumerate(rails):
                pyhvd_link_open(&self.c.links[<int>own * self.c.hosts + <int>host], fd)
        return 0

    def carry_by(self, MpiCarrier carrier, peers):
        """Change the carrier of all links; while no rank is in an operation.

        Parameters
        ----------
        carrier : MpiCarrier or None
            None: the sockets.
        peers : sequence of sequence of int
            The rank of each rail's peer in the carrier's communicator; any number for the own host.
        """
        self.carrier = carrier
        self.c.mpi = NULL if carrier is None else &carrier.c
        for own, row in enumerate(peers):
            for host, peer in enumerate(row):
                pyhvd_link_carry(
                    &self.c.links[<int>own * self.c.hosts + <int>host],
                    self.c.mpi, peer, 2 * (self.c.first + <int>own)
                )

    def count_in(self, RailCounters counters, numbers):
        """Count host g in ``counters`` as host ``numbers[g]``; call it before the exchange is used."""
        if len(numbers) != self.c.hosts or not all(0 <= each < counters.hosts for each in numbers):
            raise ValueError(f"{numbers} do not number {self.c.hosts} of {counters.hosts} hosts")
        for g, number in enumerate(numbers):
            self.c.numbers[<int>g] = number
        self.counters = counters
        self.c.counters = counters.c

    @property
    def lost(self):
        """The host whose connection has failed, and the errno (0: its peer closed it); or None."""
        if not self.c.lost:
            return None
        return self.c.lost - 1, 0 if self.c.error == PYHVD_LINK_CLOSED else self.c.error

    @property
    def depth(self):
        """How many chunks this rank has in flight at most, by the rate of the last large operations."""
        return self.c.depth

    @depth.setter
    def depth(self, int chunks):
        if not 2 <= chunks <= ACROSS_SLOTS:
            raise ValueError(f"an exchange has 2 to {ACROSS_SLOTS} chunks in flight, not {chunks}")
        self.c.depth = chunks


cdef int check_lane_numbers(const int64_t[::1] numbers, int hosts, int lanes) except -1:
    """Raise ValueError unless there is a lane's number, or -1, for each host."""
    if numbers.shape[0] != hosts:
        raise ValueError(f"expected {hosts} lane numbers, one per host")
    for k in range(hosts):
        if not -1 <= numbers[k] < lanes:
            raise ValueError(f"there is no lane {numbers[k]}, but {lanes} lanes")
    return 0


cdef Py_ssize_t check_parts(const int64_t[:, ::1] parts, const int64_t[::1] lanes) except -1:
    """Return the number of parts; raise ValueError unless they are sorted, not empty, and within lanes."""
    cdef Py_ssize_t k
    cdef int64_t lane, offset, length, last_lane = 0, last_offset = -1
    if parts.shape[1] != 4:
        raise ValueError("a part has a lane, an offset, a number of bytes and an address")
    for k in range(parts.shape[0]):
        lane, offset, length = parts[k, 0], parts[k, 1], parts[k, 2]
        if not 0 <= lane < lanes.shape[0] or offset < 0 or length <= 0 or offset + length > lanes[lane]:
            raise ValueError(f"part {k} is not within a lane: lane {lane}, {length} bytes from byte {offset}")
        if lane < last_lane or (lane == last_lane and offset <= last_offset):
            raise ValueError(f"part {k} is not behind the one before")
        last_lane, last_offset = lane, offset
    return parts.shape[0]


cdef int check_whole(
    const int64_t[:, ::1] parts, const int64_t[::1] lanes, uint8_t* marks, int mark
) except -1:
    """Mark the lanes of parts; raise ValueError unless each part is a whole lane."""
    for k in range(parts.shape[0]):
        if parts[k, 1] or parts[k, 2] != lanes[parts[k, 0]]:
            raise ValueError(f"part {k} of a direct move is not all of lane {parts[k, 0]}")
        marks[parts[k, 0]] |= mark
    return 0


cdef int check_direct(
    const int64_t[:, ::1] sources,
    const int64_t[:, ::1] targets,
    const int64_t[::1] lanes,
    const int64_t[::1] out,
    const int64_t[::1] into,
) except -1:
    """Raise ValueError unless each lane that leaves or comes is one part, so that nothing lies in slots."""
    cdef uint8_t marks[1024]  # FLAT // 16; by lane: 1: has a source, 2: has a target, 4: leaves
    cdef Py_ssize_t k
    memset(marks, 0, sizeof(marks))
    check_whole(sources, lanes, marks, 1)
    check_whole(targets, lanes, marks, 2)
    for k in range(out.shape[0]):
        if out[k] >= 0:
            marks[out[k]] |= 4
    for k in range(lanes.shape[0]):
        if lanes[k] and marks[k] & 4 and not marks[k] & 1:
            raise ValueError(f"lane {k} of a direct move has no source")
    for k in range(into.shape[0]):
        if into[k] >= 0 and lanes[into[k]] and not marks[into[k]] & 6:
            raise ValueError(f"lane {into[k]} of a direct move has no target")
    return 0


cdef int describe_move(pyhvd_move* move, made, int hosts) except -1:
    """Set the fields of a move from a :class:`pyhvd.transport.moves.Move`, which must outlive it."""
    cdef const int64_t[:, ::1] sources = made.sources
    cdef const int64_t[:, ::1] targets = made.targets
    cdef const int64_t[::1] lanes = made.lanes
    cdef const int64_t[::1] out = made.out
    cdef const int64_t[::1] into = made.into
    move.lanes = <int>lanes.shape[0]
    move.single, move.relays, move.direct = made.single, made.relays, made.direct
    move.owned, move.longest = made.owned, made.longest
    if not move.lanes or move.owned <= 0 or move.lanes * move.owned * 16 > FLAT:
        raise ValueError(f"{move.lanes} lanes do not suit a rank with {move.owned} slices")
    check_lane_numbers(out, hosts, move.lanes)
    check_lane_numbers(into, hosts, move.lanes)
    move.source_count = check_parts(sources, lanes)
    move.target_count = check_parts(targets, lanes)
    if move.direct:
        check_direct(sources, targets, lanes, out, into)
    move.sources = <const pyhvd_part*>&sources[0, 0]
    move.targets = <const pyhvd_part*>&targets[0, 0]
    move.lane_bytes = &lanes[0]
    move.out = &out[0]
    move.into = &into[0]
    return 0


cdef int describe_portions(pyhvd_portions* portions, made) except -1:
    """Set the fields from a :class:`pyhvd.transport.moves.Portions`, which must outlive them."""
    cdef const int64_t[::1] starts = made.starts
    cdef const int64_t[::1] by_slice
    portions.starts = &starts[0]
    portions.own, portions.longest = made.own, made.longest
    portions.by_slice = NULL
    if made.by_slice is not None:
        by_slice = made.by_slice
        portions.by_slice = &by_slice[0]
    return 0


cdef class Window:
    """One rank's end of a shared window.

    Parameters
    ----------
    rank : int
        This rank among the ranks of the window.
    areas : sequence of int
        Address of each rank's area, as this process sees it; 128-byte aligned, :func:`area_bytes` long.
    chunk : int
        Bytes of a chunk; a multiple of 128.
    capacity : int, optional
        Bytes of a slot: the largest chunk that :meth:`resize` may set. Default: ``chunk``.
    exchange : Exchange, optional
        With the set's other hosts; the areas then have ACROSS_SLOTS slots.

    Raises
    ------
    ValueError
        Too many ranks, a wrong chunk size, or an unaligned area.
    """

    def __cinit__(self, int rank, areas, Py_ssize_t chunk, capacity=None, Exchange exchange=None):
        if not 0 <= rank < len(areas) <= MAX_LOCAL:
            raise ValueError(f"a window has at most {MAX_LOCAL} ranks")
        cdef Py_ssize_t room = chunk if capacity is None else capacity
        if room < chunk or room % CHUNK_UNIT:
            raise ValueError(f"a slot of {room} bytes does not suit chunks of {chunk}")
        self.token = int.from_bytes(os.urandom(8), "little")
        self.window.rank = rank
        self.window.size = <int>len(areas)
        self.window.capacity = <size_t>room
        self.window.slots = SLOTS
        if exchange is not None:
            exchange.open(<size_t>room)
            self.exchange = exchange
            self.window.slots = ACROSS_SLOTS
            self.window.exchange = &exchange.c
        self.resize(chunk)
        for q, address in enumerate(areas):
            if address % 128:
                raise ValueError(f"area {q} is not aligned to 128 bytes")
            self.window.area[<int>q] = <uint8_t*><uintptr_t>address

    def resize(self, Py_ssize_t chunk):
        """Set the bytes of a chunk; between the same two operations on every rank."""
        if chunk < FLAT or chunk % CHUNK_UNIT or <size_t>chunk > self.window.capacity:
            raise ValueError(
                f"a chunk is a multiple of {CHUNK_UNIT} bytes, and {FLAT} at least,"
                f" {self.window.capacity} at most here, not {chunk}"
            )
        self.window.chunk = <size_t>chunk

    def own_memory(self):
        """Return (process id, address, value): what a peer that can read this memory finds."""
        return os.getpid(), <uintptr_t>&self.token, self.token

    def can_read(self, int pid, uint64_t place, uint64_t value):
        """Return whether this process can read a peer's memory, which has told its :meth:`own_memory`."""
        return pyhvd_window_can_read(pid, place, value) != 0

    def read_peers(self, pids):
        """Let moves read the memory of the ranks' processes; on all ranks, before any uses the window."""
        for q, pid in enumerate(pids):
            self.window.pids[<int>q] = pid
        self.window.reads_peers = 1

    @property
    def chunk(self):
        """Bytes of a chunk."""
        return self.window.chunk

    def attach(self, Trace trace):
        """Record this rank's stages in a trace; call it before the window is used."""
        self.trace = trace
        self.window.trace = trace.ring

    def clear(self):
        """Zero this rank's area, which allocates its pages; before any rank uses the window."""
        with nogil:
            pyhvd_window_clear(&self.window)

    def allreduce(
        self, const int64_t[::1] srcs, const int64_t[::1] dsts, const int64_t[::1] starts, int dtype, int op,
        double prescale, double postscale, portions=None
    ):
        """Reduce tensors in rank order; every rank gets the result, or its portion.

        Parameters
        ----------
        srcs, dsts : int64 arrays of n addresses
            A source of 0 contributes the neutral element; a target of 0 drops the result. May be equal.
        starts : int64 array of n + 1
            Prefix sums of the element counts; the same on every rank.
        dtype, op : int
            Codes; checked by the caller.
        prescale, postscale : float
            Factors before and after.
        portions : Portions, optional
            Of one tensor: which elements each rank gets. Over several hosts a chunk needs room for 16 bytes
            of each slice for each host.

        Returns
        -------
        bool
            False if the window was aborted, or the connection to another host failed (:attr:`Exchange.lost`).
        """
        cdef pyhvd_job job
        cdef pyhvd_portions parts
        cdef int status
        if srcs.shape[0] != dsts.shape[0] or starts.shape[0] != srcs.shape[0] + 1:
            raise ValueError("the lengths of srcs, dsts and starts must be n, n and n + 1")
        if not srcs.shape[0] or starts[srcs.shape[0]] == 0:
            return True
        job.srcs = &srcs[0]
        job.dsts = &dsts[0]
        job.starts = &starts[0]
        job.n = <size_t>srcs.shape[0]
        job.dtype = dtype
        job.op = op
        job.prescale = prescale
        job.postscale = postscale
        job.direct = 0
        job.portions = NULL
        if portions is not None:
            describe_portions(&parts, portions)
            job.portions = &parts
        with nogil:
            status = pyhvd_window_allreduce(&self.window, &job)
        return status == 0

    def gather(self, uintptr_t send, uintptr_t recv, const int64_t[::1] counts):
        """Gather contiguous blocks: every rank gets rank q's ``counts[q]`` bytes."""
        cdef int status
        if counts.shape[0] != self.window.size:
            raise ValueError(f"expected {self.window.size} counts, one per rank")
        with nogil:
            status = pyhvd_window_gather(&self.window, <const uint8_t*>send, <uint8_t*>recv, &counts[0])
        return status == 0

    def alltoall(
        self, uintptr_t send, const int64_t[::1] send_counts, uintptr_t recv, const int64_t[::1] recv_counts
    ):
        """Send a block to each rank; blocks are contiguous, counts are bytes."""
        cdef int status
        if send_counts.shape[0] != self.window.size or recv_counts.shape[0] != self.window.size:
            raise ValueError(f"expected {self.window.size} counts, one per rank")
        with nogil:
            status = pyhvd_window_alltoall(
                &self.window, <const uint8_t*>send, &send_counts[0], <uint8_t*>recv, &recv_counts[0]
            )
        return status == 0

    def pairwise_exchange(
        self, int partner, uintptr_t send, int64_t send_count, uintptr_t recv, int64_t recv_count
    ):
        """Exchange bytes with a partner; all ranks call it, in pairs."""
        cdef int status
        if not 0 <= partner < self.window.size or partner == self.window.rank:
            raise ValueError(f"{partner} is no partner of rank {self.window.rank} of {self.window.size}")
        with nogil:
            status = pyhvd_window_exchange(
                &self.window, partner, <const uint8_t*>send, send_count, <uint8_t*>recv, recv_count
            )
        return status == 0

    def move(self, made, int64_t source, int64_t target):
        """Move bytes between the ranks of several hosts; ``move_across.c`` explains it.

        Parameters
        ----------
        made : Move
            See :class:`pyhvd.transport.moves.Move`.
        source, target : int
            Addresses from which its parts count.

        Returns
        -------
        bool
            As :meth:`allreduce` does.
        """
        cdef pyhvd_move move
        cdef int status
        if self.exchange is None:
            raise ValueError("the window has no exchange with other hosts")
        describe_move(&move, made, self.exchange.c.hosts)
        with nogil:
            status = pyhvd_window_move(&self.window, &move, source, target)
        return status == 0

    def barrier(self):
        """Return when every rank has called it; False if the window was aborted."""
        cdef int status
        with nogil:
            status = pyhvd_window_barrier(&self.window)
        return status == 0

    def abort(self, bytes note):
        """Let no rank wait any longer. From any thread, but not from two at a time.

        Parameters
        ----------
        note : bytes
            The other ranks can read it; NOTE bytes at most. Only the first note of a rank is kept.
        """
        if len(note) > NOTE:
            raise ValueError(f"a note has {NOTE} bytes at most, not {len(note)}")
        pyhvd_window_abort(&self.window, <const uint8_t*><const char*>note, <size_t>len(note))

    def note(self):
        """Return the note of the rank that aborted the window, or None."""
        cdef size_t length = 0
        cdef const uint8_t* start = pyhvd_window_note(&self.window, &length)
        return None if start == NULL else (<const char*>start)[:length]
