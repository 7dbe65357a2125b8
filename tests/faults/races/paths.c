/* The fast path, used as Python uses it. Each rank has two threads that submit and wait, a
 * background thread that flushes, makes progress and takes refused calls, and a thread that reads
 * the trace. Two process sets share the ready table. Rank 0 recalls calls and announces lists, at
 * which all background threads meet in a window. A second scenario aborts windows at drawn moments.
 * In a third one the ranks are on several hosts: set 0 has all ranks, set 1 those of host 0, and all
 * ranks must carry out the batches of set 0 and the lists in one order.
 *
 * A taken call is submitted again by all ranks whose submission was taken: it has ended on none of
 * them. */
#include "races.h"

#include <stdlib.h>
#include <string.h>

#include "agreement/agreement.h"
#include "fast_path/progress.h"
#include "kernels/kernels.h"

#define CAPACITY ((size_t)PYHVD_FLAT)
#define SLOTS 64
#define SETS 2
#define UNITS 11
#define GROUPED 3 /* tensors of a group */
#define LONGEST 9000
#define SLICE 3000000    /* ns; then look whether another call was taken, and submit it again */
#define LOST 10000000000 /* ns from the end of a turn until its callback counts as lost */
#define IDLE 40000000    /* ns after which the background thread sleeps until it is woken */
#define CELLS 256        /* of the trace's ring */

enum { SUBMITTERS = 2 };

/* The calls, the same on every rank; a group uses its slot and the next ones. */
static const struct {
    uint32_t set, slot, n;
    int64_t count[GROUPED];
    int direct, submitter;
} known[UNITS] = {
    {0, 0, 1, {1}, 0, 0},          {0, 1, 1, {3}, 0, 0},       {0, 2, 1, {500}, 0, 0},
    {0, 3, 1, {4096}, 1, 0},       {0, 4, 1, {9000}, 1, 0},    {0, 5, 1, {2}, 0, 1},
    {0, 6, 3, {7, 1200, 1}, 0, 0}, {0, 9, 1, {2500}, 0, 1},    {1, 0, 1, {40}, 0, 1},
    {1, 1, 1, {5000}, 0, 1},       {1, 2, 3, {1, 2, 3}, 0, 1},
};

typedef struct stage stage;

/* One rank's part of one call. */
typedef struct {
    pyhvd_call c;
    uint32_t slots[GROUPED];
    uint64_t versions[GROUPED];
    int64_t srcs[2 * GROUPED], starts[GROUPED + 1];
    int64_t *values[GROUPED], *results[GROUPED];
    int taken;               /* written before the turn ends, read after it */
    _Atomic uint64_t called; /* the last turn that had ended when the background thread was woken */
} call;

typedef struct {
    stage *s;
    int rank;
    pyhvd_fast_path path;
    pyhvd_window windows[SETS];
    pyhvd_agreement agreement; /* over several hosts */
    pyhvd_exchange exchange;   /* likewise, of set 0 */
    uint64_t entries, order;   /* of set 0 and lists: how many, and a hash of them in order */
    pyhvd_trace trace;
    pyhvd_sampler sampler;
    call calls[UNITS];
    dice draw; /* used by the background thread */
    uint64_t done;
} end;

struct stage {
    const terms *t;
    layout *hosts; /* NULL: all ranks are on one host */
    int members[SETS];
    void *bases[MOST_HOSTS]; /* of each host's ready table, and its agreement */
    uint8_t *areas[SETS][MOST_RANKS], *arenas[MOST_RANKS];
    end *ends[MOST_RANKS];
    pthread_barrier_t meet;
    int recalled;                       /* the call that the next list is about */
    _Atomic uint64_t announced, wanted; /* the last list; 1 + a frozen call */
    _Atomic uint32_t quiet, over, closing;
    int aborts, aborted, aborter;
    uint64_t which;
};

/* ---- submitting ---- */

