/* Reductions over several hosts: the window's ranks among themselves, and the exchange between
 * hosts; exchange/exchange.h states the invariants, window.h those of the counters.
 *
 * A chunk goes through four stages. A stage takes the chunks in order, and a rank advances whichever
 * stage can go on:
 *
 *   1. pack      copy into the own slot what local peers reduce            -> counter PACKED
 *   2. reduce    the own slices of all local ranks, into the own slot; then the exchange begins
 *   3. exchange  ends in any order, and is announced in order of chunks   -> counter REDUCED
 *   4. unpack    copy the results out of the owners' slots                -> counter TAKEN
 *
 * A slot is packed again when all local ranks have taken its last chunk. A rank that is alone on its
 * host neither packs nor unpacks a chunk that lies within one tensor: it exchanges the tensor's own
 * memory. */
#include "window/ranges.h"

#include <poll.h>

#include "exchange/exchange.h"

/* Yields before a sleep. In a prototype, fewer, or spinning before each, was slower where ranks share
 * cores. */
#define ACROSS_YIELDS 200
#define SHORT_WAIT 8 /* yields that are not counted as a wait */
/* Sleeps over MPI, which has no descriptor to poll: the first one, and the longest (ns). */
#define MPI_NAP 20000
#define MPI_NAP_MOST 1000000

/* The chunks of a job. */
typedef struct {
    int64_t total, per_chunk, count;
} chunks;

static chunks chunks_of(const pyhvd_window *w, const pyhvd_job *job) {
    chunks k = {job->starts[job->n], (int64_t)(w->chunk / pyhvd_itemsize(job->dtype)), 0};
    k.count = (k.total + k.per_chunk - 1) / k.per_chunk;
    return k;
}

/* The elements of a chunk, and those that a local rank owns. */
static span owned_span(const pyhvd_window *w, chunks all, int64_t index, int rank) {
    const pyhvd_exchange *e = w->exchange;
    span s = {index * all.per_chunk, MIN(all.total, (index + 1) * all.per_chunk), 0, 0};
    int64_t n = s.to - s.from;
    s.mine_from = s.from + n * pyhvd_first_slice(e, rank, w->size) / e->slices;
    s.mine_to = s.from + n * pyhvd_first_slice(e, rank + 1, w->size) / e->slices;
    return s;
}

/* On a rank that is alone on its host: return the address (of `bases`: srcs or dsts) of the chunk's
 * elements if they lie within one tensor, and need no scaling before; else NULL. */
static uint8_t *whole_chunk(const pyhvd_window *w, const pyhvd_job *job, size_t *walk, span s,
                            const int64_t *bases) {
    piece p;
    if (w->size > 1 || job->prescale != 1.0) return NULL;
    int64_t from = s.from;
    if (!next_piece(job, walk, &from, s.to, &p) || from < s.to || !bases[p.tensor]) return NULL;
    return address_of(bases[p.tensor], p.offset, pyhvd_itemsize(job->dtype));
}

/* ---- the trace: a rank's time between its stages ----
 *
 * While frames are under way, the time is the exchange's. Otherwise the rank waits for local ranks. */

#define STRETCH_NS 1000 /* shorter ones are not recorded */

void pyhvd_begin_stretch(const pyhvd_window *w, uint32_t kind) {
    pyhvd_exchange *e = w->exchange;
    if (!pyhvd_traced(w->trace) || e->trace_begin) return;
    e->trace_kind = kind;
    e->trace_bytes = pyhvd_exchange_bytes(e);
    e->trace_begin = pyhvd_now();
}

/* End the stretch; return the time, or 0 if nothing is recorded. */
static int64_t end_stretch(const pyhvd_window *w) {
    pyhvd_exchange *e = w->exchange;
    int64_t now = pyhvd_trace_now(w->trace), begin = e->trace_begin;
    e->trace_begin = 0;
    if (!begin || now - begin < STRETCH_NS) return now;
    if (e->trace_kind == PYHVD_AWAITING)
        pyhvd_trace_add(w->trace, PYHVD_AWAITING, begin, 0, 0, 0, UINT32_MAX);
    else
        pyhvd_trace_add(w->trace, PYHVD_EXCHANGING, begin, 0, 0,
                        pyhvd_exchange_bytes(e) - e->trace_bytes, e->numbers[e->last]);
    return now;
}

static void add_stage(pyhvd_window *w, uint32_t kind, int64_t begin, uint64_t chunk) {
    pyhvd_add_stage(w, kind, begin, chunk);
    if (begin && pyhvd_exchange_waits(w->exchange)) pyhvd_begin_stretch(w, PYHVD_EXCHANGING);
}

