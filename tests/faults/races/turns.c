/* Calls without a name of ranks on several hosts, in turn slots. Each rank submits the same calls, a few at
 * a time; every third one is grouped. For some of them one rank, or each, has a digest of its own: such a
 * call must be recalled on all ranks, and any other must give its result. Rank 0 has the coordinator's part:
 * it recalls the slot of an unlike call once a rank has got the call back, and delegates the slot once all
 * ranks have. */
#include "races.h"

#include <stdlib.h>
#include <string.h>

#include "agreement/agreement.h"
#include "fast_path/progress.h"
#include "kernels/kernels.h"

#define CAPACITY ((size_t)PYHVD_FLAT)
#define SLOTS (64 + PYHVD_TURNS)
#define LONGEST 400
#define AT_ONCE 5
#define SLICE 3000000    /* ns of one wait */
#define LOST 20000000000 /* ns after which a call counts as lost */

typedef struct stage stage;

typedef struct {
    pyhvd_call c;
    uint32_t slot;
    uint64_t version, turn;
    int64_t values[LONGEST], results[LONGEST];
    int64_t addresses[4], starts[3]; /* of a grouped call, which has two arrays */
    int taken;                       /* written before the turn ends, read after it */
} call;

typedef struct {
    stage *s;
    int rank;
    pyhvd_fast_path path;
    pyhvd_window window;
    pyhvd_agreement agreement;
    pyhvd_exchange exchange;
    call calls[PYHVD_TURNS];
} end;

struct stage {
    const terms *t;
    uint64_t seed;
    const layout *hosts;
    void *bases[MOST_HOSTS];
    uint8_t *areas[MOST_RANKS];
    end *ends[MOST_RANKS];
    pthread_barrier_t meet;
    _Atomic int *returned; /* by call: how many ranks have got it back */
    _Atomic uint32_t over;
};

/* ---- the calls, the same on every rank ---- */

static uint64_t lot_of(const stage *s, uint64_t number) { return mixed(s->seed * 7919 + number); }

static int is_unlike(const stage *s, uint64_t number) { return lot_of(s, number) % 6 == 0; }

static int64_t count_of(const stage *s, uint64_t number) {
    uint64_t lot = lot_of(s, number) / 64;
    return lot % 4 ? 1 + (int64_t)(lot % 8) : 1 + (int64_t)(lot % LONGEST);
}

static uint64_t digest_of(const end *e, uint64_t number) {
    uint64_t lot = lot_of(e->s, number) / 6;
    int odd = (int)(lot / 2 % (uint64_t)e->s->t->size);
    if (!is_unlike(e->s, number) || (lot % 2 && e->rank != odd)) return number + 1;
    return number + ((uint64_t)(e->rank + 2) << 32);
}

/* ---- a rank's submissions ---- */

/* The version under which a call's slot is delegated: it changes after each unlike call of the slot. */
static uint64_t version_of(const stage *s, uint64_t number) {
    for (; number >= PYHVD_TURNS; number -= PYHVD_TURNS)
        if (is_unlike(s, number - PYHVD_TURNS)) return number - PYHVD_TURNS + 2;
    return 1;
}

/* Whether a slot has been delegated under this version; it may have been recalled since. */
static int has_version(end *e, uint32_t slot, uint64_t version) {
    pyhvd_ready_table *t = &e->path.setup.table;
    if (!pyhvd_ready_table_lock(t, LOST)) fail("rank %d: the lock is lost", e->rank);
    int found = t->versions[slot] == version;
    pyhvd_ready_table_unlock(t, &(pyhvd_ranks){{0}});
    return found;
}

