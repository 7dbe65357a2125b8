/* The elements of a job as ranges, and how a rank copies them from and to its tensors; for window.c
 * (one host) and across.c (several hosts). */
#ifndef PYHVD_RANGES_H
#define PYHVD_RANGES_H

#include "window/layout.h"

#include <string.h>

#include "common/prefetch.h"
#include "common/streaming.h"
#include "kernels/kernels.h"

#define BLOCK 4096 /* bytes that are reduced at a time: they stay in the L1 cache */
#define SOON 4     /* prefetch distance (tensors) for small tensors */

/* A range of elements within one tensor. */
typedef struct {
    size_t tensor;
    int64_t offset, count;
} piece;

/* Set `p` to the first piece of the elements [from, to), and `from` to the piece's end. Return 0 if
 * there is none. The search for the tensor begins at the last one, `at`, as the next is near. */
static inline int next_piece(const pyhvd_job *job, size_t *at, int64_t *from, int64_t to,
                             piece *p) {
    if (*from >= to) return 0;
    const int64_t *starts = job->starts;
    while (starts[*at] > *from) --*at;
    while (starts[*at + 1] <= *from) ++*at;
    p->tensor = *at;
    p->offset = *from - starts[*at];
    p->count = MIN(to, starts[*at + 1]) - *from;
    *from += p->count;
    return 1;
}

static inline uint8_t *address_of(int64_t base, int64_t offset, size_t item) {
    return (uint8_t *)(intptr_t)base + (size_t)offset * item;
}

/* Prefetch the start of the tensor that is SOON tensors ahead: the processor's own prefetcher
 * cannot predict the addresses of small tensors. */
static inline void prefetch_tensor(const pyhvd_job *job, size_t tensor, size_t item) {
    size_t next = tensor + SOON;
    if (next >= job->n || !job->srcs[next]) return;
    size_t bytes = (size_t)(job->starts[next + 1] - job->starts[next]) * item;
    pyhvd_prefetch_for_writing(address_of(job->srcs[next], 0, item), MIN(bytes, BLOCK));
}

/* Copy elements [from, to) to `out`, and return what is behind them. With `own`, they are this rank's slice. Then write only scaled
 * and identity elements: reduce_range reads all others from the rank's array. */
static inline uint8_t *pack_range(const pyhvd_job *job, size_t *walk, int64_t from, int64_t to,
                                  uint8_t *out, int own) {
    size_t item = pyhvd_itemsize(job->dtype);
    piece p;
    while (next_piece(job, walk, &from, to, &p)) {
        int64_t src = job->srcs[p.tensor];
        size_t count = (size_t)p.count;
        if (!src)
            pyhvd_fill(out, count, job->dtype, job->op);
        else if (job->prescale != 1.0)
            pyhvd_scale(out, address_of(src, p.offset, item), count, job->dtype, job->prescale);
        else if (!own) {
            if (!p.offset) prefetch_tensor(job, p.tensor, item);
            memcpy(out, address_of(src, p.offset, item), count * item);
        }
        out += count * item;
    }
    return out;
}

/* Whether the result of a tensor goes past the caches: it is large, and not where the tensor is, whose
 * lines are in the cache. */
static inline int is_streamed(const pyhvd_job *job, size_t tensor) {
    return job->dsts[tensor] && job->dsts[tensor] != job->srcs[tensor] &&
           job->starts[job->n] * (int64_t)pyhvd_itemsize(job->dtype) >= PYHVD_STREAMED;
}

/* Copy the results [from, to) from a slot. Before another thread may read them: pyhvd_stream_fence(). */
static inline void unpack_range(const pyhvd_job *job, size_t *walk, int64_t from, int64_t to,
                                const uint8_t *in) {
    size_t item = pyhvd_itemsize(job->dtype);
    piece p;
    while (next_piece(job, walk, &from, to, &p)) {
        size_t bytes = (size_t)p.count * item;
        int64_t dst = job->dsts[p.tensor];
        if (dst) pyhvd_copy(address_of(dst, p.offset, item), in, bytes, is_streamed(job, p.tensor));
        in += bytes;
    }
}

typedef struct {
    int64_t from, to, mine_from, mine_to; /* the elements of a chunk; this rank's slice of them */
} span;

/* Elements [from, to) of a set rank's portion that chunk `index` has, if each chunk has `room`. */
static inline span block_of(const pyhvd_portions *p, int64_t rank, int64_t room, int64_t index) {
    int64_t first = p->starts[rank] + index * room, end = p->starts[rank + 1];
    span s = {MIN(first, end), MIN(first + room, end), 0, 0};
    return s;
}

/* Reduce the elements of a block of this rank's portion, of which there are n addends at `blocks`, into
 * the result. */
static inline void reduce_block(const pyhvd_job *job, span s, const int64_t *blocks, int n) {
    const pyhvd_portions *p = job->portions;
    if (s.from >= s.to || !job->dsts[0]) return;
    pyhvd_reduce(address_of(job->dsts[0], s.from - p->starts[p->own], pyhvd_itemsize(job->dtype)),
                 blocks, (size_t)n, (size_t)(s.to - s.from), job->dtype, job->op, job->postscale);
}

static inline span span_of(const pyhvd_window *w, int64_t total, int64_t per_chunk, int64_t index) {
    span s = {index * per_chunk, MIN(total, (index + 1) * per_chunk), 0, 0};
    int64_t count = s.to - s.from;
    s.mine_from = s.from + count * w->rank / w->size;
    s.mine_to = s.from + count * (w->rank + 1) / w->size;
    return s;
}

/* Copy the elements of a chunk to its slot; see pack_range for `own`. */
static inline void pack_span(const pyhvd_job *job, size_t *walk, span s, uint8_t *slot, int own) {
    uint8_t *at = pack_range(job, walk, s.from, s.mine_from, slot, 0);
    at = pack_range(job, walk, s.mine_from, s.mine_to, at, own);
    pack_range(job, walk, s.mine_to, s.to, at, 0);
}

#endif
