/* Moves over several hosts: bytes that are copied, not reduced, from ranks to ranks. A cursor may have
 * several, which are carried out one after the other.
 * exchange/exchange.h states the invariants of the frames, window.h those of the counters.
 *
 * The bytes of a move lie in *lanes*. A lane is a sequence of bytes from the ranks of one host, which
 * goes to one host or to several, or to ranks of the same host. The caller lays it out: each rank
 * knows which parts of its memory go into which lanes, and come out of them. The ranks of a host know
 * the length of each lane that leaves or reaches the host.
 *
 * A lane is cut into as many slices as a chunk has. Chunk c has from each slice of each lane the c-th
 * `room` bytes, in a slot of the slice's owner. A chunk goes through the stages of across.c:
 *
 *   1. pack      copy the own parts into the owners' slots                  -> counter PACKED
 *   2. reduce    nothing is reduced: each owner begins the exchange of its slices, when it has packed
 *                the chunk; and the others have, too, if they pack what the owner sends
 *   3. exchange  each lane's bytes are sent once to each of its hosts       -> counter REDUCED
 *   4. unpack    copy the own parts out of the owners' slots                -> counter TAKEN
 *
 * Invariants
 *   1. A rank packs chunk c when all local ranks have taken chunk c - slots. So no rank reads, sends
 *      or receives what lies in the slots: an owner takes a chunk only after its exchange has ended.
 *   2. Local ranks write different bytes of a slot. A lane that leaves the host is not one that comes.
 *   3. Bytes that no local rank copies are not packed if they lie within one part of the owner: they
 *      are sent from there. In the same way bytes that one local rank alone needs are received where
 *      it needs them, if it owns the slice.
 *   4. A rank unpacks a chunk when all local ranks have announced REDUCED. So all have packed it, and
 *      all owners have received what comes. */
#include "exchange/exchange.h"
#include "window/layout.h"
#include "window/parts.h"

/* Boundaries of slices are multiples of this: the largest item of a tensor. */
#define ALIGNED 16

/* What a slice of a lane has in a chunk: bytes [from, to) of the lane, and where they lie in the
 * owner's slot. */
typedef struct {
    int64_t from, to;
    uint8_t *slot;
    int owner;
} cell;

static int64_t slice_start(int64_t bytes, int64_t k, int64_t slices) {
    return k == slices ? bytes : bytes * k / slices & ~(int64_t)(ALIGNED - 1);
}

static const pyhvd_move *move_of(const pyhvd_job_cursor *c) { return &c->moves[c->moved]; }

/* Choose the bytes of a lane in a slice of a chunk, and the number of chunks: enough for each lane. Of
 * a direct move nothing lies in slots; then the frames of a chunk to all other hosts have at most the
 * bytes of two. */
static void cut_into_chunks(const pyhvd_window *w, pyhvd_job_cursor *c) {
    const pyhvd_exchange *e = w->exchange;
    const pyhvd_move *m = move_of(c);
    int64_t cells = m->direct ? e->hosts / 2 : (int64_t)m->lanes * m->owned;
    int64_t room = (int64_t)w->chunk / cells & ~(int64_t)(ALIGNED - 1);
    /* A slice may be longer than others, by less than ALIGNED. */
    int64_t slice = m->longest / e->slices + ALIGNED;
    int to = 0, from = 0;
    for (int g = 0; g < e->hosts; g++) {
        to += g != e->host && m->out[g] >= 0;
        from += g != e->host && m->in[g] >= 0;
    }
    c->depth = pyhvd_exchange_depth(e, (size_t)(room * e->slices * MAX(to, from)));
    c->room = room;
    c->chunks = m->longest ? (slice + room - 1) / room : 0;
}

static cell cell_of(const pyhvd_window *w, const pyhvd_job_cursor *c, int64_t index, int lane,
                    int k) {
    const pyhvd_exchange *e = w->exchange;
    const pyhvd_move *m = move_of(c);
    int64_t room = c->room;
    int owner = (int)((int64_t)k * w->size / e->slices);
    int own = k - pyhvd_first_slice(e, owner, w->size);
    int64_t start = slice_start(m->lane_bytes[lane], k, e->slices);
    int64_t end = slice_start(m->lane_bytes[lane], k + 1, e->slices);
    uint8_t *slot = slot_of(w, owner, w->chunks + (uint64_t)index);
    return (cell){MIN(end, start + index * room), MIN(end, start + (index + 1) * room),
                  slot + ((int64_t)own * m->lanes + lane) * room, owner};
}

/* Return where a cell's bytes lie if one part has all of them, else NULL. */
static uint8_t *within_one_part(const pyhvd_part *parts, size_t n, int lane, cell each,
                                int64_t base) {
    size_t k = first_part(parts, n, lane, each.from);
    if (k == n || parts[k].lane != lane) return NULL;
    if (parts[k].offset > each.from || parts[k].offset + parts[k].bytes < each.to) return NULL;
    return (uint8_t *)(intptr_t)(base + parts[k].address + each.from - parts[k].offset);
}

/* The address from which a move's sources count. */
static int64_t source_of(const pyhvd_job_cursor *c) {
    return move_of(c)->relays ? c->target : c->source;
}

/* Return the address from which this rank sends a cell, without packing it; or NULL. */
static uint8_t *sent_from(const pyhvd_window *w, const pyhvd_job_cursor *c, int lane, cell each) {
    const pyhvd_move *m = move_of(c);
    if (each.owner != w->rank || (w->size > 1 && lane == m->out[w->exchange->host])) return NULL;
    return within_one_part(m->sources, m->source_count, lane, each, source_of(c));
}

