/* All operations of a window, in a drawn order, of every size and kind; and windows that are
 * aborted at drawn moments. Each reduction is compared with the kernels' result over all ranks'
 * values. */
#include "races.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/kernels.h"

#define CAPACITY ((size_t)2 * PYHVD_FLAT)
#define LARGE ((size_t)40 * PYHVD_FLAT) /* slices of such a chunk go between hosts in parts */
#define MOST(capacity) (3 * (capacity)) /* bytes of an operation; several chunks */
#define TENSORS 4

typedef struct {
    const terms *t;
    uint8_t *areas[MOST_RANKS], *arenas[MOST_RANKS];
    pthread_barrier_t meet;
    size_t capacity;
    layout *hosts;  /* NULL: all ranks are on one host */
    uint64_t which; /* which window, where windows are aborted */
    int ends[MOST_RANKS], beside;
} stage;

/* One rank. */
typedef struct {
    stage *s;
    int rank, size;
    pyhvd_window w;
    pyhvd_exchange e;
    dice plan, draw;
    uint64_t round;
    uint8_t *send, *recv, *expected, *inputs[MOST_RANKS];
} player;

/* A mask that leaves finite numbers below one, or 0 and 1; integers may wrap around. */
static uint64_t mask_of(int dtype) {
    switch (dtype) {
    case PYHVD_BOOL: return 0x0101010101010101u;
    case PYHVD_FLOAT16: return 0x3bff3bff3bff3bffu;
    case PYHVD_BFLOAT16: return 0x3f7f3f7f3f7f3f7fu;
    case PYHVD_FLOAT32:
    case PYHVD_COMPLEX64: return 0x3f7fffff3f7fffffu;
    case PYHVD_FLOAT64:
    case PYHVD_COMPLEX128: return 0x3fefffffffffffffu;
    default: return ~(uint64_t)0;
    }
}

/* Fill in the input of rank `from` for rank `to` (or for all) in this round. */
static void fill_in(const player *p, uint8_t *out, size_t bytes, int dtype, int from, int to) {
    uint64_t key = mixed(p->round * 65536 + (uint64_t)from * 256 + (uint64_t)to),
             mask = mask_of(dtype);
    for (size_t k = 0; k < bytes; k += 8) {
        uint64_t word = mixed(key + k) & mask;
        memcpy(out + k, &word, bytes - k < 8 ? bytes - k : 8);
    }
}

static size_t draw_bytes(player *p, size_t most) {
    size_t kind = roll(&p->plan, 8);
    if (kind == 0) return roll(&p->plan, 64);
    if (kind < 4) return roll(&p->plan, most / 16);
    return roll(&p->plan, kind < 7 ? most / 3 : most);
}

static int draw_op(player *p, int dtype) {
    static const int ops[] = {PYHVD_SUM, PYHVD_MIN, PYHVD_MAX, PYHVD_PRODUCT};
    uint64_t which = roll(&p->plan, 4);
    while (!pyhvd_can_reduce(dtype, ops[which])) which = (which + 1) % 4;
    return ops[which];
}

static double draw_factor(player *p, int dtype) {
    double factor = roll(&p->plan, 3) ? 1.0 : 0.5;
    return pyhvd_can_scale(dtype, factor) ? factor : 1.0;
}

/* Proceed with an operation to its end, in pieces or at once. */
static void proceed(player *p, pyhvd_job_cursor *cursor) {
    p->w.interruptible = (int)roll(&p->draw, 2);
    int status = PYHVD_LATER;
    while (status == PYHVD_LATER) status = pyhvd_window_proceed(&p->w, cursor);
    p->w.interruptible = 0;
    if (status) fail("rank %d: no rank has aborted", p->rank);
}

static void reduce(player *p, const pyhvd_job *job) {
    pyhvd_job_cursor cursor;
    pyhvd_window_begin(&cursor, job);
    proceed(p, &cursor);
}