static void submit(end *e, uint64_t number, dice *draw) {
    call *u = &e->calls[number % PYHVD_TURNS];
    int64_t count = count_of(e->s, number);
    for (int64_t i = 0; i < count; i++) u->values[i] = (int64_t)number * (e->rank + 1) + i;
    uint64_t version = version_of(e->s, number);
    for (int64_t until = pyhvd_after(LOST); !has_version(e, u->slot, version); pyhvd_nap(20000))
        if (pyhvd_now() > until) fail("rank %d: call %d has no slot", e->rank, (int)number);
    pthread_mutex_lock(&e->path.submissions.mutex);
    if (!pyhvd_call_finished(&u->c, u->c.started)) fail("rank %d: a call is in flight", e->rank);
    e->path.setup.sets[0].tensors[u->slot] = (pyhvd_cached_tensor){.call = &u->c,
                                                                   .count = count,
                                                                   .prescale = 1,
                                                                   .postscale = 1,
                                                                   .dtype = PYHVD_INT64,
                                                                   .op = PYHVD_SUM};
    u->taken = 0;
    pyhvd_slot_list_renew(&u->c.slots, 0, version);
    int64_t cut = count / 2;
    u->c.arrays = number % 3 ? 0 : 2;
    u->c.srcs = u->c.arrays ? u->addresses : u->c.single_addresses;
    u->c.dsts = u->c.srcs + (u->c.arrays ? 2 : 1);
    u->c.starts = u->c.arrays ? u->starts : NULL;
    u->starts[1] = cut, u->starts[2] = count;
    int64_t *results = roll(draw, 2) ? u->values : u->results;
    for (uint32_t k = 0; k < (u->c.arrays ? 2 : 1); k++) {
        u->c.srcs[k] = (int64_t)(intptr_t)(u->values + (int64_t)k * cut);
        u->c.dsts[k] = (int64_t)(intptr_t)(results + (int64_t)k * cut);
    }
    u->c.slots.digest = digest_of(e, number);
    if (!pyhvd_fast_path_hold(&e->path, &u->c)) fail("no memory");
    u->turn = u->c.started;
    pthread_mutex_unlock(&e->path.submissions.mutex);
    if (roll(draw, 2)) pyhvd_fast_path_ring(&e->path);
}

static void await(end *e, uint64_t number) {
    call *u = &e->calls[number % PYHVD_TURNS];
    int64_t size = e->s->t->size, until = pyhvd_after(LOST);
    while (pyhvd_fast_path_wait(&e->path, &u->c, u->turn, pyhvd_now(), SLICE) != PYHVD_DONE)
        if (pyhvd_now() > until) fail("rank %d: call %d is lost", e->rank, (int)number);
    if (u->taken != is_unlike(e->s, number))
        fail("rank %d: call %d was taken for another", e->rank, (int)number);
    if (u->taken) {
        atomic_fetch_add(&e->s->returned[number], 1);
        return;
    }
    const int64_t *result = (const int64_t *)(intptr_t)u->c.dsts[0];
    for (int64_t i = 0; i < count_of(e->s, number); i++)
        if (result[i] != (int64_t)number * size * (size + 1) / 2 + size * i)
            fail("rank %d, call %d: torn", e->rank, (int)number);
}

static void *run_submitter(void *what) {
    end *e = what;
    dice plan = dice_of(e->s->seed, 100), draw = dice_of(e->s->seed, (uint64_t)e->rank);
    uint64_t rounds = (uint64_t)e->s->t->rounds;
    for (uint64_t number = 0, n; number < rounds; number += n) {
        n = 1 + roll(&plan, AT_ONCE);
        if (n > rounds - number) n = rounds - number;
        for (uint64_t k = 0; k < n; k++) {
            linger(&draw);
            submit(e, number + k, &draw);
        }
        uint64_t from = roll(&draw, n);
        for (uint64_t k = 0; k < n; k++) await(e, number + (from + k) % n);
    }
    return NULL;
}

/* ---- rank 0's coordinator ---- */

static void announce(end *e, uint32_t kind, uint64_t bits, uint64_t version) {
    pyhvd_slot_range range = {.kind = kind,
                              .first = SLOTS / 64 - 1,
                              .end = SLOTS / 64,
                              .words = &bits,
                              .values = &version,
                              .n = kind == PYHVD_DELEGATED};
    pyhvd_order_list list = {.n = 1, .ranges = &range};
    while (!pyhvd_agreement_announce_list(&e->path.setup.table, &list)) {
        pyhvd_agreement_receive(&e->path.setup.table);
        sched_yield();
    }
}

static void *run_coordinator(void *what) {
    end *e = what;
    int rounds = e->s->t->rounds, left = 0, *seen = make((size_t)rounds * sizeof *seen);
    for (int number = 0; number < rounds; number++) left += 2 * is_unlike(e->s, (uint64_t)number);
    for (; left; pyhvd_nap(20000))
        for (int number = 0; number < rounds; number++) {
            uint64_t bit = (uint64_t)1 << number % PYHVD_TURNS;
            int returned = atomic_load(&e->s->returned[number]), size = e->s->t->size;
            if (returned && !seen[number]) announce(e, PYHVD_RECALLED, bit, 0), left--;
            if (returned == size && seen[number] < size)
                announce(e, PYHVD_DELEGATED, bit, (uint64_t)number + 2), left--;
            seen[number] = returned;
        }
    free(seen);
    return NULL;
}

/* ---- the background thread ---- */

