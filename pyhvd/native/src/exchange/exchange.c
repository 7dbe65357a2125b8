/* The exchange between hosts; exchange.h states the invariants. */
#include "exchange/exchange.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/kernels.h"
#include "links/mpi.h"

/* The kind of a frame: the last two bits of its tag. */
enum { CONTRIBUTION, RESULT, FLAT, MOVED };

/* How long what is in flight takes at the link's rate, and how many bytes are in flight at least. At
 * 1 Gbit/s, an echo beside a large operation takes half as long with 512 KiB in flight as with 1 MiB,
 * and the operation as long. */
#define IN_FLIGHT_NS 4e6
#define IN_FLIGHT_LEAST 524288
#define TIMED (2 * PYHVD_DEPTH) /* chunks of an operation that is timed, at least */
#define KEPT \
    0.75 /* of the estimated rate, after an operation that was slower, perhaps by accident */

#define NEVER (~(uint64_t)0) /* no chunk has this number */

/* The bytes up to which a slice is sent whole. With two hosts both ways send the same bytes. With more
 * of them the whole slices need more, and all slices of a host share its link. */
static size_t longest_whole(const pyhvd_exchange *e) {
    size_t others = (size_t)e->hosts - 1;
    return others == 1 ? PYHVD_WHOLE : PYHVD_WHOLE / others / (size_t)e->slices;
}

int pyhvd_exchange_init(pyhvd_exchange *e, size_t capacity) {
    size_t owned = (size_t)e->owned, hosts = (size_t)e->hosts;
    size_t slice = capacity / (size_t)e->slices + 16, whole = MIN(slice, longest_whole(e));
    e->box = MAX(MAX(slice / hosts + 16, whole), PYHVD_FLAT);
    e->links = calloc(owned * hosts, sizeof *e->links);
    e->under_way = calloc(PYHVD_DEPTH * owned, sizeof *e->under_way);
    e->places = calloc(PYHVD_DEPTH * owned * hosts, sizeof *e->places);
    e->boxes = malloc(PYHVD_DEPTH * owned * hosts * e->box);
    e->flat_partial = malloc(PYHVD_FLAT);
    e->polls = malloc((owned * hosts + 1) * sizeof *e->polls);
    e->counters = e->own_counters = calloc(hosts, sizeof *e->counters);
    for (uint32_t g = 0; g < hosts; g++) e->numbers[g] = g;
    if (!e->links || !e->under_way || !e->places || !e->polls || !e->boxes) return 0;
    if (!e->flat_partial || !e->counters) return 0;
    for (size_t k = 0; k < PYHVD_DEPTH * owned; k++) e->under_way[k].tag = NEVER;
    e->flat.tag = NEVER;
    e->depth = PYHVD_DEPTH;
    return 1;
}

void pyhvd_exchange_free(pyhvd_exchange *e) {
    /* MPI cannot take back what has begun: after a failure it may still write into the boxes. */
    for (int k = 0; e->links && k < e->owned * e->hosts; k++)
        if (pyhvd_mpi_is_busy(&e->links[k])) return;
    free(e->links);
    free(e->under_way);
    free(e->places);
    free(e->boxes);
    free(e->flat_partial);
    free(e->polls);
    free(e->own_counters);
}

static pyhvd_link *link_of(const pyhvd_exchange *e, int own, int host) {
    return &e->links[own * e->hosts + host];
}

static pyhvd_slice *slice_of(const pyhvd_exchange *e, uint64_t chunk, int own) {
    return &e->under_way[(chunk % PYHVD_DEPTH) * (uint64_t)e->owned + (uint64_t)own];
}

uint8_t *pyhvd_exchange_box(const pyhvd_exchange *e, uint64_t chunk, int own, int host) {
    size_t k = (chunk % PYHVD_DEPTH) * (size_t)e->owned + (size_t)own;
    return e->boxes + (k * (size_t)e->hosts + (size_t)host) * e->box;
}

static pyhvd_place *place_of(const pyhvd_exchange *e, uint64_t chunk, int own, int host) {
    size_t k = (chunk % PYHVD_DEPTH) * (size_t)e->owned + (size_t)own;
    return &e->places[k * (size_t)e->hosts + (size_t)host];
}

/* Where host g's part of a slice begins (an element); the end of the last part for g = hosts. */
static int64_t part_of(const pyhvd_exchange *e, const pyhvd_slice *s, int g) {
    return s->count * g / e->hosts;
}