/* Reduce the inputs of each host, in place; store where the results are, and return how many. */
static size_t reduce_hosts(const player *p, int64_t *from, size_t count, const pyhvd_job *job) {
    const layout *l = p->s->hosts;
    for (int h = 0; h < l->hosts; h++) {
        uint8_t *first = p->inputs[l->first[h]];
        if (l->ranks[h] > 1)
            pyhvd_reduce(first, from + l->first[h], (size_t)l->ranks[h], count, job->dtype, job->op,
                         1.0);
        from[h] = (int64_t)(intptr_t)first;
    }
    return (size_t)l->hosts;
}

/* Compute the expected result. */
static void foretell(player *p, const pyhvd_job *job, int joined) {
    size_t count = (size_t)job->starts[job->n], bytes = count * pyhvd_itemsize(job->dtype);
    int64_t from[MOST_RANKS];
    for (int q = 0; q < p->size; q++) {
        from[q] = (int64_t)(intptr_t)p->inputs[q];
        fill_in(p, p->inputs[q], bytes, job->dtype, q, 0);
        if (q == joined)
            pyhvd_fill(p->inputs[q], count, job->dtype, job->op);
        else if (job->prescale != 1.0)
            pyhvd_scale(p->inputs[q], p->inputs[q], count, job->dtype, job->prescale);
    }
    size_t n = p->s->hosts ? reduce_hosts(p, from, count, job) : (size_t)p->size;
    pyhvd_reduce(p->expected, from, n, count, job->dtype, job->op, job->postscale);
}

static void allreduce(player *p) {
    int64_t srcs[TENSORS], dsts[TENSORS], starts[TENSORS + 1] = {0};
    pyhvd_job job = {
        srcs, dsts, starts, 1 + roll(&p->plan, TENSORS), (int)roll(&p->plan, PYHVD_DTYPES), 0,
        1,    1,    0};
    int joined = (int)roll(&p->plan, 8), inplace = (int)roll(&p->draw, 2);
    size_t item = pyhvd_itemsize(job.dtype), total = draw_bytes(p, MOST(p->s->capacity)) / item;
    job.op = draw_op(p, job.dtype);
    job.postscale = draw_factor(p, job.dtype);
    job.direct = joined >= p->size && !roll(&p->plan, 3) && !p->s->hosts;
    if (!job.direct) job.prescale = draw_factor(p, job.dtype);
    for (size_t k = 1; k < job.n; k++)
        starts[k] = starts[k - 1] + (int64_t)roll(&p->plan, total / job.n + 1);
    starts[job.n] = (int64_t)total;
    uint8_t *in = job.direct ? p->s->arenas[p->rank] : p->send,
            *out = inplace      ? in
                   : job.direct ? in + MOST(p->s->capacity)
                                : p->recv;
    /* a result that is dropped */
    int skipped = job.direct ? TENSORS : (int)roll(&p->draw, 2 * TENSORS);
    for (size_t k = 0; k < job.n; k++) {
        srcs[k] = joined == p->rank ? 0 : (int64_t)(intptr_t)(in + (size_t)starts[k] * item);
        dsts[k] = joined == p->rank || (int)k == skipped
                      ? 0
                      : (int64_t)(intptr_t)(out + (size_t)starts[k] * item);
    }
    fill_in(p, in, total * item, job.dtype, p->rank, 0);
    linger(&p->draw);
    reduce(p, &job);
    foretell(p, &job, joined);
    for (size_t k = 0; k < job.n; k++) {
        size_t at = (size_t)starts[k] * item, bytes = (size_t)(starts[k + 1] - starts[k]) * item;
        if (dsts[k] && memcmp(out + at, p->expected + at, bytes))
            fail("rank %d, round %d: dtype %d, %zu elements are torn", p->rank, (int)p->round,
                 job.dtype, total);
    }
}

/* Store which rank's portion goes to each host with each slice. */
static void choose_slices(const layout *l, int64_t *by_slice) {
    for (int k = 0; k < l->hosts * l->slices; k++) by_slice[k] = -1;
    for (int g = 0; g < l->hosts; g++)
        for (int k = 0; k < l->ranks[g]; k++)
            by_slice[g * l->slices + (k * l->slices + l->ranks[g] - 1) / l->ranks[g]] =
                l->first[g] + k;
}