static void take_refused(end *e) {
    for (;;) {
        pthread_mutex_lock(&e->path.submissions.mutex);
        call *u = e->path.submissions.refused ? e->path.submissions.refused->owner : NULL;
        if (u) pyhvd_fast_path_take(&e->path, &u->c);
        pthread_mutex_unlock(&e->path.submissions.mutex);
        if (!u) return;
        u->taken = 1;
        for (uint32_t n = u->c.arrays ? u->c.arrays : 1; n; n--)
            pyhvd_fast_path_settle(&e->path, &u->c);
    }
}

static void *run_background(void *what) {
    end *e = what;
    while (!atomic_load(&e->s->over)) {
        uint32_t reasons = pyhvd_fast_path_sleep(&e->path, SLICE);
        if (reasons & PYHVD_WAKE_LOST) fail("rank %d: a host is lost", e->rank);
        if (reasons & (PYHVD_WAKE_REFUSED | PYHVD_WAKE_RECALLED)) take_refused(e);
    }
    pyhvd_fast_path_end(&e->path);
    pyhvd_agreement_leave(&e->path.setup.table);
    pyhvd_fast_path_keep_lock(&e->path);
    return NULL;
}

/* ---- a rank ---- */

static void set_up(end *e) {
    const stage *s = e->s;
    const layout *l = s->hosts;
    uint32_t members[MOST_RANKS];
    int host = l->host_of[e->rank];
    attach_table(&e->path.setup.table, &e->agreement, s->bases[host], l, e->rank, SLOTS);
    e->path.setup.table.has_turns = 1;
    e->path.progress.threshold = 1 << 16;
    e->path.background.cycle_ns = 500000;
    if (!pyhvd_fast_path_init(&e->path)) fail("no memory");
    for (uint32_t k = 0; k < MOST_RANKS; k++) members[k] = k;
    link_up(&e->window, &e->exchange, l, e->rank, s->areas, CAPACITY);
    if (!pyhvd_fast_path_open(&e->path, 0, &e->window)) fail("no memory");
    for (uint32_t k = 0; k < PYHVD_TURNS; k++) {
        call *u = &e->calls[k];
        u->slot = SLOTS - PYHVD_TURNS + k;
        u->c.slots = (pyhvd_slot_list){.n = 1, .ids = &u->slot, .versions = &u->version};
        u->c.srcs = u->c.single_addresses, u->c.dsts = u->c.single_addresses + 1;
        u->c.owner = u;
    }
    pyhvd_ready_table_open_set(&e->path.setup.table, 0, members, (uint32_t)l->ranks[host], 1);
}

static void use(int rank, void *what) {
    stage *s = what;
    end *e = s->ends[rank];
    pthread_t background, submitting, coordinating;
    e->s = s, e->rank = rank;
    set_up(e);
    pthread_barrier_wait(&s->meet);
    if (!rank) announce(e, PYHVD_DELEGATED, UINT64_MAX, 1);
    start_thread(&background, run_background, e);
    start_thread(&submitting, run_submitter, e);
    if (!rank) start_thread(&coordinating, run_coordinator, e);
    pthread_join(submitting, NULL);
    if (!rank) pthread_join(coordinating, NULL);
    pthread_barrier_wait(&s->meet);
    atomic_store(&s->over, 1);
    pyhvd_ready_table_wake(&e->path.setup.table, e->path.setup.table.rank, PYHVD_WAKE_WORK);
    pthread_join(background, NULL);
    pthread_barrier_wait(&s->meet);
    pyhvd_fast_path_free(&e->path);
    pyhvd_exchange_free(&e->exchange);
}

static void play_on(const layout *l, const terms *t, uint64_t seed) {
    stage *s = make(sizeof *s);
    s->t = t, s->seed = seed, s->hosts = l;
    s->returned = make((size_t)t->rounds * sizeof *s->returned);
    for (int h = 0; h < l->hosts; h++) s->bases[h] = make_table(l, h, SLOTS);
    make_areas(s->areas, t->size, CAPACITY);
    for (int q = 0; q < t->size; q++) s->ends[q] = make(sizeof(end));
    pthread_barrier_init(&s->meet, NULL, (unsigned)t->size);
    play(t->size, use, s);
    pthread_barrier_destroy(&s->meet);
    for (int q = 0; q < t->size; q++) free(s->areas[q]), free(s->ends[q]);
    for (int h = 0; h < l->hosts; h++) free(s->bases[h]);
    free((void *)s->returned);
    free(s);
}

/* A new layout every 200 calls. */
void play_turns(const terms *t) {
    dice plan = dice_of(t->seed, 11);
    terms each = {t->size, 200, t->seed};
    for (int done = 0; done < t->rounds; done += each.rounds) {
        layout l;
        draw_layout(&l, t->size, &plan);
        connect_hosts(&l);
        play_on(&l, &each, t->seed + (uint64_t)done);
        part_hosts(&l);
    }
}
