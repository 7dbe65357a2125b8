/* Collectives that move bytes and reduce nothing, through the slots or by reading the memory of peers;
 * window.h states the invariants. */
#include "common/peer_memory.h"
#include "window/layout.h"
#include "window/parts.h"

#define SINGLE 262144       /* bytes up to which a single lane is read where it is */
#define SINGLE_HELD 4194304 /* the same if it is in the arena */

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
    copy_parts(c->local->sources, c->local->source_count, w->rank, from, to, at, c->source,
               INTO_LANE);
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
    copy_parts(m->targets, m->target_count, peer, from, to, (uint8_t *)(uintptr_t)at, c->target,
               way_out(c, m->longest));
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

static int comes_in_chunks(const pyhvd_job_cursor *c, int rank) {
    return (int)(c->in_chunks[rank / 64] >> (rank % 64) & 1);
}

static void note_chunks(pyhvd_job_cursor *c, int rank) {
    c->in_chunks[rank / 64] |= (uint64_t)1 << (rank % 64);
}

/* Whether the ends of this rank's source can be read as peers read it; a device's memory may not be. */
static int is_readable(const pyhvd_job_cursor *c) {
    const pyhvd_local_move *m = c->local;
    const pyhvd_part *first = m->sources, *last = m->sources + m->source_count - 1;
    const int64_t at[2] = {c->source + first->address, c->source + last->address + last->bytes - 1};
    uint8_t byte;
    for (int k = 0; k < 2; k++)
        if (!pyhvd_read_process((int32_t)getpid(), &byte, (uint64_t)at[k], 1)) return 0;
    return 1;
}

/* Where a rank's source is, as it tells its peers. */
typedef struct {
    uint64_t address; /* in its process; 0: its lane comes in chunks */
    uint64_t held;    /* 1 + the offset in its arena, which they have mapped; 0: it is elsewhere */
} source_place;

/* A single long lane is faster in chunks: its owner copies one while the others copy the one before. */
static source_place find_source(const pyhvd_window *w, const pyhvd_job_cursor *c) {
    const pyhvd_local_move *m = c->local;
    int64_t offset = c->source - (int64_t)(intptr_t)w->arena[w->rank];
    int is_held = offset >= 0 && offset < w->arena_bytes;
    int is_single = m->total <= m->longest;
    if ((is_single && m->longest > (is_held ? SINGLE_HELD : SINGLE)) ||
        (!is_held && !is_readable(c)))
        return (source_place){0, 0};
    return (source_place){(uint64_t)c->source, is_held ? (uint64_t)offset + 1 : 0};
}

/* Copy this rank's targets out of a peer's source; return 0 if it cannot be read. */
static int read_source(const pyhvd_window *w, const pyhvd_job_cursor *c, int peer,
                       source_place place) {
    const pyhvd_local_move *m = c->local;
    const uint8_t *mapped = place.held ? w->arena[peer] + (place.held - 1) : NULL;
    int streamed = way_out(c, m->longest) == PAST_CACHES;
    size_t k = first_part(m->targets, m->target_count, peer, 0);
    for (; k < m->target_count && m->targets[k].lane == peer; k++) {
        void *to = (void *)(intptr_t)(c->target + m->targets[k].address);
        size_t bytes = (size_t)m->targets[k].bytes;
        if (mapped)
            pyhvd_copy(to, mapped + m->origins[k], bytes, streamed);
        else if (!pyhvd_read_peer(w->pids[peer], to, place.address + (uint64_t)m->origins[k],
                                  bytes))
            return 0;
    }
    pyhvd_stream_fence();
    return 1;
}

/* Before the chunks of a move, in a chunk of its own, each rank tells where its source is, and reads
 * the others' sources. A peer that cannot be read has ended: this rank waits until the window is
 * aborted. */