/* Reduce one tensor, of which each rank gets a portion; a portion may be empty. */
static void scatter(player *p) {
    int64_t src = (int64_t)(intptr_t)p->send, dst = (int64_t)(intptr_t)p->recv;
    int64_t starts[2] = {0}, portions[MOST_RANKS + 1] = {0}, by_slice[MOST_RANKS * MOST_HOSTS];
    pyhvd_portions parts = {portions, p->rank, 0, p->s->hosts ? by_slice : NULL};
    pyhvd_job job = {&src,      &dst, starts, 1, (int)roll(&p->plan, PYHVD_DTYPES),
                     PYHVD_SUM, 1,    1,      0, &parts};
    if (p->s->hosts) choose_slices(p->s->hosts, by_slice);
    size_t item = pyhvd_itemsize(job.dtype), most = MOST(p->s->capacity) / (size_t)p->size / item;
    for (int q = 0; q < p->size; q++)
        portions[q + 1] = portions[q] + (int64_t)(draw_bytes(p, most * item) / item);
    for (int q = 0; q < p->size; q++)
        if (portions[q + 1] - portions[q] > parts.longest)
            parts.longest = portions[q + 1] - portions[q];
    starts[1] = portions[p->size];
    job.op = draw_op(p, job.dtype);
    job.prescale = draw_factor(p, job.dtype);
    job.postscale = draw_factor(p, job.dtype);
    fill_in(p, p->send, (size_t)starts[1] * item, job.dtype, p->rank, 0);
    linger(&p->draw);
    reduce(p, &job);
    foretell(p, &job, -1);
    size_t bytes = (size_t)(portions[p->rank + 1] - portions[p->rank]) * item;
    if (memcmp(p->recv, p->expected + (size_t)portions[p->rank] * item, bytes))
        fail("rank %d, round %d: a portion of dtype %d is torn", p->rank, (int)p->round, job.dtype);
}

/* Send a block to each rank, in lanes whose first block is for the next rank. */
static void shuffle(player *p) {
    int64_t sizes[MOST_RANKS][MOST_RANKS], sent[MOST_RANKS] = {0}, got[MOST_RANKS] = {0};
    int64_t origins[MOST_RANKS] = {0};
    pyhvd_part sources[MOST_RANKS], targets[MOST_RANKS];
    pyhvd_local_move move = {.sources = sources, .targets = targets, .origins = origins};
    pyhvd_job_cursor cursor;
    for (int q = 0; q < p->size; q++)
        for (int k = 0; k < p->size; k++)
            sizes[q][k] = (int64_t)draw_bytes(p, MOST(p->s->capacity) / (size_t)p->size);
    for (int q = 1; q < p->size; q++) {
        sent[q] = sent[q - 1] + sizes[p->rank][q - 1];
        got[q] = got[q - 1] + sizes[q - 1][p->rank];
    }
    for (int q = 0; q < p->size; q++) {
        int64_t at = 0;
        for (int k = 1; k < p->size; k++) {
            int to = (q + k) % p->size;
            int64_t n = sizes[q][to];
            if (q == p->rank && n) sources[move.source_count++] = (pyhvd_part){q, at, n, sent[to]};
            if (to == p->rank && n) {
                for (int j = 0; j < to; j++) origins[move.target_count] += sizes[q][j];
                targets[move.target_count++] = (pyhvd_part){q, at, n, got[q]};
            }
            at += n;
        }
        if (at > move.longest) move.longest = at;
        move.total += at;
        fill_in(p, p->send + sent[q], (size_t)sizes[p->rank][q], PYHVD_UINT8, p->rank, q);
    }
    move.own_from = sent[p->rank], move.own_to = got[p->rank];
    move.own_bytes = sizes[p->rank][p->rank];
    linger(&p->draw);
    pyhvd_window_begin_move(&cursor, &move, NULL, 0, (int64_t)(intptr_t)p->send,
                            (int64_t)(intptr_t)p->recv);
    proceed(p, &cursor);
    for (int q = 0; q < p->size; q++) {
        fill_in(p, p->expected, (size_t)sizes[q][p->rank], PYHVD_UINT8, q, p->rank);
        if (memcmp(p->expected, p->recv + got[q], (size_t)sizes[q][p->rank]))
            fail("rank %d, round %d: shuffled from %d", p->rank, (int)p->round, q);
    }
}

