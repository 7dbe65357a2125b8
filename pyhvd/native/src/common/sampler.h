/* Measures how many bytes are carried out in how much time, batch by batch.
 *
 * A *sample* begins at the end of the first batch after its start. It ends at the end of a batch in
 * which some tensor comes for one more time than any tensor before, after at least `steps` such
 * rounds and `least` ns: so it covers whole steps of the program. If no tensor repeats, it ends
 * after `limit` batches.
 *
 * Invariants
 *   1. While `state` is COUNTING, all other fields belong to the thread that carries out batches.
 *   2. Otherwise they belong to the thread that starts samples.
 *   3. `state` is stored (release) after the other fields, and loaded (acquire) before them.
 */
#ifndef PYHVD_SAMPLER_H
#define PYHVD_SAMPLER_H

#include "common/futex.h"

enum { PYHVD_SAMPLER_RESTS, PYHVD_SAMPLER_COUNTING, PYHVD_SAMPLER_ENDED };

typedef struct {
    _Atomic uint32_t state;
    uint32_t sample;      /* number of the sample; 0: none yet */
    uint32_t steps, most; /* most: the most times that a tensor has come */
    uint64_t limit, batches, bytes;
    int64_t least, began, ended; /* ns */
} pyhvd_sampler;

static inline int pyhvd_sampler_counts(const pyhvd_sampler *m) {
    return atomic_load_explicit(&m->state, memory_order_acquire) == PYHVD_SAMPLER_COUNTING;
}

static inline void pyhvd_sampler_start(pyhvd_sampler *m, uint32_t steps, uint64_t limit,
                                       int64_t least) {
    m->sample++;
    m->steps = steps;
    m->limit = limit;
    m->least = least;
    m->most = 0;
    m->batches = m->bytes = 0;
    atomic_store_explicit(&m->state, PYHVD_SAMPLER_COUNTING, memory_order_release);
}

/* Count a batch; return whether the sample has ended. `seen` is how often the batch's most frequent
 * tensor has come in this sample, this time included. */
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