static void fill(end *e, call *u, uint64_t turn, dice *draw) {
    int inplace = known[u - e->calls].direct || roll(draw, 2);
    for (uint32_t k = 0; k < u->c.slots.n; k++) {
        int64_t count = known[u - e->calls].count[k];
        for (int64_t i = 0; i < count; i++) u->values[k][i] = (int64_t)turn * (e->rank + 1) + i;
        u->srcs[k] = (int64_t)(intptr_t)u->values[k];
        u->srcs[GROUPED + k] = (int64_t)(intptr_t)(inplace ? u->values[k] : u->results[k]);
    }
}

static void check(const end *e, const call *u, uint64_t turn) {
    int64_t members = e->s->members[u->c.set];
    for (uint32_t k = 0; k < u->c.slots.n; k++) {
        const int64_t *result = (const int64_t *)(intptr_t)u->srcs[GROUPED + k];
        for (int64_t i = 0; i < known[u - e->calls].count[k]; i++)
            if (result[i] != (int64_t)turn * members * (members + 1) / 2 + members * i)
                fail("rank %d, turn %d of call %d: torn", e->rank, (int)turn, (int)(u - e->calls));
    }
}

static uint64_t submit(end *e, call *u, int ring) {
    pthread_mutex_lock(&e->path.submissions.mutex);
    if (!pyhvd_call_finished(&u->c, u->c.started)) fail("rank %d: a call is in flight", e->rank);
    u->taken = 0;
    memcpy(u->c.srcs, u->srcs, u->c.slots.n * sizeof(int64_t));
    memcpy(u->c.dsts, u->srcs + GROUPED, u->c.slots.n * sizeof(int64_t));
    if (!pyhvd_fast_path_hold(&e->path, &u->c)) fail("no memory");
    uint64_t turn = u->c.started;
    pthread_mutex_unlock(&e->path.submissions.mutex);
    if (ring) pyhvd_fast_path_ring(&e->path);
    return turn;
}

/* Wait at most SLICE for the end of a turn, in one of three ways. */
static int await(end *e, call *u, uint64_t turn, dice *draw) {
    uint64_t how = roll(draw, 8);
    int64_t began = pyhvd_now(), until = began + SLICE;
    if (how > 1) {
        int status = pyhvd_fast_path_wait(&e->path, &u->c, turn, began, SLICE);
        if (status == PYHVD_DONE) pyhvd_fast_path_waited(&e->path, began);
        return status;
    }
    pyhvd_fast_path_flush(&e->path, 0, began);
    int called = how && !pyhvd_call_notify(&u->c, turn), status = PYHVD_LATE;
    while (status == PYHVD_LATE && pyhvd_now() < until) { /* the background thread makes progress */
        int ended = pyhvd_call_finished(&u->c, turn);
        if (called && ended) until = began + LOST; /* now the callback must come */
        if (called ? atomic_load(&u->called) >= turn : ended)
            status = PYHVD_DONE;
        else if (atomic_load(&e->path.closed))
            status = PYHVD_CLOSED;
        else
            sched_yield();
    }
    if (status == PYHVD_LATE && until == began + LOST)
        fail("rank %d: no wake-up at the end of call %d", e->rank, (int)(u - e->calls));
    return status;
}

typedef struct {
    end *e;
    int which;
} submitter;

static void *run_submitter(void *what) {
    submitter *me = what;
    end *e = me->e;
    stage *s = e->s;
    dice plan = dice_of(s->t->seed + s->which, 100 + (uint64_t)me->which);
    dice draw = dice_of(s->t->seed + s->which, (uint64_t)(e->rank * SUBMITTERS + me->which));
    for (uint64_t number = 1; s->aborts || number <= (uint64_t)s->t->rounds; number++) {
        int chosen[UNITS], n = 0;
        uint64_t turns[UNITS], from = roll(&draw, UNITS), each = 1 + roll(&plan, 4);
        uint64_t lot = mixed(roll(&plan, 1u << 30));
        for (int k = 0; k < UNITS; k++) { /* in a different order on every rank */
            int which = (int)((from + (uint64_t)k) % UNITS);
            int mine = known[which].submitter == me->which &&
                       e->rank < s->members[known[which].set];
            if (mine && (lot >> which * 4) % each == 0) chosen[n++] = which;
        }
        for (int k = 0; k < n; k++) {
            call *u = &e->calls[chosen[k]];
            fill(e, u, number, &draw);
            linger(&draw);
            turns[k] = submit(e, u, roll(&draw, 3) != 0);
        }
        for (int k = 0; n; k = (k + 1) % n) {
            call *u = &e->calls[chosen[k]];
            int status = await(e, u, turns[k], &draw);
            if (status == PYHVD_CLOSED) return NULL;
            if (status == PYHVD_LATE) continue;
            if (u->taken) {
                fill(e, u, number, &draw);
                turns[k] = submit(e, u, 1);
                continue;
            }
            check(e, u, number);
            turns[k] = turns[--n];
            chosen[k] = chosen[n];
            if (!n) break;
        }
    }
    return NULL;
}