/* Gather blocks; or one block, as a broadcast does. */
static void gather(player *p) {
    int64_t counts[MOST_RANKS], starts[MOST_RANKS + 1] = {0};
    int root = (int)roll(&p->plan, 2 * (uint64_t)p->size);
    for (int q = 0; q < p->size; q++) {
        counts[q] = (int64_t)draw_bytes(p, MOST(p->s->capacity) / (size_t)p->size);
        if (root < p->size && q != root) counts[q] = 0;
        starts[q + 1] = starts[q] + counts[q];
    }
    uint8_t *send = roll(&p->draw, 2) ? p->send : p->recv + starts[p->rank];
    fill_in(p, send, (size_t)counts[p->rank], PYHVD_UINT8, p->rank, 0);
    linger(&p->draw);
    if (pyhvd_window_gather(&p->w, send, p->recv, counts))
        fail("rank %d: no rank has aborted", p->rank);
    for (int q = 0; q < p->size; q++) {
        fill_in(p, p->expected, (size_t)counts[q], PYHVD_UINT8, q, 0);
        if (memcmp(p->expected, p->recv + starts[q], (size_t)counts[q]))
            fail("rank %d, round %d: gathered from %d", p->rank, (int)p->round, q);
    }
}

static void alltoall(player *p) {
    int64_t sent[MOST_RANKS], from[MOST_RANKS], got[MOST_RANKS], to[MOST_RANKS], s = 0, r = 0;
    for (int q = 0; q < p->size; q++)
        for (int k = 0; k < p->size; k++) {
            int64_t n = (int64_t)draw_bytes(p, MOST(p->s->capacity) / (size_t)p->size);
            if (q == p->rank) from[k] = s, sent[k] = n, s += n;
            if (k == p->rank) to[q] = r, got[q] = n, r += n;
        }
    for (int q = 0; q < p->size; q++)
        fill_in(p, p->send + from[q], (size_t)sent[q], PYHVD_UINT8, p->rank, q);
    linger(&p->draw);
    if (pyhvd_window_alltoall(&p->w, p->send, sent, p->recv, got))
        fail("rank %d: no rank has aborted", p->rank);
    for (int q = 0; q < p->size; q++) {
        fill_in(p, p->expected, (size_t)got[q], PYHVD_UINT8, q, p->rank);
        if (memcmp(p->expected, p->recv + to[q], (size_t)got[q]))
            fail("rank %d, round %d: alltoall from %d", p->rank, (int)p->round, q);
    }
}

static void exchange(player *p) {
    int64_t counts[MOST_RANKS];
    int mask = roll(&p->plan, 2) ? p->size / 2 : 1, partner = p->rank ^ mask;
    for (int q = 0; q < p->size; q++) counts[q] = (int64_t)draw_bytes(p, MOST(p->s->capacity));
    fill_in(p, p->send, (size_t)counts[p->rank], PYHVD_UINT8, p->rank, partner);
    if (pyhvd_window_exchange(&p->w, partner, p->send, counts[p->rank], p->recv, counts[partner]))
        fail("rank %d: no rank has aborted", p->rank);
    fill_in(p, p->expected, (size_t)counts[partner], PYHVD_UINT8, partner, p->rank);
    if (memcmp(p->expected, p->recv, (size_t)counts[partner]))
        fail("rank %d, round %d: exchanged with %d", p->rank, (int)p->round, partner);
}

