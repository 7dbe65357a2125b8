/* Reductions over several hosts of which each rank gets a portion; across.c has the stages.
 * exchange/exchange.h states the invariants of the frames, window.h those of the counters.
 *
 * A chunk has a block for each host and slice, of the same room: the next elements of the portion of a
 * rank there, which goes with the slice (pyhvd_portions). Each owner of a slice reduces its blocks of all
 * local ranks' slots, and sends each host its block: so a portion crosses once from each host to its
 * rank, which reduces the hosts' partial results. The order of the sums is that of an allreduce.
 *
 *   1. pack      copy the blocks that other local ranks reduce                   -> counter PACKED
 *   2. reduce    the own slices' blocks, into the own slot; then the exchange begins
 *   3. exchange  partial results of the own portion arrive in boxes
 *   4. unpack    reduce them into the result; the own slot is no longer sent     -> counter TAKEN
 *
 * Invariants
 *   1. A rank packs chunk c when all local ranks have taken chunk c - slots. By then they have reduced
 *      what they read in its slot, and it has sent what lies there.
 *   2. The boxes of chunk c - PYHVD_DEPTH are free when chunk c begins: a rank packs it after it has taken
 *      that one.
 *   3. A rank that is alone on its host packs only scaled elements: it sends the others where they are. */
#include "exchange/exchange.h"
#include "window/ranges.h"

#define ALIGNED 16 /* the largest item of a tensor */

/* How a job is cut: bytes between two blocks of a slot, elements of a block, chunks. */
typedef struct {
    size_t stride;
    int64_t room, count;
} cut;

static cut cut_of(const pyhvd_window *w, const pyhvd_job *job) {
    const pyhvd_exchange *e = w->exchange;
    size_t stride = w->chunk / (size_t)(e->hosts * e->slices) & ~(size_t)(ALIGNED - 1);
    int64_t room = (int64_t)(stride / pyhvd_itemsize(job->dtype));
    return (cut){stride, room, (job->portions->longest + room - 1) / room};
}

/* The set rank whose portion goes to a host with a slice; -1: none. */
static int64_t taker_of(const pyhvd_exchange *e, const pyhvd_job *job, int host, int slice) {
    return job->portions->by_slice[host * e->slices + slice];
}

/* Where a local rank has the block for a host and slice. */
static uint8_t *block_in(const pyhvd_window *w, int rank, uint64_t chunk, int host, int slice,
                         size_t stride) {
    return slot_of(w, rank, chunk) + (size_t)(host * w->exchange->slices + slice) * stride;
}

static int pack_next(const pyhvd_window *w, pyhvd_job_cursor *c, cut all) {
    const pyhvd_exchange *e = w->exchange;
    int64_t index = c->next[PACK];
    uint64_t chunk = w->chunks + (uint64_t)index, slots = (uint64_t)w->slots;
    if (index == all.count || index - c->next[UNPACK] >= PYHVD_DEPTH ||
        (chunk >= slots && !all_reached(w, TAKEN, chunk - slots + 1)))
        return NOTHING;
    for (int g = 0; g < e->hosts; g++)
        for (int k = 0; k < e->slices; k++) {
            int64_t taker = taker_of(e, c->job, g, k);
            if (taker < 0) continue;
            int own = k >= e->first && k < e->first + e->owned;
            span s = block_of(c->job->portions, taker, all.room, index);
            pack_range(c->job, &c->packing, s.from, s.to,
                       block_in(w, w->rank, chunk, g, k, all.stride), own);
        }
    if (w->size > 1) pyhvd_announce(w, PACKED, chunk + 1);
    c->next[PACK]++;
    return MOVED;
}

/* Where this host's partial result of a block lies, for the owner of its slice. */
static uint8_t *partial_of(const pyhvd_window *w, const pyhvd_job *job, span s, uint8_t *block) {
    if (w->size > 1 || !job->srcs[0] || job->prescale != 1.0) return block;
    return address_of(job->srcs[0], s.from, pyhvd_itemsize(job->dtype));
}

/* Reduce the block of an own slice for a host; return the partial result, of no bytes if there is no
 * such block. */
