/* What one rank's fast lane counts: histograms of plain words, each of which holds a count and a sum as well.
 *
 * Memory ordering. But for `waits`, only who drives the engine writes, with the rank's seat as the lock: a load and a
 * store, both relaxed, and no locked instruction; the seat passes from one driver to the next by release and acquire.
 * `waits` is added to by any thread that waits, atomically. Whoever reads, from any thread, gets words that never
 * go back, though not all of one moment.
 */
#ifndef PYHVD_TALLY_H
#define PYHVD_TALLY_H

#include <stdatomic.h>
#include <stdint.h>

#define PYHVD_BUCKETS 48 /* the k-th counts values up to 2^k, and above 2^(k-1); the last one also what is above */

typedef struct {
    _Atomic uint64_t buckets[PYHVD_BUCKETS], sum;
} pyhvd_histogram;

typedef struct {
    _Atomic uint32_t timed; /* whether the clock is read for negotiation, execution and waits */
    pyhvd_histogram tensors, bytes; /* of one response */
    pyhvd_histogram negotiation;    /* ns from a tensor's post to when all ranks had posted it */
    pyhvd_histogram execution;      /* ns from then to the response's end */
    pyhvd_histogram waits;          /* ns that a caller waited for its handle */
} pyhvd_tally;

static inline int pyhvd_bucket(uint64_t value) {
    int k = value > 1 ? 64 - __builtin_clzll(value - 1) : 0;
    return k < PYHVD_BUCKETS ? k : PYHVD_BUCKETS - 1;
}

static inline void pyhvd_add(_Atomic uint64_t *word, uint64_t more) {
    uint64_t was = atomic_load_explicit(word, memory_order_relaxed);
    atomic_store_explicit(word, was + more, memory_order_relaxed);
}

/* Count a value n times; for who alone writes. */
static inline void pyhvd_observe(pyhvd_histogram *h, uint64_t value, uint64_t n) {
    pyhvd_add(&h->buckets[pyhvd_bucket(value)], n);
    pyhvd_add(&h->sum, value * n);
}

/* Count a value once; for any thread. */
static inline void pyhvd_observe_shared(pyhvd_histogram *h, uint64_t value) {
    atomic_fetch_add_explicit(&h->buckets[pyhvd_bucket(value)], 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&h->sum, value, memory_order_relaxed);
}

static inline int pyhvd_is_timed(const pyhvd_tally *tally) {
    return atomic_load_explicit(&tally->timed, memory_order_relaxed) != 0;
}

#endif
