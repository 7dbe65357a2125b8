/* Reductions through a window, and waiting in it; window.h states the invariants. */
#include "window/ranges.h"

#include "common/cpu_affinity.h"
#include "exchange/exchange.h"

/* Offset of the window slots from a cache line while they hold a single tensor. malloc's large
 * blocks begin 16 bytes after a line, so the tensor and its slot are then aligned alike. */
#define SHIFT 16
#define AHEAD 8192 /* prefetch distance (bytes) for lines that will be written: two blocks */

size_t pyhvd_window_area(size_t capacity, int slots) {
    /* Each slot has one more line, as room for the shift. */
    return sizeof(control) + 2 * PYHVD_FLAT + (size_t)slots * (capacity + LINE) + PYHVD_NOTE;
}

void pyhvd_window_clear(pyhvd_window *w) {
    w->spin_budget = PYHVD_YIELDS;
    w->left_core_ns = pyhvd_first_leave_ns(w->size);
    memset(w->area[w->rank], 0, pyhvd_window_area(w->capacity, w->slots));
}

/* ---- waiting and announcing ---- */

static inline int reached(const _Atomic uint64_t *counter, uint64_t value) {
    return atomic_load_explicit(counter, memory_order_acquire) >= value;
}

/* Leave a core that a peer works on, if another one is free. */
static void leave_shared_core(pyhvd_window *w) {
    uint32_t taken[PYHVD_MAX_LOCAL];
    int n = 0;
    for (int q = 0; q < w->size; q++)
        if (q != w->rank)
            taken[n++] = atomic_load_explicit(&control_of(w, q)->core, memory_order_relaxed);
    // cppcheck-suppress uninitvar - the first n elements are set
    pyhvd_leave_shared_core(taken, n, &w->left_core_ns, &control_of(w, w->rank)->core);
}

/* Sleep once; return PYHVD_LATER if the counter has not reached the value. */
static int nap_until(pyhvd_window *w, const _Atomic uint64_t *counter, uint64_t value) {
    control *mine = control_of(w, w->rank);
    uint32_t seen = atomic_load_explicit(&mine->bell, memory_order_acquire);
    atomic_store_explicit(&mine->asleep, PYHVD_SLEEPS, memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst);
    int64_t before = pyhvd_now();
    if (!reached(counter, value) && !pyhvd_window_is_aborted(w))
        pyhvd_futex_wait(&mine->bell, seen, PYHVD_NAP);
    w->spin_budget = pyhvd_next_spin_budget(w->spin_budget, pyhvd_now() - before);
    atomic_store_explicit(&mine->asleep, 0, memory_order_relaxed);
    leave_shared_core(w); /* the kernel may have placed this thread beside the one that woke it */
    if (reached(counter, value)) return PYHVD_OK;
    return pyhvd_window_is_aborted(w) ? PYHVD_ABORTED : PYHVD_LATER;
}

int pyhvd_await(pyhvd_window *w, int rank, int counter, uint64_t value) {
    const _Atomic uint64_t *theirs = &control_of(w, rank)->counters[counter].value;
    const _Atomic uint32_t *bell = &control_of(w, w->rank)->bell;
    int yields = w->never_yields ? PYHVD_YIELDS : w->spin_budget, status = PYHVD_LATER;
    do {
        for (int spin = 0; spin < PYHVD_SPINS; spin++) {
            if (reached(theirs, value)) return PYHVD_OK;
            pyhvd_pause();
        }
        leave_shared_core(w);
    } while (w->never_yields ? yields-- > 0 : pyhvd_yield(&yields));
    while (status == PYHVD_LATER) {
        uint32_t before = atomic_load_explicit(bell, memory_order_relaxed);
        status = nap_until(w, theirs, value);
        if (w->interruptible && before == atomic_load_explicit(bell, memory_order_relaxed)) break;
    }
    return status;
}