static pyhvd_place reduce_partial(const pyhvd_window *w, const pyhvd_job *job, uint64_t chunk,
                                  int64_t index, int host, int slice, cut all) {
    int64_t taker = taker_of(w->exchange, job, host, slice);
    if (taker < 0) return (pyhvd_place){NULL, 0};
    size_t item = pyhvd_itemsize(job->dtype);
    span s = block_of(job->portions, taker, all.room, index);
    uint8_t *mine = block_in(w, w->rank, chunk, host, slice, all.stride);
    if (w->size > 1 && s.from < s.to) {
        int64_t blocks[PYHVD_MAX_LOCAL];
        for (int q = 0; q < w->size; q++)
            blocks[q] = (int64_t)(intptr_t)block_in(w, q, chunk, host, slice, all.stride);
        if (job->srcs[0] && job->prescale == 1.0)
            blocks[w->rank] = (int64_t)(intptr_t)address_of(job->srcs[0], s.from, item);
        pyhvd_reduce(mine, blocks, (size_t)w->size, (size_t)(s.to - s.from), job->dtype, job->op,
                     1.0);
    }
    return (pyhvd_place){partial_of(w, job, s, mine), (size_t)(s.to - s.from) * item};
}

static int reduce_next(const pyhvd_window *w, pyhvd_job_cursor *c, cut all) {
    const pyhvd_exchange *e = w->exchange;
    const pyhvd_job *job = c->job;
    int64_t index = c->next[REDUCE];
    uint64_t chunk = w->chunks + (uint64_t)index;
    if (index == c->next[PACK] || !all_reached(w, PACKED, chunk + 1)) return NOTHING;
    span mine = block_of(job->portions, job->portions->own, all.room, index);
    size_t bytes = (size_t)(mine.to - mine.from) * pyhvd_itemsize(job->dtype);
    for (int own = 0; own < e->owned; own++) {
        pyhvd_place out[PYHVD_MAX_HOSTS] = {0}, in[PYHVD_MAX_HOSTS] = {0};
        for (int g = 0; g < e->hosts; g++) {
            pyhvd_place partial = reduce_partial(w, job, chunk, index, g, e->first + own, all);
            if (g == e->host) continue;
            out[g] = partial;
            if (!own) in[g] = (pyhvd_place){pyhvd_exchange_box(e, chunk, own, g), bytes};
        }
        pyhvd_exchange_begin_move(e, chunk, own, out, in);
    }
    pyhvd_begin_stretch(w, PYHVD_EXCHANGING);
    c->next[REDUCE]++;
    return MOVED;
}

static int unpack_next(const pyhvd_window *w, pyhvd_job_cursor *c, cut all) {
    const pyhvd_exchange *e = w->exchange;
    int64_t index = c->next[UNPACK], blocks[PYHVD_MAX_HOSTS];
    uint64_t chunk = w->chunks + (uint64_t)index;
    if (index == c->next[EXCHANGE]) return NOTHING;
    span s = block_of(c->job->portions, c->job->portions->own, all.room, index);
    uint8_t *own = block_in(w, w->rank, chunk, e->host, e->first, all.stride);
    for (int g = 0; g < e->hosts; g++)
        blocks[g] = (int64_t)(intptr_t)pyhvd_exchange_box(e, chunk, 0, g);
    blocks[e->host] = (int64_t)(intptr_t)partial_of(w, c->job, s, own);
    reduce_block(c->job, s, blocks, e->hosts);
    if (w->size > 1) pyhvd_announce(w, TAKEN, chunk + 1);
    c->next[UNPACK]++;
    return MOVED;
}

int pyhvd_scatter_advance(pyhvd_window *w, pyhvd_job_cursor *c) {
    cut all = cut_of(w, c->job);
    int moved = pack_next(w, c, all) | reduce_next(w, c, all);
    int exchanged = pyhvd_across_exchange(w, c);
    if (exchanged < 0) return exchanged;
    moved |= exchanged | unpack_next(w, c, all);
    if (c->next[UNPACK] < all.count) return moved;
    w->chunks += (uint64_t)all.count;
    return ENDED;
}