/* A move over several hosts: each rank sends a block to each other rank, or one block to all. */
typedef struct {
    int shared, lanes;
    int64_t sizes[MOST_RANKS][MOST_RANKS]; /* by sender and receiver; [sender][0] if shared */
    int64_t starts[MOST_RANKS];            /* by sender: of its block for this rank, in `recv` */
    pyhvd_part sources[MOST_RANKS], targets[MOST_RANKS];
    int64_t lane_bytes[2 * MOST_HOSTS], out[MOST_HOSTS], in[MOST_HOSTS];
    pyhvd_move move;
} moving;

static int64_t size_of(const moving *m, int from, int to) {
    return m->shared ? m->sizes[from][0] : from == to ? 0 : m->sizes[from][to];
}

/* Lay out the lane from host h to host g, and this rank's parts of it. */
static void lay_out(player *p, moving *m, int lane, int h, int g) {
    const layout *l = p->s->hosts;
    int to = m->shared ? 0 : l->first[g], end = m->shared ? 1 : l->first[g + 1];
    int64_t at = 0;
    for (int q = l->first[h]; q < l->first[h + 1]; q++)
        for (int k = to; k < end; k++) {
            int64_t n = size_of(m, q, k), from = m->shared ? 0 : k * (int64_t)MOST(p->s->capacity);
            from /= p->size;
            pyhvd_part part = {lane, at, n, 0};
            at += n;
            if (q == p->rank && n) {
                part.address = from;
                m->sources[m->move.source_count++] = part;
            }
            if (q != p->rank && n && (m->shared || k == p->rank)) {
                part.address = m->starts[q];
                m->targets[m->move.target_count++] = part;
            }
        }
    m->lane_bytes[lane] = at;
}

/* Return the bytes of the longest lane of any two hosts. */
static int64_t longest_of(const player *p, const moving *m) {
    const layout *l = p->s->hosts;
    int64_t longest = 0;
    for (int h = 0; h < l->hosts; h++)
        for (int g = 0; g < l->hosts; g++) {
            int64_t bytes = 0;
            for (int q = l->first[h]; q < l->first[h + 1]; q++)
                for (int k = l->first[g]; k < l->first[g + 1]; k++)
                    bytes += k == l->first[g] || !m->shared ? size_of(m, q, k) : 0;
            longest = bytes > longest ? bytes : longest;
        }
    return longest;
}

static void move(player *p) {
    const layout *l = p->s->hosts;
    moving m = {.shared = (int)roll(&p->plan, 2)};
    int here = l->host_of[p->rank], hosts = l->hosts, owned = 1;
    int64_t most = (int64_t)MOST(p->s->capacity) / p->size, at = 0;
    m.lanes = m.shared ? hosts : 2 * hosts;
    for (int q = 0; q < p->size; q++)
        for (int k = 0; k < p->size; k++) m.sizes[q][k] = (int64_t)draw_bytes(p, (size_t)most);
    for (int q = 0; q < p->size; at += size_of(&m, q++, p->rank)) m.starts[q] = at;
    for (int k = 0; k < (m.shared ? 1 : p->size); k++)
        fill_in(p, p->send + k * most, (size_t)size_of(&m, p->rank, k), PYHVD_UINT8, p->rank, k);
    for (int g = 0; g < hosts; g++) {
        owned = (l->slices + l->ranks[g] - 1) / l->ranks[g] > owned
                    ? (l->slices + l->ranks[g] - 1) / l->ranks[g]
                    : owned;
        m.out[g] = m.shared ? here : g;
        m.in[g] = m.shared ? g : hosts + g;
        lay_out(p, &m, g, m.shared ? g : here, g);
    }
    for (int g = 0; g < hosts && !m.shared; g++)
        if (g != here) lay_out(p, &m, hosts + g, g, here);
    m.move.owned = owned, m.move.longest = longest_of(p, &m);
    m.move.sources = m.sources, m.move.targets = m.targets, m.move.lane_bytes = m.lane_bytes;
    m.move.direct = l->slices == 1;
    m.move.lanes = m.lanes, m.move.single = !m.shared, m.move.out = m.out, m.move.in = m.in;
    linger(&p->draw);
    if (pyhvd_window_move(&p->w, &m.move, (int64_t)(intptr_t)p->send, (int64_t)(intptr_t)p->recv))
        fail("rank %d: no rank has aborted", p->rank);
    for (int q = 0; q < p->size; q++) {
        size_t n = q == p->rank ? 0 : (size_t)size_of(&m, q, p->rank);
        fill_in(p, p->expected, n, PYHVD_UINT8, q, m.shared ? 0 : p->rank);
        if (memcmp(p->expected, p->recv + m.starts[q], n))
            fail("rank %d, round %d: moved from %d", p->rank, (int)p->round, q);
    }
}