/* ---- the background thread ---- */

/* Take a call if it is in flight, and end it; its submitter submits it again. */
static void take(end *e, call *u, uint64_t version) {
    pthread_mutex_lock(&e->path.submissions.mutex);
    int flies = !pyhvd_call_finished(&u->c, u->c.started);
    if (flies) pyhvd_fast_path_take(&e->path, &u->c);
    for (uint32_t k = 0; version && k < u->c.slots.n; k++)
        pyhvd_slot_list_renew(&u->c.slots, k, version);
    pthread_mutex_unlock(&e->path.submissions.mutex);
    if (!flies) return;
    u->taken = 1;
    for (uint32_t k = 0; k < u->c.slots.n; k++) pyhvd_fast_path_settle(&e->path, &u->c);
}

static void take_refused(end *e) {
    for (;;) {
        pthread_mutex_lock(&e->path.submissions.mutex);
        call *u = e->path.submissions.refused ? e->path.submissions.refused->owner : NULL;
        pthread_mutex_unlock(&e->path.submissions.mutex);
        if (!u) return;
        take(e, u, 0);
        linger(&e->draw);
    }
}

/* The holder of the progress lock steps past an entry: note what all ranks must do in one order. */
void __real_pyhvd_ready_table_advance(pyhvd_ready_table *t);
void __wrap_pyhvd_ready_table_advance(pyhvd_ready_table *t);
void __wrap_pyhvd_ready_table_advance(pyhvd_ready_table *t) {
    int noted = t->agreement && !t->has_turns; /* those of turns.c are of another kind */
    const pyhvd_log_entry *entry = noted ? pyhvd_ready_table_next(t) : NULL;
    if (entry && !entry->set) {
        end *e = (end *)((uint8_t *)t - offsetof(end, path.setup.table));
        uint64_t what = entry->kind == PYHVD_LIST ? entry->number : entry->words[0];
        e->entries++;
        e->order = mixed(e->order + mixed(what + entry->kind));
    }
    __real_pyhvd_ready_table_advance(t);
}

/* Store which turns have ended, in place of running callbacks. */
static void call_back(end *e) {
    for (int k = 0; k < UNITS; k++)
        atomic_store(&e->calls[k].called, atomic_load(&e->calls[k].c.finished));
}

static uint64_t slots_of(int which) {
    return (((uint64_t)1 << known[which].n) - 1) << known[which].slot;
}

/* Rank 0: over several hosts, recall a call's slots (for list `number`), or delegate them. */
static void announce_slots(end *e, uint32_t kind, int which, uint64_t number, uint64_t version) {
    uint64_t bits = slots_of(which), everyone = ((uint64_t)1 << e->s->t->size) - 1;
    pyhvd_slot_range range = {kind, known[which].set, 0, 1, &bits, &version, version ? 1 : 0, NULL};
    pyhvd_order_list list = {number, (const uint8_t *)&everyone, number ? sizeof everyone : 0, 1,
                             &range};
    while (!pyhvd_agreement_announce_list(&e->path.setup.table, &list)) {
        pyhvd_agreement_receive(&e->path.setup.table);
        sched_yield();
    }
}