/* Return the address where this rank receives a cell, without copying it out; or NULL. */
static uint8_t *received_at(const pyhvd_window *w, const pyhvd_job_cursor *c, int lane, cell each) {
    const pyhvd_move *m = move_of(c);
    int shared = !m->single || lane == m->out[w->exchange->host];
    if (each.owner != w->rank || (w->size > 1 && shared)) return NULL;
    return within_one_part(m->targets, m->target_count, lane, each, c->target);
}

static int pack_next(const pyhvd_window *w, pyhvd_job_cursor *c) {
    const pyhvd_move *m = move_of(c);
    int64_t index = c->next[PACK];
    uint64_t chunk = w->chunks + (uint64_t)index, slots = (uint64_t)w->slots;
    if (index == c->chunks || index - c->next[UNPACK] >= c->depth ||
        (chunk >= slots && !all_reached(w, TAKEN, chunk - slots + 1)))
        return NOTHING;
    for (int lane = 0; lane < m->lanes; lane++)
        for (int k = 0; k < w->exchange->slices; k++) {
            cell each = cell_of(w, c, index, lane, k);
            if (each.from < each.to && !sent_from(w, c, lane, each))
                copy_parts(m->sources, m->source_count, lane, each.from, each.to, each.slot,
                           source_of(c), INTO_LANE);
        }
    if (w->size > 1) pyhvd_announce(w, PACKED, chunk + 1);
    c->next[PACK]++;
    return MOVED;
}

static pyhvd_place place_of(cell c, uint8_t *direct) {
    return (pyhvd_place){direct ? direct : c.slot, (size_t)(c.to - c.from)};
}

/* Whether an own slice of a chunk has bytes for other hosts that local ranks pack. */
static int sends_from_slot(const pyhvd_window *w, const pyhvd_job_cursor *c, int64_t index) {
    const pyhvd_exchange *e = w->exchange;
    const int64_t *out = move_of(c)->out;
    for (int own = 0; own < e->owned; own++)
        for (int g = 0; g < e->hosts; g++) {
            if (g == e->host || out[g] < 0) continue;
            cell each = cell_of(w, c, index, (int)out[g], e->first + own);
            if (each.from < each.to && !sent_from(w, c, (int)out[g], each)) return 1;
        }
    return 0;
}

static int begin_next(const pyhvd_window *w, pyhvd_job_cursor *c) {
    const pyhvd_exchange *e = w->exchange;
    const pyhvd_move *m = move_of(c);
    int64_t index = c->next[REDUCE];
    uint64_t chunk = w->chunks + (uint64_t)index;
    if (index == c->next[PACK]) return NOTHING;
    if (!all_reached(w, PACKED, chunk + 1) && sends_from_slot(w, c, index)) return NOTHING;
    for (int own = 0; own < e->owned; own++) {
        pyhvd_place out[PYHVD_MAX_HOSTS] = {0}, in[PYHVD_MAX_HOSTS] = {0};
        for (int g = 0; g < e->hosts; g++) {
            int to = (int)m->out[g], from = (int)m->in[g];
            if (g == e->host) continue;
            if (to >= 0) {
                cell each = cell_of(w, c, index, to, e->first + own);
                out[g] = place_of(each, sent_from(w, c, to, each));
            }
            if (from >= 0) {
                cell each = cell_of(w, c, index, from, e->first + own);
                in[g] = place_of(each, received_at(w, c, from, each));
            }
        }
        pyhvd_exchange_begin_move(e, chunk, own, out, in);
    }
    pyhvd_begin_stretch(w, PYHVD_EXCHANGING);
    c->next[REDUCE]++;
    return MOVED;
}

static int unpack_next(const pyhvd_window *w, pyhvd_job_cursor *c) {
    const pyhvd_move *m = move_of(c);
    int64_t index = c->next[UNPACK];
    uint64_t chunk = w->chunks + (uint64_t)index;
    if (index == c->next[EXCHANGE] || !all_reached(w, REDUCED, chunk + 1)) return NOTHING;
    int how = way_out(c, m->longest);
    for (int lane = 0; lane < m->lanes; lane++)
        for (int k = 0; k < w->exchange->slices; k++) {
            cell each = cell_of(w, c, index, lane, k);
            if (each.from < each.to && !received_at(w, c, lane, each))
                copy_parts(m->targets, m->target_count, lane, each.from, each.to, each.slot,
                           c->target, how);
        }
    if (w->size > 1) pyhvd_announce(w, TAKEN, chunk + 1);
    c->next[UNPACK]++;
    /* In pieces, so that the links do not stand still meanwhile. */
    if (c->local) {
        int64_t share = c->local->own_bytes / (int64_t)c->move_count;
        copy_own(c, share * (int64_t)c->moved + share / c->chunks * c->next[UNPACK]);
    }
    return MOVED;
}

int pyhvd_move_advance(pyhvd_window *w, pyhvd_job_cursor *c) {
    if (c->moved < c->move_count) {
        if (!c->room) cut_into_chunks(w, c);
        int moved = pack_next(w, c) | begin_next(w, c);
        int exchanged = pyhvd_across_exchange(w, c);
        if (exchanged < 0) return exchanged;
        moved |= exchanged | unpack_next(w, c);
        if (c->next[UNPACK] < c->chunks) return moved;
        w->chunks += (uint64_t)c->chunks;
        c->room = 0;
        memset(c->next, 0, sizeof c->next);
        if (++c->moved < c->move_count) return MOVED;
    }
    if (c->local) copy_own(c, c->local->own_bytes);
    return ENDED;
}

int pyhvd_window_move(pyhvd_window *w, const pyhvd_move *move, int64_t source, int64_t target) {
    pyhvd_job_cursor cursor;
    pyhvd_window_begin_move(&cursor, NULL, move, 1, source, target);
    w->interruptible = 0;
    return pyhvd_across_proceed(w, &cursor);
}
