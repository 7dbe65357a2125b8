/* Records of what happens on one rank, in a bounded ring: any thread writes without the GIL, one
 * thread at a time reads. While nothing is recorded, a writer reads one flag and does nothing else.
 *
 * The ring is D. Vyukov's bounded queue (1024cores.net, "Bounded MPMC queue") with one reader.
 *
 * Invariants
 *   1. Position p of the stream lies in cell p % cells.
 *   2. A cell's `turn` is p while it waits for the writer of position p, p + 1 once that record is
 *      there, and p + cells once the reader has taken it.
 *   3. A writer claims a position by compare-and-swap on `head` (relaxed, as it orders nothing
 *      else), fills the cell, and stores `turn` (release). The reader loads `turn` (acquire), so it
 *      sees the whole record.
 *   4. The reader returns a cell by a store (release) that the cell's next writer loads (acquire).
 *   5. A full ring drops the new record and counts it: no writer waits. A writer that is stopped
 *      between claim and store blocks the reader, but no other writer until the ring is full.
 *   6. `on` is stored (release) after the cells were made, and loaded (acquire) before they are
 *      used. The cells are freed only with the ring.
 *   7. A writer that has seen `on` may still write after it was cleared. The reader discards
 *      records that are older than the start of its recording.
 */
#ifndef PYHVD_TRACE_RING_H
#define PYHVD_TRACE_RING_H

#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

#include "common/futex.h"

/* Kinds of records, and the meaning of `number`, `slot` and `rank` in each. */
enum {
    PYHVD_SUBMITTED = 1,    /* a call was put on hold; slot: its first */
    PYHVD_MARKED_READY = 2, /* a call was marked in the ready table; slot: its first */
    /* a tensor waited, marked by all ranks; number: log position; rank: the last to mark */
    PYHVD_READY = 3,
    PYHVD_CARRIED = 4, /* a batch; slot: number of tensors; number, rank: as above */
    PYHVD_PACKING = 5, /* this and the next two: a stage of a chunk; number: the chunk */
    PYHVD_REDUCING = 6,
    PYHVD_UNPACKING = 7,
    /* a wait; rank: of the window, the last one that was awaited, or UINT32_MAX */
    PYHVD_AWAITING = 8,
    /* a stretch of the exchange between hosts; number: bytes sent and received; rank: the host whose
     * frame arrived last */
    PYHVD_EXCHANGING = 9
};

typedef struct {
    int64_t begin, end; /* ns, CLOCK_MONOTONIC */
    uint64_t number;
    uint32_t set, slot, kind, rank;
} pyhvd_event;

typedef struct {
    _Atomic uint64_t turn;
    pyhvd_event event;
} pyhvd_trace_cell;

typedef struct {
    _Atomic uint32_t on;
    uint64_t count; /* of cells, a power of two; 0 before the first start */
    pyhvd_trace_cell *cells;
    _Alignas(PYHVD_LINE) _Atomic uint64_t head;
    _Atomic uint64_t dropped;
    _Alignas(PYHVD_LINE) uint64_t tail; /* owned by the reader */
} pyhvd_trace;

static inline int pyhvd_traced(const pyhvd_trace *trace) {
    return trace &&
           __builtin_expect(atomic_load_explicit(&trace->on, memory_order_acquire) != 0, 0);
}

/* The time while the ring records, else 0. */
static inline int64_t pyhvd_trace_now(const pyhvd_trace *trace) {
    return pyhvd_traced(trace) ? pyhvd_now() : 0;
}

/* Record something that began at `begin` and ends now; nothing if `begin` is 0. */
static inline void pyhvd_trace_add(pyhvd_trace *trace, uint32_t kind, int64_t begin, uint32_t set,
                                   uint32_t slot, uint64_t number, uint32_t rank) {
    if (!begin) return;
    uint64_t position = atomic_load_explicit(&trace->head, memory_order_relaxed);
    pyhvd_trace_cell *cell;
    for (;;) {
        cell = &trace->cells[position & (trace->count - 1)];
        uint64_t turn = atomic_load_explicit(&cell->turn, memory_order_acquire);
        if (turn < position) {
            atomic_fetch_add_explicit(&trace->dropped, 1, memory_order_relaxed);
            return;
        }
        if (turn > position)
            position = atomic_load_explicit(&trace->head, memory_order_relaxed);
        else if (atomic_compare_exchange_weak_explicit(&trace->head, &position, position + 1,
                                                       memory_order_relaxed, memory_order_relaxed))
            break;
    }
    cell->event = (pyhvd_event){begin, pyhvd_now(), number, set, slot, kind, rank};
    atomic_store_explicit(&cell->turn, position + 1, memory_order_release);
}

/* ---- for the reader ---- */

/* Start recording; return 0 without memory. `count`, a power of two, is used by the first call
 * only. */
static inline int pyhvd_trace_start(pyhvd_trace *trace, uint64_t count) {
    if (!trace->count) {
        trace->cells = calloc(count, sizeof *trace->cells);
        if (!trace->cells) return 0;
        for (uint64_t k = 0; k < count; k++)
            atomic_store_explicit(&trace->cells[k].turn, k, memory_order_relaxed);
        trace->count = count;
    }
    atomic_store_explicit(&trace->on, 1, memory_order_release);
    return 1;
}

static inline void pyhvd_trace_stop(pyhvd_trace *trace) {
    atomic_store_explicit(&trace->on, 0, memory_order_release);
}

static inline void pyhvd_trace_free(pyhvd_trace *trace) { free(trace->cells); }

/* Take the oldest record; return 0 if there is none. */
static inline int pyhvd_trace_take(pyhvd_trace *trace, pyhvd_event *out) {
    if (!trace->count) return 0;
    pyhvd_trace_cell *cell = &trace->cells[trace->tail & (trace->count - 1)];
    if (atomic_load_explicit(&cell->turn, memory_order_acquire) != trace->tail + 1) return 0;
    *out = cell->event;
    atomic_store_explicit(&cell->turn, trace->tail + trace->count, memory_order_release);
    trace->tail++;
    return 1;
}

/* How many records were dropped so far. From any thread. */
static inline uint64_t pyhvd_trace_dropped(const pyhvd_trace *trace) {
    return atomic_load_explicit(&trace->dropped, memory_order_relaxed);
}

#endif
