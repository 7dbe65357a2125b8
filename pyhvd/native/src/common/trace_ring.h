/* What happens on one rank, as records of one size in a bounded ring: written by any thread without the GIL, read by
 * one thread at a time. Nothing is recorded, and nothing but one flag is read, unless somebody records.
 *
 * The ring is D. Vyukov's bounded queue (1024cores.net, "Bounded MPMC queue"), with one reader. Invariants and memory
 * ordering: place p of the stream lies in cell p % cells. A cell's `turn` is p while it waits for place p's writer, p + 1
 * once that record is there, and p + cells when the reader has taken it. A writer claims a place by
 * compare-and-swap on `head` (relaxed: it orders nothing else), fills the cell, and stores `turn` (release); the reader
 * loads it (acquire), so it sees the whole record, and gives the cell back with a store (release) that the next writer
 * loads (acquire). A full ring drops the new record and counts it: no writer ever waits. A writer that is stopped
 * between claim and store holds up the reader, not the other writers, until the ring is full.
 *
 * `on` is stored (release) after the cells were made and is loaded (acquire) before they are used; they are freed only with the
 * ring. A writer that has seen `on` may still write after it was cleared: the reader discards what is older than the
 * beginning of its recording.
 */
#ifndef PYHVD_TRACE_H
#define PYHVD_TRACE_H

#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

#include "common/futex.h"

/* Kinds of records, and what `number`, `slot` and `rank` are in them. */
enum {
    PYHVD_SUBMITTED = 1, /* a unit was held back; slot: its first */
    PYHVD_MARKED_READY = 2,    /* ... and has been posted on the board */
    PYHVD_READY = 3,     /* a tensor, from when all had posted it to its turn; number: place in the log; rank: who was last */
    PYHVD_CARRIED = 4,   /* a batch, from begin to end; slot: how many tensors; the rest as before */
    PYHVD_PACKING = 5,   /* the next three: a stage of a chunk, begin to end; number: the chunk */
    PYHVD_REDUCING = 6,
    PYHVD_UNPACKING = 7,
    PYHVD_AWAITING = 8   /* rank: for which (of the window) it was waited last */
};

typedef struct {
    _Atomic uint64_t turn;
    int64_t begin, end; /* ns, CLOCK_MONOTONIC */
    uint64_t number;
    uint32_t set, slot, kind, rank;
} pyhvd_event;

typedef struct {
    _Atomic uint32_t on;
    uint64_t cells; /* a power of two, or 0: never used so far */
    pyhvd_event *events;
    _Alignas(PYHVD_LINE) _Atomic uint64_t head;
    _Atomic uint64_t dropped;
    _Alignas(PYHVD_LINE) uint64_t tail; /* the reader's */
} pyhvd_trace;

static inline int pyhvd_traced(const pyhvd_trace *trace) {
    return trace && __builtin_expect(atomic_load_explicit(&trace->on, memory_order_acquire) != 0, 0);
}

/* The time if somebody records, else 0. */
static inline int64_t pyhvd_trace_now(const pyhvd_trace *trace) { return pyhvd_traced(trace) ? pyhvd_now() : 0; }

/* Record what began at `begin`, and has just ended; nothing if `begin` is 0. */
static inline void pyhvd_trace_add(pyhvd_trace *trace, uint32_t kind, int64_t begin, uint32_t set, uint32_t slot,
                                   uint64_t number, uint32_t rank) {
    if (!begin) return;
    uint64_t place = atomic_load_explicit(&trace->head, memory_order_relaxed);
    pyhvd_event *event;
    for (;;) {
        event = &trace->events[place & (trace->cells - 1)];
        uint64_t turn = atomic_load_explicit(&event->turn, memory_order_acquire);
        if (turn < place) {
            atomic_fetch_add_explicit(&trace->dropped, 1, memory_order_relaxed);
            return;
        }
        if (turn > place)
            place = atomic_load_explicit(&trace->head, memory_order_relaxed);
        else if (atomic_compare_exchange_weak_explicit(&trace->head, &place, place + 1, memory_order_relaxed,
                                                       memory_order_relaxed))
            break;
    }
    event->begin = begin;
    event->end = pyhvd_now();
    event->number = number;
    event->set = set;
    event->slot = slot;
    event->kind = kind;
    event->rank = rank;
    atomic_store_explicit(&event->turn, place + 1, memory_order_release);
}

/* ---- for the reader ---- */

/* Begin to record; 0 if there is no memory. `cells`, a power of two, counts at the first call. */
static inline int pyhvd_trace_start(pyhvd_trace *trace, uint64_t cells) {
    if (!trace->cells) {
        trace->events = calloc(cells, sizeof *trace->events);
        if (!trace->events) return 0;
        for (uint64_t k = 0; k < cells; k++)
            atomic_store_explicit(&trace->events[k].turn, k, memory_order_relaxed);
        trace->cells = cells;
    }
    atomic_store_explicit(&trace->on, 1, memory_order_release);
    return 1;
}

static inline void pyhvd_trace_stop(pyhvd_trace *trace) {
    atomic_store_explicit(&trace->on, 0, memory_order_release);
}

static inline void pyhvd_trace_free(pyhvd_trace *trace) { free(trace->events); }

/* Take the oldest record; 0 if there is none. */
static inline int pyhvd_trace_take(pyhvd_trace *trace, pyhvd_event *out) {
    if (!trace->cells) return 0;
    pyhvd_event *event = &trace->events[trace->tail & (trace->cells - 1)];
    if (atomic_load_explicit(&event->turn, memory_order_acquire) != trace->tail + 1) return 0;
    out->begin = event->begin;
    out->end = event->end;
    out->number = event->number;
    out->set = event->set;
    out->slot = event->slot;
    out->kind = event->kind;
    out->rank = event->rank;
    atomic_store_explicit(&event->turn, trace->tail + trace->cells, memory_order_release);
    trace->tail++;
    return 1;
}

/* Records that found the ring full, so far. From any thread. */
static inline uint64_t pyhvd_trace_dropped(const pyhvd_trace *trace) {
    return atomic_load_explicit(&trace->dropped, memory_order_relaxed);
}

#endif