/* Rank 0: recall a call, and announce that its slots get another version. */
static void announce(end *e) {
    stage *s = e->s;
    uint64_t wanted = atomic_exchange(&s->wanted, 0), marked[MOST_RANKS], used[1];
    int which = wanted ? (int)wanted - 1 : (int)roll(&e->draw, UNITS);
    uint64_t bits = slots_of(which), number = atomic_load(&s->announced) + 1;
    pyhvd_ranks audience = {{((uint64_t)1 << s->t->size) - 1}};
    s->recalled = which;
    atomic_store(&s->announced, number);
    if (s->hosts) {
        announce_slots(e, PYHVD_RECALLED, which, number, 0);
        return;
    }
    pyhvd_ready_table_recall(&e->path.setup.table, known[which].set, &bits, marked);
    pyhvd_ready_table_read(&e->path.setup.table, known[which].set, marked, used);
    while (!pyhvd_fast_path_announce(&e->path, number, &audience)) sched_yield();
}

static void delegate(end *e, int which, uint64_t version) {
    if (e->s->hosts) {
        announce_slots(e, PYHVD_DELEGATED, which, 0, version);
        return;
    }
    for (uint32_t k = 0; k < known[which].n; k++)
        pyhvd_ready_table_delegate(&e->path.setup.table, known[which].set, known[which].slot + k,
                                   version);
}

/* Return when all ranks have called it. */
static void meet(end *e) {
    int64_t one = 1, at = (int64_t)(intptr_t)&one, starts[] = {0, 1};
    pyhvd_job job = {&at, &at, starts, 1, PYHVD_INT64, PYHVD_SUM, 1.0, 1.0, 0};
    pyhvd_window *w = &e->windows[0];
    if (e->s->hosts ? pyhvd_window_allreduce(w, &job) : pyhvd_window_barrier(w))
        fail("rank %d: no rank has aborted", e->rank);
    if (e->s->hosts && one != e->s->t->size) fail("rank %d: the ranks did not meet", e->rank);
}

/* Step past the announced list, if it is next in the log. */
static void meet_at_list(end *e) {
    stage *s = e->s;
    uint64_t number = atomic_load(&s->announced);
    if (number == e->done || !pyhvd_fast_path_enter(&e->path, number)) return;
    call *u = &e->calls[s->recalled];
    take(e, u, number + 1);
    e->path.progress.threshold = (size_t)1024 << number % 8;
    meet(e);
    if (!e->rank) delegate(e, s->recalled, number + 1);
    if (!pyhvd_sampler_counts(&e->sampler)) pyhvd_sampler_start(&e->sampler, 3, 100, 0);
    e->done = number;
    /* No rank goes on before all have read `recalled`. */
    meet(e);
    pyhvd_fast_path_leave(&e->path);
}

/* Rank 0: wake the background threads of all ranks. */
static void wake_all(end *e) {
    pyhvd_ready_table *t = &e->path.setup.table;
    const layout *l = e->s->hosts;
    for (int q = 0; q < e->s->t->size; q++)
        if (l && l->host_of[q])
            pyhvd_agreement_ring(t, (uint32_t)l->host_of[q],
                                 (uint32_t)(q - l->first[l->host_of[q]]));
        else
            pyhvd_ready_table_wake(t, q, PYHVD_WAKE_WORK);
}

/* Freeze a call, but not the first one, now and then; on rank 0, announce lists and close. */
static void act(end *e) {
    stage *s = e->s;
    uint64_t what = roll(&e->draw, 16), which = 1 + roll(&e->draw, UNITS - 1);
    if (what < 2 && e->rank && !atomic_load(&s->wanted) && !atomic_load(&s->over)) {
        for (uint32_t k = 0; k < known[which].n; k++)
            pyhvd_ready_table_freeze(&e->path.setup.table, known[which].set, known[which].slot + k);
        atomic_store(&s->wanted, which + 1);
    }
    if (e->rank || atomic_load(&s->announced) != e->done) return;
    if (atomic_load(&s->over)) {
        if (!atomic_exchange(&s->closing, 1)) wake_all(e);
    } else if (!atomic_load(&s->quiet) && (what < 4 || atomic_load(&s->wanted))) {
        announce(e);
    }
}

static void check_note(end *e, int set) {
    size_t bytes;
    const uint8_t *note = pyhvd_window_note(&e->windows[set], &bytes);
    if (!note || !is_note(note, bytes, e->s->aborter, e->s->which))
        fail("rank %d: no note", e->rank);
}

