/* Collectives that move bytes through the slots and reduce nothing; window.h states the
 * invariants. */
#include "window/layout.h"
#include "window/parts.h"

/* Store where blocks begin that lie one behind the other. */
static void find_starts(const int64_t *counts, int n, int64_t *starts) {
    int64_t at = 0;
    for (int q = 0; q < n; at += counts[q++]) starts[q] = at;
}

/* ---- moves: each rank has a lane, in its flat buffer or its slots ---- */

/* Copy the bytes [from, to) of this rank's lane to `at`. */
static void pack_lane(pyhvd_window *w, const pyhvd_job_cursor *c, int64_t from, int64_t to,
                      uint8_t *at, uint64_t number) {
    int64_t begin = pyhvd_trace_now(w->trace);
    copy_parts(c->local->sources, c->local->source_count, w->rank, from, to, at, c->source, 1);
    pyhvd_add_stage(w, PYHVD_PACKING, begin, number);
}

/* Copy the bytes [from, to) of a peer's lane from `at`, when the peer's counter has reached the value
 * behind `number`. */
static int unpack_lane(pyhvd_window *w, const pyhvd_job_cursor *c, int64_t from, int64_t to,
                       int peer, const uint8_t *at, int counter, uint64_t number) {
    const pyhvd_local_move *m = c->local;
    if (!has_parts(m->targets, m->target_count, peer, from, to)) return PYHVD_OK;
    int64_t waits = pyhvd_trace_now(w->trace);
    int status = pyhvd_await(w, peer, counter, number + 1);
    if (status) return status;
    int64_t begin = pyhvd_trace_now(w->trace);
    if (begin > waits)
        pyhvd_trace_add(w->trace, PYHVD_AWAITING, waits, 0, 0, number + 1, (uint32_t)peer);
    copy_parts(m->targets, m->target_count, peer, from, to, (uint8_t *)(uintptr_t)at, c->target, 0);
    pyhvd_add_stage(w, PYHVD_UNPACKING, begin, number);
    return PYHVD_OK;
}

static int move_flat(pyhvd_window *w, pyhvd_job_cursor *c) {
    int64_t all = c->local->longest;
    int status;
    if (!c->stage) {
        if ((status = pyhvd_await_free_flat(w))) return status;
        pack_lane(w, c, 0, all, flat_of(w, w->rank), w->flats);
        pyhvd_announce(w, FLATS, w->flats + 1);
        copy_own(c, c->local->own_bytes);
        c->stage = 1;
    }
    for (; c->stage < w->size; c->stage++) { /* each rank begins with a different peer */
        int q = (w->rank + c->stage) % w->size;
        if ((status = unpack_lane(w, c, 0, all, q, flat_of(w, q), FLATS, w->flats))) return status;
    }
    w->flats++;
    return PYHVD_OK;
}

/* Bytes of a lane in a chunk. A short lane is cut too, so that its owner packs while others unpack. */
static int64_t piece_of(const pyhvd_window *w, int64_t longest) {
    int64_t quarter = (longest / 4 + LINE) & ~(int64_t)(LINE - 1);
    return MIN(MAX(quarter, PYHVD_FLAT), (int64_t)w->chunk);
}

static int move_chunks(pyhvd_window *w, pyhvd_job_cursor *c) {
    const pyhvd_local_move *m = c->local;
    int64_t piece = piece_of(w, m->longest), count = (m->longest + piece - 1) / piece;
    int status;
    w->shift = 0;
    for (; c->step < count; c->step++, c->stage = 0) {
        int64_t from = c->step * piece, to = from + piece;
        uint64_t chunk = w->chunks + (uint64_t)c->step;
        if (!c->stage && m->source_count) {
            if ((status = pyhvd_await_free_slot(w, chunk))) return status;
            pack_lane(w, c, from, to, slot_of(w, w->rank, chunk), chunk);
            pyhvd_announce(w, PACKED, chunk + 1);
        }
        if (!c->stage && !c->step) copy_own(c, m->own_bytes);
        for (c->stage = MAX(c->stage, 1); c->stage < w->size; c->stage++) {
            int q = (w->rank + c->stage) % w->size;
            status = unpack_lane(w, c, from, to, q, slot_of(w, q, chunk), PACKED, chunk);
            if (status) return status;
        }
        pyhvd_announce(w, REDUCED, chunk + 1);
    }
    w->chunks += (uint64_t)count;
    return PYHVD_OK;
}

int pyhvd_move_proceed(pyhvd_window *w, pyhvd_job_cursor *c) {
    if (!c->local->longest) {
        copy_own(c, c->local->own_bytes);
        return PYHVD_OK;
    }
    return c->local->longest <= PYHVD_FLAT ? move_flat(w, c) : move_chunks(w, c);
}

void pyhvd_window_begin_move(pyhvd_job_cursor *cursor, const pyhvd_local_move *local,
                             const pyhvd_move *moves, size_t move_count, int64_t source,
                             int64_t target) {
    static const pyhvd_job bytes = {.dtype = PYHVD_UINT8};
    *cursor = (pyhvd_job_cursor){.job = &bytes,
                                 .local = local,
                                 .moves = moves,
                                 .move_count = move_count,
                                 .source = source,
                                 .target = target};
}

/* ---- other collectives, for calls that go by message ---- */

