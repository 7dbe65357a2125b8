/* What lies in a window, and how its ranks wait for each other; for window.c and scatter.c (reductions),
 * move.c (the rest), and across.c, scatter_across.c and move_across.c (the same over several hosts). */
#ifndef PYHVD_LAYOUT_H
#define PYHVD_LAYOUT_H

#include "common/futex.h"
#include "window/window.h"

#define LINE PYHVD_LINE

/* The counters that window.h describes. */
enum { PACKED, REDUCED, FLATS, TAKEN, COUNTERS };

typedef struct {
    _Alignas(LINE) _Atomic uint32_t core; /* where the owner last ran; see pyhvd_current_core */
    struct {
        _Alignas(LINE) _Atomic uint64_t value;
    } counters[COUNTERS];
    _Alignas(LINE) _Atomic uint32_t bell;
    _Alignas(LINE) _Atomic uint32_t asleep;
    _Alignas(LINE) _Atomic uint32_t aborted; /* 1 + the rank that aborted the window, or 0 */
    /* whether the owner has written a note, and its length */
    uint32_t noted, note_bytes;
} control;

static inline control *control_of(const pyhvd_window *w, int rank) {
    return (control *)w->area[rank];
}

static inline uint8_t *flat_of(const pyhvd_window *w, int rank) {
    return w->area[rank] + sizeof(control) + (w->flats & 1) * PYHVD_FLAT;
}

static inline uint8_t *slot_of(const pyhvd_window *w, int rank, uint64_t chunk) {
    return w->area[rank] + sizeof(control) + 2 * PYHVD_FLAT + w->shift +
           (chunk % (uint64_t)w->slots) * (w->capacity + LINE);
}

/* A rank's note, at the end of its area. */
static inline uint8_t *note_of(const pyhvd_window *w, int rank) {
    return w->area[rank] + pyhvd_window_area(w->capacity, w->slots) - PYHVD_NOTE;
}

/* Wait until a rank's counter has reached a value. With w->interruptible, return PYHVD_LATER after a
 * nap without news. */
int pyhvd_await(pyhvd_window *w, int rank, int counter, uint64_t value);

/* Wait until all ranks' counters have reached a value. */
int pyhvd_await_all(pyhvd_window *w, int counter, uint64_t value);

/* Wait until this rank may write into its flat buffer. */
static inline int pyhvd_await_free_flat(pyhvd_window *w) {
    return pyhvd_await_all(w, FLATS, w->flats);
}

/* Wait until this chunk's slot is free: every rank is done with its last chunk. */
int pyhvd_await_free_slot(pyhvd_window *w, uint64_t chunk);

/* Store a counter of this rank, and wake the sleepers. */
void pyhvd_announce(const pyhvd_window *w, int counter, uint64_t value);

/* Whether a rank has aborted the window. */
static inline int pyhvd_window_is_aborted(const pyhvd_window *w) {
    return atomic_load_explicit(&control_of(w, w->rank)->aborted, memory_order_acquire) != 0;
}

/* Record a stage that began at `begin`. */
static inline void pyhvd_add_stage(pyhvd_window *w, uint32_t kind, int64_t begin, uint64_t chunk) {
    pyhvd_trace_add(w->trace, kind, begin, 0, 0, chunk, (uint32_t)w->rank);
}

/* Whether all other ranks' counters have reached a value. */
static inline int all_reached(const pyhvd_window *w, int counter, uint64_t value) {
    for (int q = 0; q < w->size; q++)
        if (q != w->rank && atomic_load_explicit(&control_of(w, q)->counters[counter].value,
                                                 memory_order_acquire) < value)
            return 0;
    return 1;
}

/* Over several hosts: the stages of a chunk (see across.c), and what functions return that advance
 * one, besides errors. */
enum { PACK, REDUCE, EXCHANGE, UNPACK };
enum { NOTHING = 0, MOVED = 1, ENDED = 2 };

/* Proceed with a reduction or a move over several hosts, as pyhvd_window_proceed does. */
int pyhvd_across_proceed(pyhvd_window *w, pyhvd_job_cursor *c);

/* Advance the exchange of the chunks under way, and announce those that have ended here. */
int pyhvd_across_exchange(pyhvd_window *w, pyhvd_job_cursor *c);

/* For the trace: begin a stretch of the rank's time, PYHVD_EXCHANGING or PYHVD_AWAITING, unless one has
 * begun. */
void pyhvd_begin_stretch(const pyhvd_window *w, uint32_t kind);

/* Advance a move over several hosts, or a reduction of which each rank gets a portion. */
int pyhvd_move_advance(pyhvd_window *w, pyhvd_job_cursor *c);
int pyhvd_scatter_advance(pyhvd_window *w, pyhvd_job_cursor *c);

/* Proceed with a move among the ranks of one host, or with a reduction of which each rank gets a
 * portion, as pyhvd_window_proceed does. */
int pyhvd_move_proceed(pyhvd_window *w, pyhvd_job_cursor *c);
int pyhvd_scatter_proceed(pyhvd_window *w, pyhvd_job_cursor *c);

#endif