static void *run_background(void *what) {
    end *e = what;
    stage *s = e->s;
    for (;;) {
        int64_t limit = 1000000 + (int64_t)roll(&e->draw, 3000000);
        uint32_t reasons = pyhvd_fast_path_sleep(&e->path, atomic_load(&s->quiet) ? LOST : limit);
        if (reasons & (PYHVD_WAKE_REFUSED | PYHVD_WAKE_RECALLED)) take_refused(e);
        if (reasons & PYHVD_WAKE_LOST) fail("rank %d: a host is lost", e->rank);
        if (reasons & PYHVD_WAKE_DONE) call_back(e);
        if (reasons & PYHVD_WAKE_ABORTED) {
            uint32_t found = pyhvd_fast_path_aborted(&e->path);
            if (!found) fail("rank %d: nothing is aborted", e->rank);
            check_note(e, (int)found - 1);
            break;
        }
        if (s->aborts && atomic_load(&s->over)) break;
        if (s->aborts) continue;
        meet_at_list(e);
        act(e);
        if (atomic_load(&s->closing) && atomic_load(&s->announced) == e->done) break;
    }
    pyhvd_fast_path_end(&e->path);
    if (s->hosts) pyhvd_agreement_leave(&e->path.setup.table);
    pyhvd_fast_path_keep_lock(&e->path);
    return NULL;
}

/* ---- the recorder ---- */

static void *run_recorder(void *what) {
    end *e = what;
    dice draw = dice_of(e->s->t->seed, 200 + (uint64_t)e->rank);
    pyhvd_event event;
    uint64_t sum = 0, before = 0;
    while (!atomic_load(&e->path.closed)) {
        if (roll(&draw, 2)) pyhvd_trace_start(&e->trace, CELLS);
        pyhvd_nap((int64_t)roll(&draw, 1000000));
        for (int k = 0; k < CELLS && pyhvd_trace_take(&e->trace, &event); k++)
            if (event.kind < PYHVD_SUBMITTED || event.kind > PYHVD_EXCHANGING ||
                event.end < event.begin)
                fail("rank %d: a torn record", e->rank);
        if (roll(&draw, 2)) pyhvd_trace_stop(&e->trace);
        sum = atomic_load_explicit(&e->path.counters.tensors.sum, memory_order_relaxed);
        if (sum < before) fail("rank %d: a count went back", e->rank);
        before = sum;
        pyhvd_fast_path_is_running(&e->path);
    }
    return NULL;
}

/* ---- a rank ---- */

static void install(end *e, int which) {
    call *u = &e->calls[which];
    u->c.slots.ids = u->slots, u->c.slots.versions = u->versions, u->c.owner = u;
    u->c.set = known[which].set;
    u->c.slots.n = known[which].n;
    u->c.grouped = u->c.slots.n > 1;
    u->c.srcs = u->c.grouped ? make(2 * GROUPED * sizeof(int64_t)) : u->c.single_addresses;
    u->c.dsts = u->c.srcs + u->c.slots.n;
    u->c.starts = u->starts;
    for (uint32_t k = 0; k < u->c.slots.n; k++) {
        int64_t count = known[which].count[k];
        pyhvd_cached_tensor *r = &e->path.setup.sets[u->c.set].tensors[known[which].slot + k];
        u->slots[k] = known[which].slot + k;
        u->versions[k] = 1;
        u->starts[k + 1] = u->starts[k] + count;
        u->results[k] = make((size_t)count * sizeof(int64_t));
        u->values[k] = known[which].direct
                           ? (int64_t *)e->s->arenas[e->rank] + known[which].slot * LONGEST
                           : make((size_t)count * sizeof(int64_t));
        *r = (pyhvd_cached_tensor){.call = &u->c,
                                   .index = k,
                                   .count = count,
                                   .prescale = 1,
                                   .postscale = 1,
                                   .dtype = PYHVD_INT64,
                                   .op = PYHVD_SUM,
                                   .direct = known[which].direct && !e->s->hosts};
    }
    if (!e->rank) delegate(e, which, 1);
}

