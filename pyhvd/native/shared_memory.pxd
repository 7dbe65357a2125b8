"""The C of the shared-memory path, as :mod:`pyhvd.native.shared_memory` sees it."""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t


cdef extern from "common/trace_ring.h" nogil:
    enum:
        PYHVD_SUBMITTED
        PYHVD_MARKED_READY
        PYHVD_READY
        PYHVD_CARRIED
        PYHVD_PACKING
        PYHVD_REDUCING
        PYHVD_UNPACKING
        PYHVD_AWAITING

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


cdef extern from "window/window.h" nogil:
    enum:
        PYHVD_MAX_LOCAL
        PYHVD_FLAT
        PYHVD_NOTE

    ctypedef struct pyhvd_window:
        int rank
        int size
        size_t chunk
        size_t capacity
        size_t shift
        uint64_t chunks
        uint64_t flats
        int64_t parted
        int patience
        int brief
        pyhvd_trace* trace
        uint8_t* area[256]
        uint8_t* arena[256]

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

    size_t pyhvd_window_area(size_t capacity)
    void pyhvd_window_clear(pyhvd_window* w)
    int pyhvd_window_allreduce(pyhvd_window* w, const pyhvd_job* job)
    int pyhvd_window_gather(
        pyhvd_window* w, const uint8_t* send, uint8_t* recv, const int64_t* counts, const int64_t* starts
    )
    int pyhvd_window_alltoall(
        pyhvd_window* w, const uint8_t* send, const int64_t* send_counts, const int64_t* send_starts,
        uint8_t* recv, const int64_t* recv_counts, const int64_t* recv_starts
    )
    int pyhvd_window_exchange(
        pyhvd_window* w, int partner, const uint8_t* send, int64_t send_count, uint8_t* recv,
        int64_t recv_count
    )
    int pyhvd_window_barrier(pyhvd_window* w)
    void pyhvd_window_abort(pyhvd_window* w, const uint8_t* note, size_t bytes)
    const uint8_t* pyhvd_window_note(const pyhvd_window* w, size_t* bytes)


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


cdef extern from "fast_path/progress.h" nogil:
    enum:
        PYHVD_BOARD_SETS
        PYHVD_BOARD_SLOTS
        PYHVD_NAP
        PYHVD_BUCKETS
        PYHVD_POSTED
        PYHVD_TAKEN
        PYHVD_UNKNOWN
        PYHVD_DONE
        PYHVD_CLOSED
        PYHVD_CALL_WORK
        PYHVD_CALL_DONE

    ctypedef struct pyhvd_ranks:
        uint64_t ranks[4]

    ctypedef struct pyhvd_board:
        int rank
        int size
        uint32_t slots
        uint32_t words
        pyhvd_seat* seats

    ctypedef struct pyhvd_histogram:
        uint64_t buckets[48]
        uint64_t sum

    ctypedef struct pyhvd_tally:
        uint32_t timed
        pyhvd_histogram tensors
        pyhvd_histogram bytes
        pyhvd_histogram negotiation
        pyhvd_histogram execution
        pyhvd_histogram waits

    ctypedef struct pyhvd_seat:
        uint64_t late
        uint64_t awaited

    ctypedef struct pyhvd_posting:
        uint32_t n
        uint32_t* slots
        uint64_t* since

    ctypedef struct pyhvd_unit:
        uint64_t started
        int state
        uint32_t set
        int grouped
        pyhvd_posting post
        int64_t* srcs
        int64_t* dsts
        int64_t own[2]
        int64_t* starts
        int alike
        int64_t posted
        void* owner

    ctypedef struct pyhvd_record:
        pyhvd_unit* unit
        uint32_t at
        int64_t count
        double prescale
        double postscale
        int dtype
        int op
        int direct

    ctypedef struct pyhvd_lane_set:
        pyhvd_window* window
        pyhvd_record* records

    ctypedef struct pyhvd_lane:
        pyhvd_board board
        pyhvd_trace* trace
        size_t threshold
        int groups_alone
        int64_t cycle
        pyhvd_sampler* sampler
        pthread_mutex_t mutex
        pyhvd_unit** refused
        uint32_t refusals
        pyhvd_lane_set sets[16]
        pyhvd_tally tally

    size_t pyhvd_board_bytes(int size, uint32_t slots)
    void pyhvd_posting_renew(pyhvd_posting* p, uint32_t k, uint64_t since)
    void pyhvd_board_attach(pyhvd_board* b, void* base, int rank, int size, uint32_t slots)
    void pyhvd_board_clear(pyhvd_board* b)
    void pyhvd_board_open(pyhvd_board* b, uint32_t set, const uint32_t* ranks, uint32_t count)
    void pyhvd_board_lend(pyhvd_board* b, uint32_t set, uint32_t slot, uint64_t since)
    void pyhvd_board_freeze(pyhvd_board* b, uint32_t set, uint32_t slot)
    int pyhvd_board_lock(pyhvd_board* b, int64_t ns)
    void pyhvd_board_recall(pyhvd_board* b, uint32_t set, const uint64_t* bits, uint64_t* posted)
    void pyhvd_board_look(pyhvd_board* b, uint32_t set, uint64_t* posted, uint64_t* used)
    void pyhvd_board_call(pyhvd_board* b, int rank, uint32_t reasons)
    uint64_t pyhvd_board_position(const pyhvd_board* b)
    int pyhvd_lane_init(pyhvd_lane* lane)
    void pyhvd_lane_free(pyhvd_lane* lane)
    int pyhvd_lane_open(pyhvd_lane* lane, uint32_t set, pyhvd_window* window)
    void pyhvd_lane_close_set(pyhvd_lane* lane, uint32_t set)
    int pyhvd_lane_hold(pyhvd_lane* lane, pyhvd_unit* unit)
    void pyhvd_lane_ring(pyhvd_lane* lane)
    int pyhvd_lane_flush(pyhvd_lane* lane, bint whole, int64_t now)
    int pyhvd_lane_take(pyhvd_lane* lane, pyhvd_unit* unit)
    int pyhvd_lane_withdraw(pyhvd_lane* lane, pyhvd_unit* unit)
    void pyhvd_lane_settle(pyhvd_lane* lane, pyhvd_unit* unit)
    int pyhvd_lane_wait(pyhvd_lane* lane, pyhvd_unit* unit, uint64_t turn, int64_t now, int64_t ns)
    void pyhvd_lane_waited(pyhvd_lane* lane, int64_t began)
    int64_t pyhvd_now()
    uint32_t pyhvd_lane_doze(pyhvd_lane* lane, int64_t ns)
    int pyhvd_lane_announce(pyhvd_lane* lane, uint64_t number, const pyhvd_ranks* audience)
    int pyhvd_lane_enter(pyhvd_lane* lane, uint64_t number)
    void pyhvd_lane_leave(pyhvd_lane* lane)
    int pyhvd_lane_is_running(pyhvd_lane* lane)
    uint32_t pyhvd_lane_aborted(pyhvd_lane* lane)
    void pyhvd_lane_shut(pyhvd_lane* lane)
    void pyhvd_lane_seize(pyhvd_lane* lane)
    bint pyhvd_unit_finished(const pyhvd_unit* unit, uint64_t turn)
    bint pyhvd_unit_notify(pyhvd_unit* unit, uint64_t turn)
    void fetch "pyhvd_fetch"(const void* object)


cdef class Trace:
    cdef pyhvd_trace* ring


cdef class Window:
    cdef pyhvd_window window
    cdef Trace trace