/* A rank that returns from a barrier sees what the others wrote before it; `shared` is not
 * atomic. */
static void barrier(player *p) {
    uint64_t *shared = (uint64_t *)p->s->arenas[p->rank];
    *shared = p->round;
    linger(&p->draw);
    if (pyhvd_window_barrier(&p->w)) fail("rank %d: no rank has aborted", p->rank);
    for (int q = 0; q < p->size; q++)
        if (*(uint64_t *)p->s->arenas[q] != p->round)
            fail("rank %d: no barrier in round %d", p->rank, (int)p->round);
    if (pyhvd_window_barrier(&p->w)) fail("rank %d: no rank has aborted", p->rank);
}

static void enter(player *p, stage *s, int rank) {
    size_t most = MOST(s->capacity);
    memset(p, 0, sizeof *p);
    p->s = s;
    p->rank = rank;
    p->size = s->t->size;
    p->plan = dice_of(s->t->seed + s->which, MOST_RANKS);
    p->draw = dice_of(s->t->seed + s->which, (uint64_t)rank);
    if (s->hosts)
        link_up(&p->w, &p->e, s->hosts, rank, s->areas, s->capacity);
    else
        look_at(&p->w, s->areas, rank, p->size, s->capacity, PYHVD_FLAT);
    memcpy(p->w.arena, s->arenas, sizeof s->arenas);
    p->send = make(most + 64), p->recv = make(most + 64), p->expected = make(most + 64);
    for (int q = 0; q < p->size; q++) p->inputs[q] = make(most);
    p->w.reads_peers = !s->hosts && (s->t->seed + s->which) % 2;
    for (int q = 0; q < p->size; q++) p->w.pids[q] = (int32_t)getpid();
    pthread_barrier_wait(&s->meet);
}

static void leave(player *p) {
    free(p->send), free(p->recv), free(p->expected);
    for (int q = 0; q < p->size; q++) free(p->inputs[q]);
    if (p->s->hosts) pyhvd_exchange_free(&p->e);
}

static void use(int rank, void *what) {
    stage *s = what;
    player p;
    enter(&p, s, rank);
    for (p.round = 1; p.round <= (uint64_t)s->t->rounds; p.round++) {
        uint64_t kind = roll(&p.plan, s->hosts ? 18 : 20);
        linger(&p.draw);
        if (kind < 10)
            allreduce(&p);
        else if (s->hosts && kind > 14)
            scatter(&p);
        else if (s->hosts && kind < 14)
            move(&p);
        else if (kind < 12 || kind > 18)
            gather(&p);
        else if (kind > 17)
            shuffle(&p);
        else if (kind > 15)
            scatter(&p);
        else if (kind < 13)
            alltoall(&p);
        else if (kind < 14)
            barrier(&p);
        else if (kind < 15)
            p.w.chunk = PYHVD_FLAT +
                        roll(&p.plan, (p.s->capacity - PYHVD_FLAT) / PYHVD_LINE) * PYHVD_LINE;
        else if (p.size % 2 == 0 && (p.size & (p.size - 1)) == 0)
            exchange(&p);
    }
    leave(&p);
}