/* Count the frames that a step sends, one to each other host, and as many that come from there: both
 * are contributions, or both are results. */
static void count_frames(const pyhvd_exchange *e, pyhvd_slice *s, int own) {
    for (int k = 1; k < e->hosts; k++) link_of(e, own, (e->host + k) % e->hosts)->awaited++;
    s->unsent += (uint32_t)e->hosts - 1;
}

/* Post the same frame to each other host; first to the next one, so that not all hosts send to one
 * at the same time. */
static void post_to_all(const pyhvd_exchange *e, pyhvd_slice *s, int own, uint64_t tag,
                        const uint8_t *bytes, size_t n) {
    for (int k = 1; k < e->hosts; k++)
        pyhvd_link_post(link_of(e, own, (e->host + k) % e->hosts), tag, bytes, n, &s->unsent);
}

/* Post to each other host its part of a slice. */
static void post_parts(const pyhvd_exchange *e, pyhvd_slice *s, int own, size_t item) {
    for (int k = 1; k < e->hosts; k++) {
        int g = (e->host + k) % e->hosts;
        int64_t from = part_of(e, s, g), to = part_of(e, s, g + 1);
        pyhvd_link_post(link_of(e, own, g), s->tag, s->in + (size_t)from * item,
                        (size_t)(to - from) * item, &s->unsent);
    }
}

/* Post the contributions to a chunk. The frames of a moved one are posted when it begins. */
static void post_chunk(const pyhvd_exchange *e, uint64_t chunk, size_t item) {
    for (int own = 0; own < e->owned; own++) {
        pyhvd_slice *s = slice_of(e, chunk, own);
        if ((s->tag & 3) == MOVED) continue;
        if (s->whole)
            post_to_all(e, s, own, s->tag, s->in, (size_t)s->count * item);
        else
            post_parts(e, s, own, item);
    }
}

void pyhvd_exchange_begin(const pyhvd_exchange *e, const pyhvd_job *job, uint64_t chunk, int own,
                          uint8_t *in, uint8_t *out, int64_t count) {
    size_t bytes = (size_t)count * pyhvd_itemsize(job->dtype);
    pyhvd_slice *s = slice_of(e, chunk, own);
    uint32_t others = (uint32_t)e->hosts - 1;
    int whole = bytes <= longest_whole(e);
    *s = (pyhvd_slice){
        .tag = chunk * 4 + CONTRIBUTION,
        .in = in,
        .out = out,
        .count = count,
        .whole = whole,
        .contributions = others,
        .results = whole ? 0 : others,
    };
    count_frames(e, s, own);
}

void pyhvd_exchange_begin_move(const pyhvd_exchange *e, uint64_t chunk, int own,
                               const pyhvd_place *out, const pyhvd_place *in) {
    pyhvd_slice *s = slice_of(e, chunk, own);
    *s = (pyhvd_slice){.tag = chunk * 4 + MOVED, .reduced = 1};
    for (int k = 1; k < e->hosts; k++) {
        int to = (e->host + k) % e->hosts, from = (e->host + e->hosts - k) % e->hosts;
        *place_of(e, chunk, own, from) = in[from];
        s->results += in[from].bytes > 0;
        link_of(e, own, from)->awaited += in[from].bytes > 0;
        if (!out[to].bytes) continue;
        s->unsent++;
        pyhvd_link_post(link_of(e, own, to), s->tag, out[to].at, out[to].bytes, &s->unsent);
    }
}

void pyhvd_exchange_begin_flat(pyhvd_exchange *e, uint64_t number, size_t bytes) {
    e->flat = (pyhvd_slice){
        .tag = number * 4 + FLAT,
        .count = (int64_t)bytes,
        .contributions = (uint32_t)(e->owned * (e->hosts - 1)),
    };
    for (int own = 0; own < e->owned; own++) {
        count_frames(e, &e->flat, own);
        post_to_all(e, &e->flat, own, e->flat.tag, e->flat_partial, bytes);
    }
}

void pyhvd_exchange_flat_parts(const pyhvd_exchange *e, int64_t *parts) {
    for (int g = 0; g < e->hosts; g++)
        parts[g] = (int64_t)(intptr_t)(g == e->host ? e->flat_partial
                                                    : pyhvd_exchange_box(e, 0, 0, g));
}

static int has_ended(const pyhvd_slice *s) { return s->reduced && !s->results && !s->unsent; }