/* ---- stages ---- */

static int pack_next(pyhvd_window *w, pyhvd_job_cursor *c, chunks all) {
    int64_t k = c->next[PACK];
    uint64_t chunk = w->chunks + (uint64_t)k;
    if (k == all.count || k - c->next[UNPACK] >= PYHVD_DEPTH ||
        (chunk >= (uint64_t)w->slots && !all_reached(w, TAKEN, chunk - (uint64_t)w->slots + 1)))
        return NOTHING;
    span s = owned_span(w, all, k, w->rank);
    int alone = w->size == 1;
    if (!whole_chunk(w, c->job, &c->packing, s, c->job->srcs)) {
        int64_t begin = end_stretch(w);
        pack_span(c->job, &c->packing, s, slot_of(w, w->rank, chunk), !alone);
        add_stage(w, PYHVD_PACKING, begin, chunk);
    }
    if (!alone) pyhvd_announce(w, PACKED, chunk + 1);
    c->next[PACK]++;
    return MOVED;
}

/* Reduce the own range of the local ranks into the own slot. */
static void reduce_partial(const pyhvd_window *w, pyhvd_job_cursor *c, span s, uint64_t chunk) {
    const pyhvd_job *job = c->job;
    size_t item = pyhvd_itemsize(job->dtype), at = (size_t)(s.mine_from - s.from) * item;
    int64_t blocks[PYHVD_MAX_LOCAL];
    piece p;
    while (next_piece(job, &c->reducing, &s.mine_from, s.mine_to, &p)) {
        int64_t src = job->srcs[p.tensor];
        for (int q = 0; q < w->size; q++)
            blocks[q] = (int64_t)(intptr_t)(slot_of(w, q, chunk) + at);
        uint8_t *out = slot_of(w, w->rank, chunk) + at;
        if (src && job->prescale == 1.0)
            blocks[w->rank] = (int64_t)(intptr_t)address_of(src, p.offset, item);
        pyhvd_reduce(out, blocks, (size_t)w->size, (size_t)p.count, job->dtype, job->op, 1.0);
        at += (size_t)p.count * item;
    }
}

static int reduce_next(pyhvd_window *w, pyhvd_job_cursor *c, chunks all) {
    const pyhvd_exchange *e = w->exchange;
    int64_t k = c->next[REDUCE];
    uint64_t chunk = w->chunks + (uint64_t)k;
    if (k == c->next[PACK] || !all_reached(w, PACKED, chunk + 1)) return NOTHING;
    span s = owned_span(w, all, k, w->rank);
    int64_t n = s.to - s.from;
    size_t item = pyhvd_itemsize(c->job->dtype), walk = c->reducing;
    if (w->size > 1) {
        int64_t begin = end_stretch(w);
        reduce_partial(w, c, s, chunk);
        pyhvd_add_stage(w, PYHVD_REDUCING, begin, chunk);
    }
    uint8_t *slot = slot_of(w, w->rank, chunk);
    uint8_t *in = whole_chunk(w, c->job, &walk, s, c->job->srcs);
    uint8_t *out = whole_chunk(w, c->job, &walk, s, c->job->dsts);
    for (int own = 0; own < e->owned; own++) {
        int64_t from = n * (e->first + own) / e->slices, to = n * (e->first + own + 1) / e->slices;
        size_t at = (size_t)from * item;
        pyhvd_exchange_begin(e, c->job, chunk, own, (in ? in : slot) + at, (out ? out : slot) + at,
                             to - from);
    }
    pyhvd_begin_stretch(w, PYHVD_EXCHANGING);
    c->next[REDUCE]++;
    return MOVED;
}

int pyhvd_across_exchange(pyhvd_window *w, pyhvd_job_cursor *c) {
    uint64_t from = w->chunks + (uint64_t)c->next[EXCHANGE];
    uint64_t to = w->chunks + (uint64_t)c->next[REDUCE];
    int moved = pyhvd_exchange_progress(w->exchange, c->job, from, to);
    if (moved < 0) return moved;
    for (; from < to && pyhvd_exchange_has_ended(w->exchange, from); from++, moved = MOVED) {
        c->next[EXCHANGE]++;
        if (w->size > 1) pyhvd_announce(w, REDUCED, from + 1);
    }
    if (from == to && w->exchange->trace_kind == PYHVD_EXCHANGING) end_stretch(w);
    return moved;
}