/* Record in the trace how long the wait took, and the last rank that was awaited. */
int pyhvd_await_all(pyhvd_window *w, int counter, uint64_t value) {
    int64_t begin = pyhvd_trace_now(w->trace);
    int status = PYHVD_OK, last = w->rank;
    for (int q = 0; q < w->size && !status; q++) {
        if (q == w->rank || reached(&control_of(w, q)->counters[counter].value, value)) continue;
        last = q;
        status = pyhvd_await(w, q, counter, value);
    }
    if (last != w->rank)
        pyhvd_trace_add(w->trace, PYHVD_AWAITING, begin, 0, 0, value, (uint32_t)last);
    return status;
}

/* Wake a rank if it sleeps; with `all`, each of its threads. */
static void wake(const pyhvd_window *w, int rank, int all) {
    control *peer = control_of(w, rank);
    uint32_t asleep = atomic_load_explicit(&peer->asleep, memory_order_relaxed);
    if (asleep == PYHVD_POLLS)
        pyhvd_ring_bell(w->exchange->bells[rank]);
    else if (asleep || all)
        pyhvd_futex_wake(&peer->bell, all);
}

void pyhvd_announce(const pyhvd_window *w, int counter, uint64_t value) {
    control *mine = control_of(w, w->rank);
    pyhvd_publish_core(&mine->core);
    atomic_store_explicit(&mine->counters[counter].value, value, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
    for (int q = 0; q < w->size; q++)
        if (q != w->rank) wake(w, q, 0);
}

int pyhvd_await_free_slot(pyhvd_window *w, uint64_t chunk) {
    uint64_t slots = (uint64_t)w->slots;
    return chunk < slots ? PYHVD_OK : pyhvd_await_all(w, REDUCED, chunk - slots + 1);
}

void pyhvd_window_abort(const pyhvd_window *w, const uint8_t *note, size_t bytes) {
    control *mine = control_of(w, w->rank);
    if (!mine->noted) {
        mine->note_bytes = (uint32_t)MIN(bytes, PYHVD_NOTE);
        memcpy(note_of(w, w->rank), note, mine->note_bytes);
        mine->noted = 1;
    }
    for (int q = 0; q < w->size; q++) {
        control *theirs = control_of(w, q);
        uint32_t nobody = 0;
        atomic_compare_exchange_strong_explicit(&theirs->aborted, &nobody, (uint32_t)w->rank + 1,
                                                memory_order_release, memory_order_relaxed);
        atomic_thread_fence(memory_order_seq_cst);
        wake(w, q, 1);
    }
}

const uint8_t *pyhvd_window_note(const pyhvd_window *w, size_t *bytes) {
    uint32_t by = atomic_load_explicit(&control_of(w, w->rank)->aborted, memory_order_acquire);
    if (!by) return NULL;
    *bytes = MIN(control_of(w, (int)by - 1)->note_bytes, PYHVD_NOTE);
    return note_of(w, (int)by - 1);
}

/* ---- reductions ---- */

/* Copy a block of the result to a peer. With each line, prefetch the line AHEAD bytes further on
 * both sides, if it is within the `left` bytes of that side. So copying overlaps with prefetching,
 * which takes longer. (A burst of prefetches before each reduction did not overlap, and saved no
 * time.) */
static inline void store_with_peer(uint8_t *there, size_t left_there, const uint8_t *here,
                                   size_t left_here, size_t length) {
    size_t j = 0;
    for (; j + PYHVD_PREFETCH_BYTES <= length; j += PYHVD_PREFETCH_BYTES) {
        if (j + AHEAD < left_there) __builtin_prefetch(there + j + AHEAD, 1, 3);
        if (j + AHEAD < left_here) __builtin_prefetch(here + j + AHEAD, 1, 3);
        memcpy(there + j, here + j, PYHVD_PREFETCH_BYTES);
    }
    memcpy(there + j, here + j, length - j);
}

/* Prefetch the second block: store_with_peer prefetches from the third one on. */
static inline void prefetch_second(const uint8_t *at, size_t bytes) {
    if (bytes > BLOCK) pyhvd_prefetch_for_writing(at + BLOCK, MIN(bytes, AHEAD) - BLOCK);
}

/* Reduce `bytes` bytes at `own` (this rank's) and theirs[q] (rank q's) into `out`, and store the
 * result at into[q] too, which may be theirs[q]. Each cache line of a peer then moves between cores
 * twice; it would move three times if the peer fetched the result. The next `more` bytes after
 * theirs[q] are needed afterwards, and may be prefetched. If `streamed`, the bytes go to `out`, and
 * to each into[q] that is not theirs[q], past the caches. */
static void reduce_bytes(const pyhvd_window *w, const pyhvd_job *job, const uint8_t *own,
                         uint8_t *out, uint8_t *const *theirs, uint8_t *const *into, size_t bytes,
                         size_t more, int streamed) {
    size_t item = pyhvd_itemsize(job->dtype);
    int inplace = own == out;
    int64_t from[PYHVD_MAX_LOCAL];
    _Alignas(PYHVD_PREFETCH_BYTES) uint8_t block[BLOCK];
    /* The first block ends at a cache line, so that the later blocks begin at one. */
    size_t length = BLOCK - (uintptr_t)out % PYHVD_PREFETCH_BYTES;
    length -= length % item;
    if (inplace) prefetch_second(own, bytes);
    for (size_t k = 0; k < bytes; k += length, length = BLOCK) {
        length = MIN(bytes - k, length);
        for (int q = 0; q < w->size; q++)
            from[q] = (int64_t)(intptr_t)((q == w->rank ? own : theirs[q]) + k);
        uint8_t *result = streamed ? block : out + k;
        pyhvd_reduce(result, from, (size_t)w->size, length / item, job->dtype, job->op,
                     job->postscale);
        size_t left = inplace ? bytes - k : 0;
        for (int q = 0; q < w->size; q++) {
            if (q == w->rank) continue;
            if (streamed && into[q] != theirs[q]) {
                pyhvd_stream_copy(into[q] + k, result, length);
                continue;
            }
            store_with_peer(into[q] + k, bytes - k + more, result, left, length);
            left = 0; /* the first peer's turn has prefetched `out` */
        }
        if (streamed) pyhvd_stream_copy(out + k, result, length);
    }
}

/* Reduce this rank's slice [from, to) of a chunk whose first element is `first`. */
static void reduce_range(const pyhvd_window *w, const pyhvd_job *job, size_t *walk, int64_t first,
                         int64_t from, int64_t to, uint64_t chunk) {
    size_t item = pyhvd_itemsize(job->dtype), at = (size_t)(from - first) * item;
    uint8_t *slots[PYHVD_MAX_LOCAL];
    for (int q = 0; q < w->size; q++) {
        slots[q] = slot_of(w, q, chunk) + at;
        if (q != w->rank) prefetch_second(slots[q], (size_t)(to - from) * item);
    }
    piece p;
    while (next_piece(job, walk, &from, to, &p)) {
        size_t bytes = (size_t)p.count * item;
        int64_t src = job->srcs[p.tensor], dst = job->dsts[p.tensor];
        uint8_t *mine = slots[w->rank];
        const uint8_t *own = src && job->prescale == 1.0 ? address_of(src, p.offset, item) : mine;
        uint8_t *out = dst ? address_of(dst, p.offset, item) : mine;
        if (!p.offset) prefetch_tensor(job, p.tensor, item);
        reduce_bytes(w, job, own, out, slots, slots, bytes, (size_t)(to - from) * item,
                     is_streamed(job, p.tensor));
        for (int q = 0; q < w->size; q++) slots[q] += bytes;
    }
}

/* Reduce through the flat buffers: every rank reduces all elements. */
static int reduce_flat(pyhvd_window *w, pyhvd_job_cursor *c) {
    const pyhvd_job *job = c->job;
    size_t item = pyhvd_itemsize(job->dtype);
    int64_t total = job->starts[job->n], from = 0, blocks[PYHVD_MAX_LOCAL];
    int status = PYHVD_OK;
    if (!c->stage) {
        if ((status = pyhvd_await_free_flat(w))) return status;
        int64_t begin = pyhvd_trace_now(w->trace);
        pack_range(job, &c->packing, 0, total, flat_of(w, w->rank), 0);
        pyhvd_add_stage(w, PYHVD_PACKING, begin, w->flats);
        pyhvd_announce(w, FLATS, w->flats + 1);
        c->stage = 1;
    }
    if ((status = pyhvd_await_all(w, FLATS, w->flats + 1))) return status;
    int64_t begin = pyhvd_trace_now(w->trace);
    piece p;
    for (int64_t at = 0; next_piece(job, &c->reducing, &from, total, &p); at += p.count) {
        for (int q = 0; q < w->size; q++)
            blocks[q] = (int64_t)(intptr_t)(flat_of(w, q) + (size_t)at * item);
        if (job->dsts[p.tensor])
            pyhvd_reduce(address_of(job->dsts[p.tensor], p.offset, item), blocks, (size_t)w->size,
                         (size_t)p.count, job->dtype, job->op, job->postscale);
    }
    pyhvd_add_stage(w, PYHVD_REDUCING, begin, w->flats);
    w->flats++;
    return PYHVD_OK;
}

static int pack_chunk(pyhvd_window *w, pyhvd_job_cursor *c, span s, uint64_t chunk) {
    int status = pyhvd_await_free_slot(w, chunk);
    if (status) return status;
    int64_t begin = pyhvd_trace_now(w->trace);
    pack_span(c->job, &c->packing, s, slot_of(w, w->rank, chunk), 1);
    pyhvd_add_stage(w, PYHVD_PACKING, begin, chunk);
    pyhvd_announce(w, PACKED, chunk + 1);
    return PYHVD_OK;
}

static int reduce_chunk(pyhvd_window *w, pyhvd_job_cursor *c, span s, uint64_t chunk) {
    int status = pyhvd_await_all(w, PACKED, chunk + 1);
    if (status) return status;
    int64_t begin = pyhvd_trace_now(w->trace);
    reduce_range(w, c->job, &c->reducing, s.from, s.mine_from, s.mine_to, chunk);
    pyhvd_add_stage(w, PYHVD_REDUCING, begin, chunk);
    pyhvd_announce(w, REDUCED, chunk + 1);
    return PYHVD_OK;
}

static int unpack_chunk(pyhvd_window *w, pyhvd_job_cursor *c, span s, uint64_t chunk) {
    size_t item = pyhvd_itemsize(c->job->dtype);
    const uint8_t *slot = slot_of(w, w->rank, chunk);
    int status = pyhvd_await_all(w, REDUCED, chunk + 1);
    if (status) return status;
    int64_t begin = pyhvd_trace_now(w->trace);
    unpack_range(c->job, &c->unpacking, s.from, s.mine_from, slot);
    unpack_range(c->job, &c->unpacking, s.mine_to, s.to,
                 slot + (size_t)(s.mine_to - s.from) * item);
    pyhvd_stream_fence(); /* for what reduce_chunk has stored, too */
    pyhvd_add_stage(w, PYHVD_UNPACKING, begin, chunk);
    return PYHVD_OK;
}

/* Where a rank reads and writes a tensor in its arena: bytes from the arena's begin. */
typedef struct {
    uint64_t src, dst;
} place;

/* Reduce this rank's share of every chunk in the arenas. Begin with the last chunk, because usually
 * the end of an array is still in the cache. */
static void reduce_shares(const pyhvd_window *w, const pyhvd_job *job) {
    size_t item = pyhvd_itemsize(job->dtype), walk = 0;
    int64_t total = job->starts[job->n], per_chunk = (int64_t)(w->chunk / item);
    uint8_t *theirs[PYHVD_MAX_LOCAL], *into[PYHVD_MAX_LOCAL];
    piece p;
    for (int64_t k = (total - 1) / per_chunk; k >= 0; k--) {
        span s = span_of(w, total, per_chunk, k);
        while (next_piece(job, &walk, &s.mine_from, s.mine_to, &p)) {
            for (int q = 0; q < w->size; q++) {
                const place *there = (const place *)slot_of(w, q, w->chunks) + p.tensor;
                theirs[q] = w->arena[q] + there->src + (size_t)p.offset * item;
                into[q] = w->arena[q] + there->dst + (size_t)p.offset * item;
                if (q != w->rank) prefetch_second(theirs[q], (size_t)p.count * item);
            }
            reduce_bytes(w, job, theirs[w->rank], into[w->rank], theirs, into,
                         (size_t)p.count * item, 0, is_streamed(job, p.tensor));
        }
    }
}

/* Reduce directly: tell the peers where the arrays are, reduce this rank's share, and wait until
 * the peers have reduced theirs. */
static int reduce_direct(pyhvd_window *w, pyhvd_job_cursor *c) {
    const pyhvd_job *job = c->job;
    uint64_t chunk = w->chunks;
    place *places = (place *)slot_of(w, w->rank, chunk);
    const uint8_t *arena = w->arena[w->rank];
    int status = PYHVD_OK;
    if (c->stage == 0) {
        if ((status = pyhvd_await_free_slot(w, chunk))) return status;
        for (size_t t = 0; t < job->n; t++)
            places[t] = (place){(uint64_t)(job->srcs[t] - (int64_t)(intptr_t)arena),
                                (uint64_t)(job->dsts[t] - (int64_t)(intptr_t)arena)};
        pyhvd_announce(w, PACKED, chunk + 1);
        c->stage = 1;
    }
    if (c->stage == 1) {
        if ((status = pyhvd_await_all(w, PACKED, chunk + 1))) return status;
        int64_t begin = pyhvd_trace_now(w->trace);
        reduce_shares(w, job);
        pyhvd_stream_fence();
        pyhvd_add_stage(w, PYHVD_REDUCING, begin, chunk);
        pyhvd_announce(w, REDUCED, chunk + 1);
        c->stage = 2;
    }
    if ((status = pyhvd_await_all(w, REDUCED, chunk + 1))) return status;
    w->chunks++;
    return PYHVD_OK;
}

void pyhvd_window_begin(pyhvd_job_cursor *cursor, const pyhvd_job *job) {
    memset(cursor, 0, sizeof *cursor);
    cursor->job = job;
}

/* Reduce among the ranks of one host. */
static int reduce_here(pyhvd_window *w, pyhvd_job_cursor *c) {
    size_t item = pyhvd_itemsize(c->job->dtype);
    int64_t total = c->job->starts[c->job->n], per_chunk = (int64_t)(w->chunk / item);
    int status = PYHVD_OK;
    if ((size_t)total * item <= PYHVD_FLAT) return reduce_flat(w, c);
    int direct = c->job->direct && c->job->n * sizeof(place) <= w->chunk;
    w->shift = c->job->n == 1 && !direct ? SHIFT : 0;
    if (direct) return reduce_direct(w, c);
    int64_t count = (total + per_chunk - 1) / per_chunk;
    /* Three stages overlap: while chunk k is packed, chunk k - 1 is reduced and chunk k - 2
     * unpacked. */
    for (; c->step < count + 2; c->step++, c->stage = 0) {
        for (; c->stage < 3; c->stage++) {
            int64_t k = c->step - c->stage;
            if (k < 0 || k >= count) continue;
            span s = span_of(w, total, per_chunk, k);
            uint64_t chunk = w->chunks + (uint64_t)k;
            if (c->stage == 0) status = pack_chunk(w, c, s, chunk);
            if (c->stage == 1) status = reduce_chunk(w, c, s, chunk);
            if (c->stage == 2) status = unpack_chunk(w, c, s, chunk);
            if (status) return status;
        }
    }
    w->chunks += (uint64_t)count;
    return PYHVD_OK;
}

int pyhvd_window_proceed(pyhvd_window *w, pyhvd_job_cursor *c) {
    if (c->local && !w->exchange) return pyhvd_move_proceed(w, c);
    if (!c->local && !c->job->starts[c->job->n]) return PYHVD_OK;
    if (w->exchange) return pyhvd_across_proceed(w, c);
    return c->job->portions ? pyhvd_scatter_proceed(w, c) : reduce_here(w, c);
}

int pyhvd_window_allreduce(pyhvd_window *w, const pyhvd_job *job) {
    pyhvd_job_cursor cursor;
    pyhvd_window_begin(&cursor, job);
    w->interruptible = 0;
    return pyhvd_window_proceed(w, &cursor);
}