int pyhvd_exchange_has_ended(const pyhvd_exchange *e, uint64_t chunk) {
    for (int own = 0; own < e->owned; own++)
        if (!has_ended(slice_of(e, chunk, own))) return 0;
    return 1;
}

int pyhvd_exchange_flat_ended(const pyhvd_exchange *e) {
    return !e->flat.contributions && !e->flat.unsent;
}

/* Reduce this rank's part of a slice, if all contributions have arrived. */
static int reduce_part(const pyhvd_exchange *e, const pyhvd_job *job, uint64_t chunk, int own) {
    pyhvd_slice *s = slice_of(e, chunk, own);
    size_t item = pyhvd_itemsize(job->dtype);
    /* A whole slice may be reduced in place, so its bytes must have left. */
    if (s->reduced || s->contributions || (s->whole && s->unsent)) return 0;
    int64_t from = s->whole ? 0 : part_of(e, s, e->host);
    int64_t to = s->whole ? s->count : part_of(e, s, e->host + 1), parts[PYHVD_MAX_HOSTS];
    for (int g = 0; g < e->hosts; g++)
        parts[g] = (int64_t)(intptr_t)(g == e->host ? s->in + (size_t)from * item
                                                    : pyhvd_exchange_box(e, chunk, own, g));
    uint8_t *out = s->out + (size_t)from * item;
    // cppcheck-suppress uninitvar - the first `hosts` elements are set
    pyhvd_reduce(out, parts, (size_t)e->hosts, (size_t)(to - from), job->dtype, job->op,
                 job->postscale);
    s->reduced = 1;
    if (s->whole) return 1;
    count_frames(e, s, own);
    post_to_all(e, s, own, s->tag + 1, out, (size_t)(to - from) * item);
    return 1;
}

/* Whether the arriving frame has the length that was computed for it. */
static int fits(const pyhvd_exchange *e, const pyhvd_job *job, const pyhvd_slice *s, int from,
                const pyhvd_frame *frame) {
    size_t item = pyhvd_itemsize(job->dtype);
    int of = (frame->tag & 3) == RESULT ? from : e->host;
    if (s == &e->flat) return s->contributions && frame->bytes == (uint64_t)s->count;
    if (s->whole) return s->contributions && frame->bytes == (uint64_t)s->count * item;
    if (!((frame->tag & 3) == RESULT ? s->results : s->contributions)) return 0;
    return frame->bytes == (uint64_t)(part_of(e, s, of + 1) - part_of(e, s, of)) * item;
}

/* Take the place of an arriving frame of a moved slice, so that no second frame goes there. */
static uint8_t *take_place(pyhvd_link *link, pyhvd_place *place) {
    if (!place->bytes || link->arriving.bytes != place->bytes) {
        link->error = EPROTO;
        return NULL;
    }
    place->bytes = 0;
    return place->at;
}

/* Return where the arriving frame's bytes go; NULL if its chunk has not begun here, or its place is
 * still being sent (or, with link->error set, if it cannot be right). */
static uint8_t *place_for(const pyhvd_exchange *e, const pyhvd_job *job, int own, int from) {
    pyhvd_link *link = link_of(e, own, from);
    const pyhvd_frame *frame = &link->arriving;
    uint64_t chunk = frame->tag / 4, kind = frame->tag & 3;
    const pyhvd_slice *s = kind == FLAT ? &e->flat : slice_of(e, chunk, own);
    if (kind != RESULT && s->tag != frame->tag) return NULL;
    if (kind == MOVED) return take_place(link, place_of(e, chunk, own, from));
    if ((kind == RESULT && s->tag + 1 != frame->tag) || !fits(e, job, s, from, frame)) {
        link->error = EPROTO;
        return NULL;
    }
    if (kind == FLAT) return pyhvd_exchange_box(e, 0, own, from);
    if (kind == CONTRIBUTION) return pyhvd_exchange_box(e, chunk, own, from);
    if (pyhvd_link_holds(link, s->tag)) return NULL;
    return s->out + (size_t)part_of(e, s, from) * pyhvd_itemsize(job->dtype);
}

/* ---- counters ---- */

static pyhvd_rail_counters *counters_of(const pyhvd_exchange *e, int host) {
    return &e->counters[e->numbers[host]];
}

int pyhvd_exchange_waits(const pyhvd_exchange *e) {
    for (int k = 0; k < e->owned * e->hosts; k++)
        if (e->links[k].awaited || pyhvd_link_has_unsent(&e->links[k])) return 1;
    return 0;
}

