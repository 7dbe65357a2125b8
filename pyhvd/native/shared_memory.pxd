"""The C of the shared-memory path, as :mod:`pyhvd.native.shared_memory` sees it."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t


cdef extern from "common/trace_ring.h" nogil:
    cpdef enum:
        SUBMITTED "PYHVD_SUBMITTED"
        MARKED_READY "PYHVD_MARKED_READY"
        READY "PYHVD_READY"
        CARRIED "PYHVD_CARRIED"
        PACKING "PYHVD_PACKING"
        REDUCING "PYHVD_REDUCING"
        UNPACKING "PYHVD_UNPACKING"
        AWAITING "PYHVD_AWAITING"
        EXCHANGING "PYHVD_EXCHANGING"

    ctypedef struct pyhvd_event:
        int64_t begin
        int64_t end
        uint64_t number
        uint32_t set
        uint32_t slot
        uint32_t kind
        uint32_t rank

    ctypedef struct pyhvd_trace:
        pass

    int pyhvd_trace_start(pyhvd_trace* trace, uint64_t cells)
    void pyhvd_trace_stop(pyhvd_trace* trace)
    void pyhvd_trace_free(pyhvd_trace* trace)
    int pyhvd_trace_take(pyhvd_trace* trace, pyhvd_event* out)
    uint64_t pyhvd_trace_dropped(const pyhvd_trace* trace)


cdef extern from "links/link.h" nogil:
    int PYHVD_LINK_CLOSED

    ctypedef struct pyhvd_link:
        pass

    void pyhvd_link_open(pyhvd_link* link, int fd)


cdef extern from "links/mpi.h" nogil:
    cpdef enum:
        MPI_MOST "PYHVD_MPI_MOST"

    ctypedef struct pyhvd_mpi:
        void* isend
        void* issend
        void* irecv
        void* improbe
        void* imrecv
        void* test
        int64_t communicator
        int64_t byte
        int64_t no_request

    void pyhvd_link_carry(pyhvd_link* link, const pyhvd_mpi* mpi, int peer, int tag)


cdef extern from "common/counters.h" nogil:
    ctypedef struct pyhvd_rail_counters:
        uint64_t sent
        uint64_t received
        uint64_t last
        uint64_t slept

    ctypedef struct pyhvd_host_counters:
        uint64_t received
        uint64_t late
        uint64_t awaited


cdef extern from "window/window.h" nogil:
    cpdef enum:
        MAX_LOCAL "PYHVD_MAX_LOCAL"
        FLAT "PYHVD_FLAT"
        NOTE "PYHVD_NOTE"
        SLOTS "PYHVD_SLOTS"
        ACROSS_SLOTS "PYHVD_ACROSS_SLOTS"

    ctypedef struct pyhvd_exchange:
        int host
        int hosts
        int slices
        int first
        int owned
        int lost
        int error
        const void* lost_host
        int depth
        pyhvd_link* links
        const pyhvd_mpi* mpi
        int* bells
        pyhvd_rail_counters* counters
        uint32_t* numbers

    ctypedef struct pyhvd_window:
        int rank
        int size
        size_t chunk
        size_t capacity
        int slots
        pyhvd_exchange* exchange
        pyhvd_trace* trace
        uint8_t* area[256]
        int reads_peers
        int32_t pids[256]
        uint8_t* arena[256]
        int64_t arena_bytes

    ctypedef struct pyhvd_portions:
        const int64_t* starts
        int64_t own
        int64_t longest
        const int64_t* by_slice

    ctypedef struct pyhvd_job:
        const int64_t* srcs
        const int64_t* dsts
        const int64_t* starts
        size_t n
        int dtype
        int op
        double prescale
        double postscale
        int direct
        const pyhvd_portions* portions

    ctypedef struct pyhvd_part:
        pass

    ctypedef struct pyhvd_local_move:
        const pyhvd_part* sources
        const pyhvd_part* targets
        size_t source_count
        size_t target_count
        int64_t own_from
        int64_t own_to
        int64_t own_bytes
        const int64_t* origins
        int64_t longest
        const int64_t* starts
        int64_t total

    ctypedef struct pyhvd_move:
        const pyhvd_part* sources
        const pyhvd_part* targets
        size_t source_count
        size_t target_count
        const int64_t* lane_bytes
        int lanes
        const int64_t* out
        const int64_t* into "in"
        int single
        int relays
        int direct
        int owned
        int64_t longest

    size_t pyhvd_window_area(size_t capacity, int slots)
    void pyhvd_window_clear(pyhvd_window* w)
    int pyhvd_window_allreduce(pyhvd_window* w, const pyhvd_job* job)
    int pyhvd_window_can_read(int32_t pid, uint64_t address, uint64_t value)
    int pyhvd_window_gather(pyhvd_window* w, const uint8_t* send, uint8_t* recv, const int64_t* counts)
    int pyhvd_window_alltoall(
        pyhvd_window* w, const uint8_t* send, const int64_t* send_counts, uint8_t* recv,
        const int64_t* recv_counts
    )
    int pyhvd_window_exchange(
        pyhvd_window* w, int partner, const uint8_t* send, int64_t send_count, uint8_t* recv,
        int64_t recv_count
    )
    int pyhvd_window_move(pyhvd_window* w, const pyhvd_move* move, int64_t source, int64_t target)
    int pyhvd_window_barrier(pyhvd_window* w)
    void pyhvd_window_abort(pyhvd_window* w, const uint8_t* note, size_t bytes)
    const uint8_t* pyhvd_window_note(const pyhvd_window* w, size_t* bytes)


cdef extern from "exchange/exchange.h" nogil:
    cpdef enum:
        MAX_HOSTS "PYHVD_MAX_HOSTS"

    int pyhvd_exchange_init(pyhvd_exchange* e, size_t capacity)
    void pyhvd_exchange_free(pyhvd_exchange* e)
    int pyhvd_first_slice(const pyhvd_exchange* e, int rank, int ranks)


cdef extern from "pthread.h" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_lock(pthread_mutex_t* mutex)
    int pthread_mutex_unlock(pthread_mutex_t* mutex)


cdef extern from "common/sampler.h" nogil:
    ctypedef struct pyhvd_sampler:
        uint64_t bytes
        int64_t began
        int64_t ended

    bint pyhvd_sampler_counts(const pyhvd_sampler* m)
    void pyhvd_sampler_start(pyhvd_sampler* m, uint32_t steps, uint64_t limit, int64_t least)
    bint pyhvd_sampler_count(pyhvd_sampler* m, uint64_t bytes, uint32_t seen)
    bint pyhvd_sampler_has_ended(const pyhvd_sampler* m)


cdef extern from "agreement/host_order.h" nogil:
    ctypedef struct pyhvd_host_order:
        pass

    ctypedef struct pyhvd_order_entry:
        uint32_t kind
        uint32_t set
        uint32_t first
        uint32_t end
        uint64_t* words
        uint64_t number

    enum:
        ORDER_RANGES "PYHVD_ORDER_RANGES"
        PYHVD_ANNOUNCED
        PYHVD_RECALLED
        PYHVD_DELEGATED

    ctypedef struct pyhvd_slot_range:
        uint32_t kind
        uint32_t set
        uint32_t first
        uint32_t end
        const uint64_t* words
        const uint64_t* values
        uint64_t n
        const uint64_t* digests

    ctypedef struct pyhvd_order_list:
        uint64_t number
        const uint8_t* audience
        uint32_t audience_bytes
        uint32_t n
        const pyhvd_slot_range* ranges

    int64_t pyhvd_host_order_owed(pyhvd_host_order* o, uint64_t* out, size_t room)
    int pyhvd_host_order_next_range(
        const pyhvd_host_order* o, pyhvd_order_entry* entry, pyhvd_slot_range* found
    )


cdef extern from "agreement/host_tree.h" nogil:
    ctypedef struct pyhvd_host_tree:
        uint32_t host
        uint32_t hosts
        uint32_t tops
        uint32_t n
        uint32_t above
        uint32_t* neighbours
        pyhvd_host_order* order

    int pyhvd_host_tree_init(
        pyhvd_host_tree* tree, uint32_t host, uint32_t hosts, const int32_t* parents
    )
    size_t pyhvd_host_tree_bytes(const pyhvd_host_tree* tree, uint32_t sets, uint32_t slots)
    void pyhvd_host_tree_attach(pyhvd_host_tree* tree, void* base, uint32_t sets, uint32_t slots)
    void pyhvd_host_tree_clear(pyhvd_host_tree* tree, uint32_t sets, uint32_t slots)
    int64_t pyhvd_host_tree_announce(
        pyhvd_host_tree* tree, const pyhvd_slot_range* slots, const pyhvd_order_list* announced,
        uint64_t* out, size_t room
    )
    int pyhvd_host_tree_receive(
        pyhvd_host_tree* tree, uint32_t source, const uint64_t* message, size_t n
    )
    int pyhvd_host_tree_take(pyhvd_host_tree* tree, pyhvd_order_entry* entry)
    int64_t pyhvd_host_tree_pass(
        pyhvd_host_tree* tree, uint32_t child, const pyhvd_order_entry* entry, uint64_t* out, size_t room
    )


cdef extern from "agreement/agreement.h" nogil:
    int PYHVD_CLOSED_BY_PEER

    ctypedef struct pyhvd_peer_host:
        uint64_t sent
        pyhvd_host_counters counters

    ctypedef struct pyhvd_shared_agreement:
        uint32_t lost
        uint32_t finder
        int error
        uint32_t note_bytes
        uint8_t* note
        pyhvd_peer_host* peers

    ctypedef struct pyhvd_agreement:
        pyhvd_host_tree tree
        int* fds
        int* progress_bells
        int* background_bells
        int messages
        uint32_t* ranks
        pyhvd_shared_agreement* shared

    size_t pyhvd_agreement_bytes(const pyhvd_agreement* a, uint32_t slots)
    void pyhvd_agreement_attach(pyhvd_agreement* a, void* base, uint32_t slots)
    void pyhvd_agreement_clear(pyhvd_agreement* a, uint32_t slots)


cdef extern from "agreement/ready_table.h" nogil:
    enum:
        PYHVD_BATCH
        PYHVD_LATER
        RANGE_WORDS "PYHVD_RANGE_WORDS"

    cpdef enum:
        SETS "PYHVD_MAX_SETS"
        MAX_SLOTS "PYHVD_MAX_SLOTS"
        OTHER_HOST "PYHVD_OTHER_HOST"
        TURNS "PYHVD_TURNS"

    ctypedef struct pyhvd_ranks:
        uint64_t ranks[4]

    ctypedef struct pyhvd_rank_state:
        uint64_t late
        uint64_t awaited

    ctypedef struct pyhvd_shared_table:
        pyhvd_rank_state* rank_states

    ctypedef struct pyhvd_ready_table:
        int rank
        int size
        uint32_t slots
        uint32_t words
        int has_turns
        pyhvd_shared_table* shared
        pyhvd_agreement* agreement

    ctypedef struct pyhvd_slot_list:
        uint32_t n
        uint32_t* ids
        uint64_t* versions
        uint64_t digest

    size_t pyhvd_ready_table_bytes(int size, uint32_t slots)
    void pyhvd_slot_list_renew(pyhvd_slot_list* slots, uint32_t k, uint64_t version)
    void pyhvd_ready_table_attach(pyhvd_ready_table* t, void* base, int rank, int size, uint32_t slots)
    void pyhvd_ready_table_clear(pyhvd_ready_table* t)
    void pyhvd_ready_table_open_set(
        pyhvd_ready_table* t, uint32_t set, const uint32_t* ranks, uint32_t count, int spans
    )
    void pyhvd_ready_table_delegate(pyhvd_ready_table* t, uint32_t set, uint32_t slot, uint64_t version)
    void pyhvd_ready_table_freeze(pyhvd_ready_table* t, uint32_t set, uint32_t slot)
    int pyhvd_ready_table_lock(pyhvd_ready_table* t, int64_t ns)
    void pyhvd_ready_table_recall(pyhvd_ready_table* t, uint32_t set, const uint64_t* bits, uint64_t* marked)
    void pyhvd_ready_table_delegate_turns(
        pyhvd_ready_table* t, uint32_t set, uint64_t bits, uint64_t version
    )
    void pyhvd_ready_table_recall_turns(pyhvd_ready_table* t, uint32_t set, uint64_t bits)
    void pyhvd_ready_table_read(pyhvd_ready_table* t, uint32_t set, uint64_t* marked, uint64_t* used)
    void pyhvd_ready_table_wake(pyhvd_ready_table* t, int rank, uint32_t reasons)
    uint64_t pyhvd_ready_table_position(const pyhvd_ready_table* t)


cdef extern from "agreement/agreement.h" nogil:
    void pyhvd_agreement_read(pyhvd_ready_table* t, uint32_t set, uint64_t* announced)
    int pyhvd_agreement_announce_list(pyhvd_ready_table* t, const pyhvd_order_list* announced)
    void pyhvd_agreement_ring(pyhvd_ready_table* t, uint32_t host, uint32_t local_rank)
    void pyhvd_agreement_abort(pyhvd_ready_table* t, const uint8_t* note, size_t n)
    void pyhvd_agreement_leave(pyhvd_ready_table* t)
    int pyhvd_agreement_start_beats(pyhvd_ready_table* t)
    void pyhvd_agreement_stop_beats(pyhvd_ready_table* t)
    int pyhvd_agreement_await_lost(pyhvd_ready_table* t, int64_t ns)


cdef extern from "fast_path/progress.h" nogil:
    enum:
        PYHVD_NAP
        PYHVD_BUCKETS
        PYHVD_VERBS
        PYHVD_MARKED
        PYHVD_TAKEN
        PYHVD_UNKNOWN
        PYHVD_DONE
        PYHVD_CLOSED
        PYHVD_WAKE_WORK
        PYHVD_WAKE_DONE

    ctypedef struct pyhvd_histogram:
        uint64_t buckets[48]
        uint64_t sum

    ctypedef struct pyhvd_counters:
        uint32_t timed
        pyhvd_histogram tensors
        pyhvd_histogram bytes
        uint64_t verb_tensors[8]
        uint64_t verb_bytes[8]
        pyhvd_histogram negotiation
        pyhvd_histogram execution
        pyhvd_histogram waits

    ctypedef struct pyhvd_ending:
        void* done
        const char* error

    ctypedef struct pyhvd_call:
        uint64_t started
        pyhvd_ending ending
        int state
        uint32_t set
        int grouped
        pyhvd_slot_list slots
        int64_t* srcs
        int64_t* dsts
        int64_t single_addresses[2]
        int64_t* starts
        uint32_t arrays
        int alike
        int64_t marked_ns
        uint64_t number
        uint32_t signature
        void* owner
        bint retired

    ctypedef struct pyhvd_cached_tensor:
        pyhvd_call* call
        uint32_t index
        int64_t count
        double prescale
        double postscale
        int dtype
        int op
        int direct
        int verb
        const pyhvd_local_move* move
        const pyhvd_move* moves
        size_t move_count
        const pyhvd_portions* portions

    ctypedef struct pyhvd_path_set:
        pyhvd_cached_tensor* tensors

    ctypedef struct pyhvd_path_setup:
        pyhvd_ready_table table
        pyhvd_trace* trace
        pyhvd_sampler* sampler
        int groups_alone
        pyhvd_path_set sets[16]

    ctypedef struct pyhvd_submissions:
        pthread_mutex_t mutex
        pyhvd_call* refused

    ctypedef struct pyhvd_progress:
        size_t threshold

    ctypedef struct pyhvd_background:
        int64_t cycle_ns

    ctypedef struct pyhvd_fast_path:
        pyhvd_path_setup setup
        pyhvd_submissions submissions
        pyhvd_progress progress
        pyhvd_background background
        uint32_t has_messages
        pyhvd_counters counters

    int64_t pyhvd_now()
    void prefetch "pyhvd_prefetch"(const void* object)
    int pyhvd_fast_path_init(pyhvd_fast_path* path)
    void pyhvd_fast_path_free(pyhvd_fast_path* path)
    int pyhvd_fast_path_open(pyhvd_fast_path* path, uint32_t set, pyhvd_window* window)
    int pyhvd_fast_path_hold(pyhvd_fast_path* path, pyhvd_call* call)
    int pyhvd_fast_path_withdraw(pyhvd_fast_path* path, pyhvd_call* call)
    int pyhvd_fast_path_take(pyhvd_fast_path* path, pyhvd_call* call)
    void pyhvd_set_word(uint32_t* word, bint value)
    uint32_t pyhvd_read_word(uint32_t* word)
    void pyhvd_fast_path_settle(pyhvd_fast_path* path, pyhvd_call* call)
    void pyhvd_fast_path_ring(pyhvd_fast_path* path)
    int pyhvd_fast_path_flush(pyhvd_fast_path* path, bint all, int64_t now)
    int pyhvd_fast_path_wait(pyhvd_fast_path* path, pyhvd_call* call, uint64_t turn, int64_t now, int64_t ns)
    void pyhvd_fast_path_waited(pyhvd_fast_path* path, int64_t began)
    void pyhvd_fast_path_offer_core(pyhvd_fast_path* path)
    bint pyhvd_call_finished(const pyhvd_call* call, uint64_t turn)
    bint pyhvd_call_notify(pyhvd_call* call, uint64_t turn)
    uint32_t pyhvd_fast_path_sleep(pyhvd_fast_path* path, int64_t ns)
    int pyhvd_fast_path_announce(pyhvd_fast_path* path, uint64_t number, const pyhvd_ranks* audience)
    int pyhvd_fast_path_enter(pyhvd_fast_path* path, uint64_t number)
    void pyhvd_fast_path_leave(pyhvd_fast_path* path)
    void pyhvd_fast_path_end(pyhvd_fast_path* path)
    void pyhvd_fast_path_keep_lock(pyhvd_fast_path* path)
    int pyhvd_fast_path_is_running(pyhvd_fast_path* path)
    void pyhvd_fast_path_wait_longer(pyhvd_fast_path* path, int change)
    uint32_t pyhvd_fast_path_long_waits(pyhvd_fast_path* path)
    uint32_t pyhvd_fast_path_aborted(pyhvd_fast_path* path)


cdef class Trace:
    cdef pyhvd_trace* ring


cdef class RailCounters:
    cdef pyhvd_rail_counters* c
    cdef int hosts


cdef class Exchange:
    cdef pyhvd_exchange c
    cdef list rails
    cdef object carrier
    cdef RailCounters counters

    cdef int open(self, size_t capacity) except -1


cdef class Window:
    cdef pyhvd_window window
    cdef uint64_t token
    cdef Exchange exchange
    cdef Trace trace