/* Attach the ready table of a rank's host; over several hosts, with its agreement. */
static void attach(end *e, const stage *s) {
    const layout *l = s->hosts;
    pyhvd_ready_table *t = &e->path.setup.table;
    if (l)
        attach_table(t, &e->agreement, s->bases[l->host_of[e->rank]], l, e->rank, SLOTS);
    else
        pyhvd_ready_table_attach(t, s->bases[0], e->rank, s->t->size, SLOTS);
}

/* Open a set on this rank. */
static void open_set(end *e, stage *s, uint32_t set) {
    const layout *l = s->hosts;
    uint32_t members[MOST_RANKS];
    int spans = l && !set, host = l ? l->host_of[e->rank] : 0;
    int count = spans ? l->ranks[host] : s->members[set];
    for (uint32_t k = 0; k < MOST_RANKS; k++) members[k] = k;
    if (!e->path.setup.table.rank && (spans || !host))
        pyhvd_ready_table_open_set(&e->path.setup.table, set, members, (uint32_t)count, spans);
    if (e->rank >= s->members[set]) return;
    if (spans)
        link_up(&e->windows[set], &e->exchange, l, e->rank, s->areas[set], CAPACITY);
    else
        look_at(&e->windows[set], s->areas[set], e->rank, count, CAPACITY, CAPACITY);
    memcpy(e->windows[set].arena, s->arenas, sizeof s->arenas);
    e->windows[set].trace = &e->trace;
    if (!pyhvd_fast_path_open(&e->path, set, &e->windows[set])) fail("no memory");
}

static void set_up(stage *s, int rank) {
    end *e = s->ends[rank];
    e->s = s;
    e->rank = rank;
    e->draw = dice_of(s->t->seed + s->which, 300 + (uint64_t)rank);
    attach(e, s);
    e->path.setup.trace = &e->trace;
    e->path.setup.sampler = &e->sampler;
    e->path.progress.threshold = 1 << 16;
    e->path.background.cycle_ns = 500000;
    atomic_store(&e->path.counters.timed, 1);
    if (!pyhvd_fast_path_init(&e->path)) fail("no memory");
    for (uint32_t set = 0; set < SETS; set++) open_set(e, s, set);
    if (s->hosts) pthread_barrier_wait(&s->meet); /* all sets are open when slots are delegated */
    for (int k = 0; k < UNITS; k++)
        if (rank < s->members[known[k].set]) install(e, k);
}

static void tear_down(end *e) {
    for (int k = 0; k < UNITS; k++) {
        call *u = &e->calls[k];
        for (uint32_t i = 0; i < u->c.slots.n; i++) {
            free(u->results[i]);
            if (!known[k].direct) free(u->values[i]);
        }
        if (u->c.grouped) free(u->c.srcs);
    }
    pyhvd_fast_path_free(&e->path);
    if (e->s->hosts) pyhvd_exchange_free(&e->exchange);
    pyhvd_trace_free(&e->trace);
}

/* Abort a window at a drawn moment, from a thread that takes no part in its operations. */
static void abort_soon(end *e) {
    uint8_t note[PYHVD_NOTE];
    stage *s = e->s;
    dice draw = dice_of(s->t->seed + s->which, 400);
    pyhvd_nap((int64_t)roll(&draw, 5000000));
    size_t bytes = write_note(note, e->rank, s->which);
    pyhvd_window_abort(&e->windows[s->aborted], note, bytes);
    pyhvd_nap((int64_t)roll(&draw, 5000000));
    atomic_store(&s->over, 1);
    wake_all(e);
}

/* Submit a call that no thread waits for, when all background threads sleep: each must wake. */
static void leave_to_background(end *e, dice *draw) {
    call *u = &e->calls[0];
    uint64_t turn;
    atomic_store(&e->s->quiet, 1);
    pyhvd_nap(IDLE);
    int64_t until = pyhvd_now() + LOST / 2;
    do {
        fill(e, u, 1, draw);
        turn = submit(e, u, 1);
        while (!pyhvd_call_finished(&u->c, turn))
            if (pyhvd_now() > until)
                fail("rank %d: the background thread sleeps", e->rank);
            else
                pyhvd_nap(100000);
    } while (u->taken);
    check(e, u, 1);
}

