/* Reductions of which each rank gets a portion, among the ranks of one host; window.h states the
 * invariants.
 *
 * A chunk has a block for each rank, of the same room: the next elements of that rank's portion. Each
 * rank packs all blocks but its own, which it reads where it is, and reduces its block of all slots. The
 * order of the sums is that of an allreduce, so the bits are the same. */
#include "window/ranges.h"

/* Through the flat buffers: every rank packs all elements. */
static int scatter_flat(pyhvd_window *w, pyhvd_job_cursor *c) {
    const pyhvd_job *job = c->job;
    size_t item = pyhvd_itemsize(job->dtype);
    int64_t blocks[PYHVD_MAX_LOCAL], first = job->portions->starts[w->rank];
    int status = PYHVD_OK;
    if (!c->stage) {
        if ((status = pyhvd_await_free_flat(w))) return status;
        int64_t begin = pyhvd_trace_now(w->trace);
        pack_range(job, &c->packing, 0, job->starts[1], flat_of(w, w->rank), 0);
        pyhvd_add_stage(w, PYHVD_PACKING, begin, w->flats);
        pyhvd_announce(w, FLATS, w->flats + 1);
        c->stage = 1;
    }
    if ((status = pyhvd_await_all(w, FLATS, w->flats + 1))) return status;
    int64_t begin = pyhvd_trace_now(w->trace);
    for (int q = 0; q < w->size; q++)
        blocks[q] = (int64_t)(intptr_t)(flat_of(w, q) + (size_t)first * item);
    // cppcheck-suppress uninitvar - the first w->size elements are set
    reduce_block(job, block_of(job->portions, w->rank, job->starts[1], 0), blocks, w->size);
    pyhvd_add_stage(w, PYHVD_REDUCING, begin, w->flats);
    w->flats++;
    return PYHVD_OK;
}

static int pack_blocks(pyhvd_window *w, pyhvd_job_cursor *c, int64_t room, int64_t index) {
    uint64_t chunk = w->chunks + (uint64_t)index;
    size_t stride = (size_t)room * pyhvd_itemsize(c->job->dtype);
    int status = pyhvd_await_free_slot(w, chunk);
    if (status) return status;
    int64_t begin = pyhvd_trace_now(w->trace);
    for (int q = 0; q < w->size; q++) {
        span s = block_of(c->job->portions, q, room, index);
        pack_range(c->job, &c->packing, s.from, s.to,
                   slot_of(w, w->rank, chunk) + (size_t)q * stride, q == w->rank);
    }
    pyhvd_add_stage(w, PYHVD_PACKING, begin, chunk);
    pyhvd_announce(w, PACKED, chunk + 1);
    return PYHVD_OK;
}

static int reduce_blocks(pyhvd_window *w, const pyhvd_job_cursor *c, int64_t room, int64_t index) {
    const pyhvd_job *job = c->job;
    uint64_t chunk = w->chunks + (uint64_t)index;
    size_t item = pyhvd_itemsize(job->dtype), at = (size_t)w->rank * (size_t)room * item;
    span s = block_of(job->portions, w->rank, room, index);
    int64_t blocks[PYHVD_MAX_LOCAL];
    int status = pyhvd_await_all(w, PACKED, chunk + 1);
    if (status) return status;
    int64_t begin = pyhvd_trace_now(w->trace);
    for (int q = 0; q < w->size; q++) blocks[q] = (int64_t)(intptr_t)(slot_of(w, q, chunk) + at);
    if (job->srcs[0] && job->prescale == 1.0)
        blocks[w->rank] = (int64_t)(intptr_t)address_of(job->srcs[0], s.from, item);
    reduce_block(job, s, blocks, w->size);
    pyhvd_add_stage(w, PYHVD_REDUCING, begin, chunk);
    pyhvd_announce(w, REDUCED, chunk + 1);
    return PYHVD_OK;
}

int pyhvd_scatter_proceed(pyhvd_window *w, pyhvd_job_cursor *c) {
    size_t item = pyhvd_itemsize(c->job->dtype), line = w->chunk / (size_t)w->size / LINE * LINE;
    int64_t room = (int64_t)(MAX(line, 64) / item), longest = c->job->portions->longest;
    if ((size_t)c->job->starts[1] * item <= PYHVD_FLAT) return scatter_flat(w, c);
    int64_t count = (longest + room - 1) / room;
    w->shift = 0;
    /* While chunk k is packed, chunk k - 1 is reduced. */
    for (; c->step < count + 1; c->step++, c->stage = 0) {
        int status;
        if (!c->stage && c->step < count && (status = pack_blocks(w, c, room, c->step)))
            return status;
        c->stage = 1;
        if (c->step && (status = reduce_blocks(w, c, room, c->step - 1))) return status;
    }
    w->chunks += (uint64_t)count;
    return PYHVD_OK;
}
