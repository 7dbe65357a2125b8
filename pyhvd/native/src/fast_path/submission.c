/* How a call leaves the submissions without being marked ready; progress.h states the
 * invariants. */
#include "fast_path/progress.h"

#include <stdlib.h>

int pyhvd_fast_path_grow(pyhvd_fast_path *path) {
    pyhvd_submissions *s = &path->submissions;
    uint32_t wanted = s->capacity ? 2 * s->capacity : 64;
    pyhvd_call **held = realloc(s->held, wanted * sizeof *held);
    if (held) s->held = held;
    pyhvd_call **refused = realloc(s->refused, wanted * sizeof *refused);
    if (refused) s->refused = refused;
    if (!held || !refused) return 0;
    s->capacity = wanted;
    return 1;
}

/* Remove a call from an array of n calls; return how many are left. */
static uint32_t removed(pyhvd_call **calls, uint32_t n, const pyhvd_call *call) {
    uint32_t kept = 0;
    for (uint32_t k = 0; k < n; k++)
        if (calls[k] != call) calls[kept++] = calls[k];
    return kept;
}

int pyhvd_fast_path_take(pyhvd_fast_path *path, pyhvd_call *call) {
    pyhvd_submissions *s = &path->submissions;
    int was = call->state;
    uint32_t n = atomic_load_explicit(&s->held_count, memory_order_relaxed);
    if (was == PYHVD_HELD)
        atomic_store_explicit(&s->held_count, removed(s->held, n, call), memory_order_release);
    if (was == PYHVD_REFUSED) s->refused_count = removed(s->refused, s->refused_count, call);
    call->state = PYHVD_TAKEN;
    return was;
}

int pyhvd_fast_path_withdraw(pyhvd_fast_path *path, pyhvd_call *call) {
    if (call->state != PYHVD_HELD) return 0;
    pyhvd_fast_path_take(path, call);
    atomic_store_explicit(&call->finished, call->started, memory_order_release);
    return 1;
}