uint64_t pyhvd_exchange_bytes(const pyhvd_exchange *e) {
    uint64_t bytes = 0;
    for (int k = 0; k < e->owned * e->hosts; k++)
        bytes += e->links[k].bytes_sent + e->links[k].bytes_received;
    return bytes;
}

void pyhvd_exchange_count(pyhvd_exchange *e) {
    pyhvd_add(&counters_of(e, e->waited ? e->last : e->host)->last, 1);
    e->waited = 0;
}

/* Count an arrived frame; the sleep before it was for its host. */
static void count_arrival(pyhvd_exchange *e, int own, int host) {
    e->last = host;
    pyhvd_exchange_end_wait(e);
    if (e->slept) pyhvd_add(&counters_of(e, host)->slept, (uint64_t)e->slept);
    e->slept = 0;
    uint64_t tag = link_of(e, own, host)->arriving.tag;
    pyhvd_slice *s = (tag & 3) == FLAT ? &e->flat : slice_of(e, tag / 4, own);
    link_of(e, own, host)->awaited--;
    if ((tag & 3) == RESULT || (tag & 3) == MOVED)
        s->results--;
    else
        s->contributions--;
}

/* Move what one link can move; return whether anything was. */
static int drive(pyhvd_exchange *e, const pyhvd_job *job, int own, int host) {
    pyhvd_link *link = link_of(e, own, host);
    uint64_t before = link->bytes_received, before_sent = link->bytes_sent;
    int moved = pyhvd_link_send(link), event;
    while ((event = pyhvd_link_receive(link)) != PYHVD_LINK_WAITS) {
        if (event == PYHVD_LINK_ARRIVED) {
            count_arrival(e, own, host);
            moved = 1;
        } else {
            uint8_t *into = place_for(e, job, own, host);
            if (!into) break;
            pyhvd_link_accept(link, into);
        }
    }
    /* A rank that needs nothing more from this one may end. */
    if (link->error && (link->awaited || pyhvd_link_has_unsent(link))) {
        e->lost = host + 1;
        e->error = link->error;
    }
    if (moved) pyhvd_add(&counters_of(e, host)->sent, link->bytes_sent - before_sent);
    if (link->bytes_received == before) return moved;
    pyhvd_add(&counters_of(e, host)->received, link->bytes_received - before);
    return 1;
}

int pyhvd_exchange_progress(pyhvd_exchange *e, const pyhvd_job *job, uint64_t from, uint64_t to) {
    int moved = 0;
    uint64_t end = MIN(to, from + (uint64_t)e->depth);
    for (e->posted = MAX(e->posted, from); e->posted < end; e->posted++)
        post_chunk(e, e->posted, pyhvd_itemsize(job->dtype));
    for (int own = 0; own < e->owned; own++)
        for (int k = 1; k < e->hosts; k++) moved |= drive(e, job, own, (e->host + k) % e->hosts);
    for (uint64_t chunk = from; chunk < to; chunk++)
        for (int own = 0; own < e->owned; own++) moved |= reduce_part(e, job, chunk, own);
    return e->lost ? PYHVD_LOST : moved;
}

void pyhvd_exchange_look(const pyhvd_exchange *e) {
    for (int k = 0; k < e->owned * e->hosts; k++)
        if (k % e->hosts != e->host) pyhvd_link_look(&e->links[k]);
}

int pyhvd_exchange_depth(const pyhvd_exchange *e, size_t chunk) {
    if (e->rate <= 0.0 || !chunk) return PYHVD_DEPTH;
    double depth = MAX(e->rate * IN_FLIGHT_NS, IN_FLIGHT_LEAST) / (double)chunk + 0.5;
    return depth < PYHVD_DEPTH ? MAX((int)depth, 2) : PYHVD_DEPTH;
}

void pyhvd_exchange_time(pyhvd_exchange *e, int64_t ended, int64_t count, size_t chunk) {
    if (count < TIMED) return;
    /* The first chunks may have waited for a rank that was late. */
    if (ended == PYHVD_DEPTH) e->timed_ns = pyhvd_now();
    if (ended < count) return;
    double bytes = (double)(count - PYHVD_DEPTH) * (double)chunk;
    e->rate = MAX(bytes / (double)MAX(pyhvd_now() - e->timed_ns, 1), KEPT * e->rate);
    e->depth = pyhvd_exchange_depth(e, chunk);
}