static int read_peers(pyhvd_window *w, pyhvd_job_cursor *c) {
    const pyhvd_local_move *m = c->local;
    uint64_t chunk = w->chunks;
    int status;
    if (!c->heard && m->source_count) {
        if ((status = pyhvd_await_free_slot(w, chunk))) return status;
        source_place own = find_source(w, c);
        if (!own.address) note_chunks(c, w->rank);
        memcpy(slot_of(w, w->rank, chunk), &own, sizeof own);
        pyhvd_announce(w, PACKED, chunk + 1);
    }
    if (!c->heard) copy_own(c, m->own_bytes);
    for (c->heard = MAX(c->heard, 1); c->heard < w->size; c->heard++) {
        int q = (w->rank + c->heard) % w->size;
        source_place theirs;
        if (!has_parts(m->targets, m->target_count, q, 0, m->longest)) continue;
        if ((status = pyhvd_await(w, q, PACKED, chunk + 1))) return status;
        int64_t begin = pyhvd_trace_now(w->trace);
        memcpy(&theirs, slot_of(w, q, chunk), sizeof theirs);
        if (!theirs.address)
            note_chunks(c, q);
        else if (!read_source(w, c, q, theirs))
            return pyhvd_await(w, q, PACKED, UINT64_MAX);
        pyhvd_add_stage(w, PYHVD_UNPACKING, begin, chunk);
    }
    return PYHVD_OK;
}

/* Through the slots, the lanes that no rank reads where they are. */
static int move_chunks(pyhvd_window *w, pyhvd_job_cursor *c, uint64_t first, int64_t count,
                       int64_t piece) {
    const pyhvd_local_move *m = c->local;
    int status;
    for (; c->step < count; c->step++, c->stage = 0) {
        int64_t from = c->step * piece, to = from + piece;
        uint64_t chunk = first + (uint64_t)c->step;
        if (!c->stage && m->source_count && comes_in_chunks(c, w->rank)) {
            if ((status = pyhvd_await_free_slot(w, chunk))) return status;
            pack_lane(w, c, from, to, slot_of(w, w->rank, chunk), chunk);
            pyhvd_announce(w, PACKED, chunk + 1);
        }
        if (!c->stage && !c->step) copy_own(c, m->own_bytes);
        for (c->stage = MAX(c->stage, 1); c->stage < w->size; c->stage++) {
            int q = (w->rank + c->stage) % w->size;
            if (!comes_in_chunks(c, q)) continue;
            status = unpack_lane(w, c, from, to, q, slot_of(w, q, chunk), PACKED, chunk);
            if (status) return status;
        }
        pyhvd_announce(w, REDUCED, chunk + 1);
    }
    return PYHVD_OK;
}

/* More than PYHVD_FLAT bytes. If a rank's source is read where it is, the rank must not end before all
 * have announced the last chunk. */
static int move_much(pyhvd_window *w, pyhvd_job_cursor *c) {
    int64_t piece = piece_of(w, c->local->longest);
    int64_t count = (c->local->longest + piece - 1) / piece;
    int direct = w->reads_peers, status = PYHVD_OK, any = 0;
    uint64_t first = w->chunks + (uint64_t)direct, end = first + (uint64_t)count;
    w->shift = 0;
    if (!direct)
        memset(c->in_chunks, 0xff, sizeof c->in_chunks);
    else if (c->heard < w->size && (status = read_peers(w, c)))
        return status;
    for (int k = 0; k < PYHVD_MAX_LOCAL / 64; k++) any |= c->in_chunks[k] != 0;
    if (any && (status = move_chunks(w, c, first, count, piece))) return status;
    if (!any) pyhvd_announce(w, REDUCED, end);
    if (c->local->source_count && !comes_in_chunks(c, w->rank) &&
        (status = pyhvd_await_all(w, REDUCED, end)))
        return status;
    w->chunks = end;
    return PYHVD_OK;
}

int pyhvd_window_can_read(int32_t pid, uint64_t address, uint64_t value) {
    uint64_t found;
    return pyhvd_read_process(pid, &found, address, sizeof found) && found == value;
}

int pyhvd_move_proceed(pyhvd_window *w, pyhvd_job_cursor *c) {
    if (!c->local->longest) {
        copy_own(c, c->local->own_bytes);
        return PYHVD_OK;
    }
    return c->local->longest <= PYHVD_FLAT ? move_flat(w, c) : move_much(w, c);
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
    int64_t starts[PYHVD_MAX_LOCAL] = {0}, origins[PYHVD_MAX_LOCAL] = {0};
    pyhvd_part source = {w->rank, 0, counts[w->rank], 0}, targets[PYHVD_MAX_LOCAL];
    pyhvd_job_cursor cursor;
    find_starts(counts, w->size, starts);
    pyhvd_local_move move = {
        .sources = &source,
        .targets = targets,
        .source_count = counts[w->rank] > 0,
        .own_to = starts[w->rank],
        .own_bytes = counts[w->rank],
        .origins = origins,
    };
    for (int q = 0; q < w->size; q++) {
        move.longest = MAX(move.longest, counts[q]);
        move.total += counts[q];
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
