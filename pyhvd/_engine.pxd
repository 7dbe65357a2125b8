"""What other extensions of this package may know of a window."""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t, uintptr_t


cdef extern from "_trace.h" nogil:
    enum:
        PYHVD_SUBMITTED
        PYHVD_PUT_UP
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


cdef extern from "_window.h" nogil:
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
    int pyhvd_window_swap(
        pyhvd_window* w, int partner, const uint8_t* send, int64_t send_count, uint8_t* recv,
        int64_t recv_count
    )
    int pyhvd_window_barrier(pyhvd_window* w)
    void pyhvd_window_abort(pyhvd_window* w, const uint8_t* note, size_t bytes)
    const uint8_t* pyhvd_window_note(const pyhvd_window* w, size_t* bytes)


cdef class Trace:
    cdef pyhvd_trace* ring


cdef class Window:
    cdef pyhvd_window window
    cdef Trace trace
