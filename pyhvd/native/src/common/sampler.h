/* How many bytes go in how much time, counted batch by batch.
 *
 * A *sample* begins when the first batch after its start has been carried out, and ends behind a batch in which
 * some tensor comes more often than any before, after `steps` rounds at least, and so many ns. Between the two lie
 * whole rounds of the program. Where nothing comes again it ends after `limit` batches.
 *
 * Memory ordering: while `state` is COUNTING, all else belongs to whoever carries out batches (one thread at a
 * time: the one that drives the engine, or the runtime's where there is no engine); otherwise to whoever starts
 * samples. `state` is stored (release) after the rest, and loaded (acquire) before it.
 */
#ifndef PYHVD_SAMPLER_H
#define PYHVD_SAMPLER_H

#include "common/futex.h"

enum { PYHVD_SAMPLER_RESTS, PYHVD_SAMPLER_COUNTING, PYHVD_SAMPLER_ENDED };

typedef struct {
    _Atomic uint32_t state;
    uint32_t sample; /* number of the sample; 0: none yet */
    uint32_t steps, most; /* most: how often the most frequent tensor has come */
    uint64_t limit, batches, bytes;
    int64_t least, began, ended; /* ns */
} pyhvd_sampler;

static inline int pyhvd_sampler_counts(const pyhvd_sampler *m) {
    return atomic_load_explicit(&m->state, memory_order_acquire) == PYHVD_SAMPLER_COUNTING;
}

static inline void pyhvd_sampler_start(pyhvd_sampler *m, uint32_t steps, uint64_t limit, int64_t least) {
    m->sample++;
    m->steps = steps;
    m->limit = limit;
    m->least = least;
    m->most = 0;
    m->batches = m->bytes = 0;
    atomic_store_explicit(&m->state, PYHVD_SAMPLER_COUNTING, memory_order_release);
}

/* Count a batch while the sampler counts; `seen` is how often its most frequent tensor has come in this sample, with
 * this time. Returns whether the sample has ended. */
static inline int pyhvd_sampler_count(pyhvd_sampler *m, uint64_t bytes, uint32_t seen) {
    int next = seen > m->most;
    if (next) m->most = seen;
    if (!m->batches++) {
        m->began = pyhvd_now();
        return 0;
    }
    m->bytes += bytes;
    int whole = next && seen > m->steps;
    if (!whole && m->batches <= m->limit) return 0;
    m->ended = pyhvd_now();
    if (whole && m->ended - m->began < m->least) return 0;
    atomic_store_explicit(&m->state, PYHVD_SAMPLER_ENDED, memory_order_release);
    return 1;
}

static inline int pyhvd_sampler_has_ended(const pyhvd_sampler *m) {
    return atomic_load_explicit(&m->state, memory_order_acquire) == PYHVD_SAMPLER_ENDED;
}

#endif