static int unpack_next(pyhvd_window *w, pyhvd_job_cursor *c, chunks all) {
    int64_t k = c->next[UNPACK];
    uint64_t chunk = w->chunks + (uint64_t)k;
    if (k == c->next[EXCHANGE] || !all_reached(w, REDUCED, chunk + 1)) return NOTHING;
    size_t item = pyhvd_itemsize(c->job->dtype);
    int64_t begin = end_stretch(w);
    if (!whole_chunk(w, c->job, &c->unpacking, owned_span(w, all, k, w->rank), c->job->dsts))
        for (int q = 0; q < w->size; q++) {
            span s = owned_span(w, all, k, q);
            unpack_range(c->job, &c->unpacking, s.mine_from, s.mine_to,
                         slot_of(w, q, chunk) + (size_t)(s.mine_from - s.from) * item);
        }
    pyhvd_stream_fence();
    add_stage(w, PYHVD_UNPACKING, begin, chunk);
    if (w->size > 1) pyhvd_announce(w, TAKEN, chunk + 1);
    c->next[UNPACK]++;
    pyhvd_exchange_time(w->exchange, c->next[UNPACK], all.count, w->chunk);
    return MOVED;
}

static int advance_chunks(pyhvd_window *w, pyhvd_job_cursor *c) {
    chunks all = chunks_of(w, c->job);
    int moved = pack_next(w, c, all) | reduce_next(w, c, all);
    int exchanged = pyhvd_across_exchange(w, c);
    if (exchanged < 0) return exchanged;
    moved |= exchanged | unpack_next(w, c, all);
    if (c->next[UNPACK] < all.count) return moved;
    w->chunks += (uint64_t)all.count;
    return ENDED;
}

/* At most PYHVD_FLAT bytes: each rank packs all into its flat buffer, reduces all local flat
 * buffers, and sends the partial result to all hosts. */
static int advance_flat(pyhvd_window *w, pyhvd_job_cursor *c) {
    pyhvd_exchange *e = w->exchange;
    const pyhvd_job *job = c->job;
    size_t item = pyhvd_itemsize(job->dtype);
    int64_t total = job->starts[job->n], blocks[MAX(PYHVD_MAX_LOCAL, PYHVD_MAX_HOSTS)];
    int64_t parts[PYHVD_MAX_HOSTS];
    piece p;
    if (c->stage == PACK) {
        uint8_t *to = w->size > 1 ? flat_of(w, w->rank) : e->flat_partial;
        pack_range(job, &c->packing, 0, total, to, 0);
        if (w->size > 1) pyhvd_announce(w, FLATS, w->flats + 1);
        c->stage = REDUCE;
    }
    if (c->stage == REDUCE) {
        /* Look at the links too: unread bytes would end each sleep at once. */
        if (!all_reached(w, FLATS, w->flats + 1)) return pyhvd_exchange_progress(e, job, 0, 0);
        for (int q = 0; q < w->size; q++) blocks[q] = (int64_t)(intptr_t)flat_of(w, q);
        end_stretch(w);
        if (w->size > 1)
            pyhvd_reduce(e->flat_partial, blocks, (size_t)w->size, (size_t)total, job->dtype,
                         job->op, 1.0);
        pyhvd_exchange_begin_flat(e, w->flats, (size_t)total * item);
        pyhvd_begin_stretch(w, PYHVD_EXCHANGING);
        c->stage = EXCHANGE;
    }
    int moved = pyhvd_exchange_progress(e, job, 0, 0);
    if (moved < 0 || !pyhvd_exchange_flat_ended(e)) return moved;
    end_stretch(w);
    pyhvd_exchange_flat_parts(e, parts);
    int64_t first = job->portions ? job->portions->starts[job->portions->own] : 0;
    int64_t end = job->portions ? job->portions->starts[job->portions->own + 1] : total;
    for (int64_t from = first, at = first; next_piece(job, &c->reducing, &from, end, &p);
         at = from) {
        for (int g = 0; g < e->hosts; g++) blocks[g] = parts[g] + at * (int64_t)item;
        if (job->dsts[p.tensor])
            pyhvd_reduce(address_of(job->dsts[p.tensor], p.offset - first, item), blocks,
                         (size_t)e->hosts, (size_t)p.count, job->dtype, job->op, job->postscale);
    }
    w->flats++;
    return ENDED;
}

static int is_move(const pyhvd_job_cursor *c) { return c->local || c->moves; }

