/* The parts of a rank's memory that lie in a lane of a move, and how they are copied; for move.c (one
 * host) and move_across.c (several hosts). */
#ifndef PYHVD_PARTS_H
#define PYHVD_PARTS_H

#include "common/streaming.h"
#include "kernels/kernels.h"
#include "window/window.h"

#include <string.h>

/* Return the first part that ends behind byte `from` of a lane, or lies in a later lane. */
static inline size_t first_part(const pyhvd_part *parts, size_t n, int lane, int64_t from) {
    size_t low = 0, high = n;
    while (low < high) {
        size_t middle = (low + high) / 2;
        const pyhvd_part *p = &parts[middle];
        if (p->lane < lane || (p->lane == lane && p->offset + p->bytes <= from))
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Whether some of the bytes [from, to) of a lane are in parts. */
static inline int has_parts(const pyhvd_part *parts, size_t n, int lane, int64_t from, int64_t to) {
    size_t k = first_part(parts, n, lane, from);
    return k < n && parts[k].lane == lane && parts[k].offset < to;
}

/* Bytes of the longest lane from which on results go past the caches. With 2 MiB the next call that gets
 * the same memory would take a fifth longer. */
#define COLD ((int64_t)4 << 20)

/* How bytes are copied: from parts into a lane, or out of a lane into parts; then past the caches if the
 * result is long, and not where the source is, whose lines are in the cache. */
enum { INTO_LANE, OUT_OF_LANE, PAST_CACHES };

static inline int way_out(const pyhvd_job_cursor *c, int64_t longest) {
    return longest >= COLD && c->source != c->target ? PAST_CACHES : OUT_OF_LANE;
}

/* Copy the bytes [from, to) of a lane between `at`, where the first of them lies, and this rank's
 * parts, whose addresses count from `base`. */
static inline void copy_parts(const pyhvd_part *parts, size_t n, int lane, int64_t from, int64_t to,
                              uint8_t *at, int64_t base, int how) {
    for (size_t k = first_part(parts, n, lane, from);
         k < n && parts[k].lane == lane && parts[k].offset < to; k++) {
        int64_t start = MAX(from, parts[k].offset);
        size_t bytes = (size_t)(MIN(to, parts[k].offset + parts[k].bytes) - start);
        uint8_t *mine = (uint8_t *)(intptr_t)(base + parts[k].address + start - parts[k].offset);
        uint8_t *slot = at + (start - from);
        if (how == INTO_LANE)
            memcpy(slot, mine, bytes);
        else
            pyhvd_copy(mine, slot, bytes, how == PAST_CACHES);
    }
    if (how == PAST_CACHES) pyhvd_stream_fence();
}

/* Copy what a rank has for itself, as far as the first `until` bytes. */
static inline void copy_own(pyhvd_job_cursor *c, int64_t until) {
    const pyhvd_local_move *m = c->local;
    int64_t from = c->copied, source = c->source, target = c->target;
    if (!m || until <= from) return;
    c->copied = until;
    if (source + m->own_from != target + m->own_to)
        pyhvd_copy((uint8_t *)(intptr_t)(target + m->own_to + from),
                   (const uint8_t *)(intptr_t)(source + m->own_from + from), (size_t)(until - from),
                   way_out(c, m->own_bytes) == PAST_CACHES);
    pyhvd_stream_fence();
}

#endif
