/* What one rank's fast path counts: histograms, each of which also holds a count and a sum. And what a
 * rank, or a host, counts of another host.
 *
 * Memory ordering
 *   1. Only the holder of the progress lock writes, by a relaxed load and store: no locked
 *      instruction is needed. The lock passes from one holder to the next by release and acquire.
 *   2. Any waiting thread adds to `waits`, with atomic additions.
 *   3. Any thread may read. Words never decrease, but two words may be of different moments.
 *   4. pyhvd_rail_counters are written likewise, by the one thread that uses the rank's windows.
 */
#ifndef PYHVD_COUNTERS_H
#define PYHVD_COUNTERS_H

#include <stdatomic.h>
#include <stdint.h>

/* the k-th counts values in (2^(k-1), 2^k]; the last one counts all above too */
#define PYHVD_BUCKETS 48
#define PYHVD_VERBS 8 /* codes of negotiation.messages.RequestType of calls that ranks remember */
#define PYHVD_ALLREDUCE 0

typedef struct {
    _Atomic uint64_t buckets[PYHVD_BUCKETS], sum;
} pyhvd_histogram;

typedef struct {
    _Atomic uint32_t timed; /* whether the clock is read for negotiation, execution and waits */
    pyhvd_histogram tensors, bytes;                                      /* of one batch */
    _Atomic uint64_t verb_tensors[PYHVD_VERBS], verb_bytes[PYHVD_VERBS]; /* of all batches */
    pyhvd_histogram negotiation; /* ns from a tensor's mark until all ranks had marked it */
    pyhvd_histogram execution;   /* ns from then to the end of the batch */
    pyhvd_histogram waits;       /* ns that a caller waited for its handle */
} pyhvd_counters;

/* What a rank counts of a host whose rails it has, over all its process sets. */
typedef struct {
    _Atomic uint64_t sent, received; /* bytes */
    /* Operations whose last frame, for which this rank waited, came from that host. Of the own host:
     * operations for which this rank did not wait. */
    _Atomic uint64_t last;
    _Atomic uint64_t slept; /* ns of waiting until a frame of that host arrived */
} pyhvd_rail_counters;

/* What a host counts of a host, for all its ranks: see agreement.h for who writes. */
typedef struct {
    _Atomic uint64_t received; /* bytes */
    /* Cached tensors that the host was the last to announce; and for how long (ns) this host, which had
     * announced them, waited for that. */
    _Atomic uint64_t late, awaited;
} pyhvd_host_counters;

static inline int pyhvd_bucket(uint64_t value) {
    int k = value > 1 ? 64 - __builtin_clzll(value - 1) : 0;
    return k < PYHVD_BUCKETS ? k : PYHVD_BUCKETS - 1;
}

static inline void pyhvd_add(_Atomic uint64_t *word, uint64_t more) {
    uint64_t was = atomic_load_explicit(word, memory_order_relaxed);
    atomic_store_explicit(word, was + more, memory_order_relaxed);
}

/* Count a value n times; for the only writer. */
static inline void pyhvd_observe(pyhvd_histogram *h, uint64_t value, uint64_t n) {
    pyhvd_add(&h->buckets[pyhvd_bucket(value)], n);
    pyhvd_add(&h->sum, value * n);
}

/* Count a value once; for any thread. */
static inline void pyhvd_observe_shared(pyhvd_histogram *h, uint64_t value) {
    atomic_fetch_add_explicit(&h->buckets[pyhvd_bucket(value)], 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&h->sum, value, memory_order_relaxed);
}

static inline int pyhvd_is_timed(const pyhvd_counters *counters) {
    return atomic_load_explicit(&counters->timed, memory_order_relaxed) != 0;
}

#endif