// cppcheck-suppress constParameterPointer - it is written by its address
int pyhvd_window_gather(pyhvd_window *w, const uint8_t *send, uint8_t *recv,
                        const int64_t *counts) {
    int64_t starts[PYHVD_MAX_LOCAL] = {0};
    pyhvd_part source = {w->rank, 0, counts[w->rank], 0}, targets[PYHVD_MAX_LOCAL];
    pyhvd_job_cursor cursor;
    find_starts(counts, w->size, starts);
    pyhvd_local_move move = {
        .sources = &source,
        .targets = targets,
        .source_count = counts[w->rank] > 0,
        .own_to = starts[w->rank],
        .own_bytes = counts[w->rank],
    };
    for (int q = 0; q < w->size; q++) {
        move.longest = MAX(move.longest, counts[q]);
        if (q != w->rank && counts[q])
            targets[move.target_count++] = (pyhvd_part){q, 0, counts[q], starts[q]};
    }
    w->interruptible = 0;
    pyhvd_window_begin_move(&cursor, &move, NULL, 0, (int64_t)(intptr_t)send,
                            (int64_t)(intptr_t)recv);
    return pyhvd_window_proceed(w, &cursor);
}

/* Store the largest of the ranks' values in all of them. */
static int largest(pyhvd_window *w, int64_t *value) {
    if (pyhvd_await_free_flat(w)) return PYHVD_ABORTED;
    memcpy(flat_of(w, w->rank), value, sizeof *value);
    pyhvd_announce(w, FLATS, w->flats + 1);
    for (int q = 0; q < w->size; q++) {
        int64_t theirs;
        if (q != w->rank && pyhvd_await(w, q, FLATS, w->flats + 1)) return PYHVD_ABORTED;
        memcpy(&theirs, flat_of(w, q), sizeof theirs);
        *value = MAX(*value, theirs);
    }
    w->flats++;
    return PYHVD_OK;
}

int pyhvd_window_barrier(pyhvd_window *w) {
    int64_t nothing = 0;
    return largest(w, &nothing);
}

int pyhvd_window_alltoall(pyhvd_window *w, const uint8_t *send, const int64_t *send_counts,
                          uint8_t *recv, const int64_t *recv_counts) {
    int64_t send_starts[PYHVD_MAX_LOCAL], recv_starts[PYHVD_MAX_LOCAL];
    int64_t part = (int64_t)(w->chunk / (size_t)w->size) & ~(int64_t)63, longest = 0;
    for (int q = 0; q < w->size; q++)
        if (q != w->rank) longest = MAX(longest, send_counts[q]);
    find_starts(send_counts, w->size, send_starts);
    find_starts(recv_counts, w->size, recv_starts);
    if (largest(w, &longest)) return PYHVD_ABORTED;
    memmove(recv + recv_starts[w->rank], send + send_starts[w->rank], (size_t)send_counts[w->rank]);
    for (int64_t from = 0; from < longest; from += part) {
        uint8_t *slot = slot_of(w, w->rank, w->chunks);
        if (pyhvd_await_free_slot(w, w->chunks)) return PYHVD_ABORTED;
        for (int q = 0; q < w->size; q++) {
            int64_t n = q == w->rank ? 0 : MIN(send_counts[q] - from, part);
            if (n > 0) memcpy(slot + q * part, send + send_starts[q] + from, (size_t)n);
        }
        pyhvd_announce(w, PACKED, w->chunks + 1);
        for (int k = 1; k < w->size; k++) {
            int q = (w->rank + k) % w->size;
            int64_t n = MIN(recv_counts[q] - from, part);
            const uint8_t *theirs = slot_of(w, q, w->chunks) + w->rank * part;
            if (pyhvd_await(w, q, PACKED, w->chunks + 1)) return PYHVD_ABORTED;
            if (n > 0) memcpy(recv + recv_starts[q] + from, theirs, (size_t)n);
        }
        pyhvd_announce(w, REDUCED, w->chunks + 1);
        w->chunks++;
    }
    return PYHVD_OK;
}

int pyhvd_window_exchange(pyhvd_window *w, int partner, const uint8_t *send, int64_t send_count,
                          uint8_t *recv, int64_t recv_count) {
    int64_t longest = send_count, chunk = (int64_t)w->chunk;
    if (largest(w, &longest)) return PYHVD_ABORTED;
    for (int64_t from = 0; from < longest; from += chunk) {
        int64_t out = MIN(send_count - from, chunk), in = MIN(recv_count - from, chunk);
        /* Any rank may read what the slot held before; from then on only the partner does. */
        if (from < w->slots * chunk && pyhvd_await_free_slot(w, w->chunks)) return PYHVD_ABORTED;
        if (from >= w->slots * chunk &&
            pyhvd_await(w, partner, REDUCED, w->chunks - (uint64_t)w->slots + 1))
            return PYHVD_ABORTED;
        if (out > 0) memcpy(slot_of(w, w->rank, w->chunks), send + from, (size_t)out);
        pyhvd_announce(w, PACKED, w->chunks + 1);
        if (pyhvd_await(w, partner, PACKED, w->chunks + 1)) return PYHVD_ABORTED;
        if (in > 0) memcpy(recv + from, slot_of(w, partner, w->chunks), (size_t)in);
        pyhvd_announce(w, REDUCED, w->chunks + 1);
        w->chunks++;
    }
    return PYHVD_OK;
}