static void use(int rank, void *what) {
    stage *s = what;
    end *e = s->ends[rank];
    pthread_t submitting[SUBMITTERS], background, recorder;
    submitter parts[SUBMITTERS];
    set_up(s, rank);
    pthread_barrier_wait(&s->meet);
    start_thread(&background, run_background, e);
    start_thread(&recorder, run_recorder, e);
    for (int k = 0; k < SUBMITTERS; k++) {
        parts[k] = (submitter){e, k};
        start_thread(&submitting[k], run_submitter, &parts[k]);
    }
    if (s->aborts && rank == s->aborter) abort_soon(e);
    for (int k = 0; k < SUBMITTERS; k++) pthread_join(submitting[k], NULL);
    dice draw = dice_of(s->t->seed, 500 + (uint64_t)rank);
    if (s->hosts) leave_to_background(e, &draw);
    pthread_barrier_wait(&s->meet);
    atomic_store(&s->over, 1);
    pyhvd_ready_table_wake(&e->path.setup.table, e->path.setup.table.rank, PYHVD_WAKE_WORK);
    pthread_join(background, NULL);
    pthread_join(recorder, NULL);
    if (s->aborts && rank < s->members[s->aborted]) check_note(e, s->aborted);
    pthread_barrier_wait(&s->meet);
    tear_down(e);
}

static void check_order(const stage *s) {
    const end *first = s->ends[0];
    for (int q = 1; s->hosts && q < s->t->size; q++)
        if (s->ends[q]->entries != first->entries || s->ends[q]->order != first->order)
            fail("rank %d: another order than rank 0's", q);
}

static void play_one(const terms *t, int aborts, uint64_t which, layout *hosts) {
    stage *s = make(sizeof *s);
    dice plan = dice_of(t->seed + which, 7);
    s->t = t;
    s->which = which;
    s->aborts = aborts;
    s->aborted = (int)roll(&plan, SETS);
    s->members[0] = t->size;
    s->members[1] = hosts ? hosts->ranks[0] : t->size > 2 ? t->size - 1 : t->size;
    s->hosts = hosts;
    s->aborter = (int)roll(&plan, (uint64_t)s->members[s->aborted]);
    for (int h = 0; h < (hosts ? hosts->hosts : 1); h++)
        s->bases[h] = hosts ? make_table(hosts, h, SLOTS)
                            : make(pyhvd_ready_table_bytes(t->size, SLOTS));
    for (int set = 0; set < SETS; set++) make_areas(s->areas[set], s->members[set], CAPACITY);
    for (int q = 0; q < t->size; q++) {
        s->arenas[q] = make(UNITS * LONGEST * sizeof(int64_t));
        s->ends[q] = make(sizeof(end));
    }
    pthread_barrier_init(&s->meet, NULL, (unsigned)t->size);
    /* All ranks meet after the set-up: rank 0 has opened the sets and delegated the slots by
     * then. */
    play(t->size, use, s);
    check_order(s);
    pthread_barrier_destroy(&s->meet);
    for (int set = 0; set < SETS; set++)
        for (int q = 0; q < s->members[set]; q++) free(s->areas[set][q]);
    for (int q = 0; q < t->size; q++) free(s->arenas[q]), free(s->ends[q]);
    for (int h = 0; h < MOST_HOSTS; h++) free(s->bases[h]);
    free(s);
}

void play_paths(const terms *t) { play_one(t, 0, 0, NULL); }

void play_path_aborts(const terms *t) {
    for (int k = 0; k < t->rounds; k++) play_one(t, 1, (uint64_t)k + 1, NULL);
}

/* On several hosts: a new layout every 40 rounds. */
void play_agreements(const terms *t) {
    dice plan = dice_of(t->seed, 9);
    terms each = {t->size, 40, t->seed};
    for (int done = 0; done < t->rounds; done += each.rounds) {
        layout l;
        draw_layout(&l, t->size, &plan);
        connect_hosts(&l);
        play_one(&each, 0, (uint64_t)done, &l);
        part_hosts(&l);
    }
}