static void set_up(stage *s, const terms *t) {
    s->t = t;
    make_areas(s->areas, t->size, s->capacity);
    for (int q = 0; q < t->size; q++) s->arenas[q] = make(2 * MOST(s->capacity));
    pthread_barrier_init(&s->meet, NULL, (unsigned)t->size);
}

static void tear_down(stage *s) {
    for (int q = 0; q < s->t->size; q++) free(s->areas[q]), free(s->arenas[q]);
    pthread_barrier_destroy(&s->meet);
}

void play_windows(const terms *t) {
    stage s = {.capacity = CAPACITY};
    set_up(&s, t);
    play(t->size, use, &s);
    tear_down(&s);
}

/* On several hosts, in a new layout every few rounds. */
void play_hosts(const terms *t) {
    dice plan = dice_of(t->seed, 8);
    for (int done = 0, more; done < t->rounds; done += more) {
        int large = roll(&plan, 4) == 0;
        more = large ? 3 : 20;
        terms each = {t->size, more, t->seed};
        layout l;
        stage s = {.hosts = &l, .which = (uint64_t)done, .capacity = large ? LARGE : CAPACITY};
        draw_layout(&l, t->size, &plan);
        connect_hosts(&l);
        set_up(&s, &each);
        play(t->size, use, &s);
        tear_down(&s);
        part_hosts(&l);
    }
}

/* ---- aborts ---- */

static void *abort_soon(void *what) {
    player *p = what;
    uint8_t note[PYHVD_NOTE];
    dice draw = dice_of(p->s->which, 99);
    pyhvd_nap((int64_t)roll(&draw, 300000));
    pyhvd_window_abort(&p->w, note, write_note(note, p->rank, p->s->which));
    return NULL;
}

/* Reduce until the window is aborted. */
static void use_until_aborted(int rank, void *what) {
    static const int64_t counts[] = {1, 500, 4096, 9000};
    stage *s = what;
    player p;
    pthread_t helper;
    int helped = 0, status = PYHVD_OK;
    enter(&p, s, rank);
    for (int number = 0; !status; number++) {
        int64_t count = counts[number % 4], starts[] = {0, count}, *values = (int64_t *)p.send;
        int64_t at = (int64_t)(intptr_t)values;
        pyhvd_job job = {&at, &at, starts, 1, PYHVD_INT64, PYHVD_SUM, 1.0, 1.0, 0};
        if (number == s->ends[rank] && s->beside)
            start_thread(&helper, abort_soon, &p), helped = 1;
        else if (number == s->ends[rank]) {
            abort_soon(&p);
            break;
        }
        for (int64_t k = 0; k < count; k++) values[k] = number * (rank + 1) + k;
        linger(&p.draw);
        status = pyhvd_window_allreduce(&p.w, &job);
        for (int64_t k = 0; k < count && !status; k++)
            if (values[k] != number * p.size * (p.size + 1) / 2 + p.size * k)
                fail("rank %d, window %d, reduction %d: torn", rank, (int)s->which, number);
    }
    if (helped) pthread_join(helper, NULL);
    size_t bytes;
    const uint8_t *note = pyhvd_window_note(&p.w, &bytes);
    int known = 0;
    for (int q = 0; q < p.size && note; q++)
        known |= s->ends[q] >= 0 && is_note(note, bytes, q, s->which);
    if (!known) fail("rank %d, window %d: no note", rank, (int)s->which);
    leave(&p);
}

void play_aborts(const terms *t) {
    dice plan = dice_of(t->seed, 7);
    for (int k = 0; k < t->rounds; k++) {
        stage s = {.capacity = CAPACITY, .which = (uint64_t)k + 1};
        for (int q = 0; q < t->size; q++) s.ends[q] = -1;
        s.ends[roll(&plan, (uint64_t)t->size)] = (int)roll(&plan, 20);
        if (roll(&plan, 3) == 0) s.ends[roll(&plan, (uint64_t)t->size)] = (int)roll(&plan, 20);
        s.beside = (int)roll(&plan, 2);
        set_up(&s, t);
        play(t->size, use_until_aborted, &s);
        tear_down(&s);
    }
}