static int advance(pyhvd_window *w, pyhvd_job_cursor *c) {
    if (is_move(c)) return pyhvd_move_advance(w, c);
    size_t bytes = (size_t)c->job->starts[c->job->n] * pyhvd_itemsize(c->job->dtype);
    if (bytes <= PYHVD_FLAT) return advance_flat(w, c);
    return c->job->portions ? pyhvd_scatter_advance(w, c) : advance_chunks(w, c);
}

/* List what can end a sleep; return the number of descriptors. A link that stands still is left
 * out: it would wake this rank again and again. */
static nfds_t list_polls(const pyhvd_exchange *e, int bell, struct pollfd *polls) {
    nfds_t n = 0;
    polls[n++] = (struct pollfd){.fd = bell, .events = POLLIN};
    for (int k = 0; k < e->owned * e->hosts; k++) {
        const pyhvd_link *link = &e->links[k];
        if (k % e->hosts == e->host || link->error || link->mpi) continue;
        short events = pyhvd_link_stands_still(link) ? 0 : POLLIN;
        if (pyhvd_link_has_unsent(link)) events |= POLLOUT;
        if (events) polls[n++] = (struct pollfd){.fd = link->fd, .events = events};
    }
    return n;
}

/* Whether another host is known to be lost; its links may merely be silent. */
static int is_host_lost(const pyhvd_exchange *e) {
    return e->lost_host && atomic_load_explicit(e->lost_host, memory_order_acquire) != 0;
}

/* Sleep until a link or a local rank has news, or over MPI for a short time. */
static void nap(pyhvd_exchange *e, int bell, int64_t ns) {
    nfds_t n = list_polls(e, bell, e->polls);
    if (e->mpi) pyhvd_nap(ns);
    poll(e->polls, n, e->mpi ? 0 : (int)(ns / 1000000));
    if (e->polls[0].revents) pyhvd_empty_bell(bell);
    if (e->mpi) pyhvd_exchange_look(e);
}

/* Sleep until a link or a local rank has news; return as `advance` does. First set `asleep`, then
 * look again: a local rank that announces later finds the flag set, and rings the bell. */
static int sleep_for_news(pyhvd_window *w, pyhvd_job_cursor *c) {
    control *mine = control_of(w, w->rank);
    pyhvd_exchange *e = w->exchange;
    atomic_store_explicit(&mine->asleep, PYHVD_POLLS, memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst);
    int status = advance(w, c);
    int64_t ns = e->mpi ? MPI_NAP : PYHVD_NAP;
    for (int64_t left = PYHVD_NAP; left > 0 && status == NOTHING; left -= ns) {
        if (pyhvd_window_is_aborted(w) || is_host_lost(e)) break;
        nap(e, e->bells[w->rank], ns);
        status = advance(w, c);
        if (e->mpi) ns = MIN(2 * ns, MPI_NAP_MOST);
    }
    atomic_store_explicit(&mine->asleep, 0, memory_order_relaxed);
    if (status != NOTHING) return status;
    if (pyhvd_window_is_aborted(w)) return PYHVD_ABORTED;
    return is_host_lost(e) ? PYHVD_LOST : NOTHING;
}

/* Note that this rank waits for other hosts, after so many yields; read the clock only if the wait is
 * not a short one. */
static void note_wait(pyhvd_exchange *e, int yielded, int left) {
    e->waited = 1;
    if (!e->idle_since && (yielded >= SHORT_WAIT || left <= 0)) e->idle_since = pyhvd_now();
}

int pyhvd_across_proceed(pyhvd_window *w, pyhvd_job_cursor *c) {
    pyhvd_exchange *e = w->exchange;
    const int most = w->never_yields ? 0 : ACROSS_YIELDS;
    int yields = most, status = NOTHING;
    while (status == NOTHING || status == MOVED) {
        status = advance(w, c);
        if (status != NOTHING) {
            pyhvd_exchange_end_wait(e);
            yields = most;
            continue;
        }
        if (pyhvd_exchange_waits(e))
            note_wait(e, most - yields, yields);
        else if (!is_move(c) && !c->job->portions) /* these record their exchange alone */
            pyhvd_begin_stretch(w, PYHVD_AWAITING);
        if (yields-- > 0) {
            sched_yield();
            continue;
        }
        status = sleep_for_news(w, c);
        if (status != NOTHING) pyhvd_exchange_end_wait(e);
        if (status == NOTHING && w->interruptible) return PYHVD_LATER;
    }
    if (status != ENDED) return status;
    pyhvd_exchange_count(e);
    return PYHVD_OK;
}
