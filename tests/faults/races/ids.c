/* Submissions by call ids (fast_path/call_ids.h), from two threads of each rank that know only
 * pyhvd.h's functions. One thread waits, the other counts on the callback. Meanwhile a third thread lets
 * messages come and go, and makes ids stale. Each rank is alone in a ready table of its own. */
#include "races.h"

#include <sched.h>
#include <stdlib.h>

#include "fast_path/call_ids.h"
#include "kernels/kernels.h"

#define SLOTS 64
#define CALLS 2
#define LOST 20000000000 /* ns */

typedef struct end end;

typedef struct {
    end *e;
    pyhvd_call call;
    uint32_t slot;
    uint64_t version;
    int64_t source, target; /* without atomics: the callback orders them */
    int64_t seen;           /* the result, as the callback found it */
    int waits;
    _Atomic pyhvd_call_id id;
    _Atomic uint32_t callbacks;
} caller;

struct end {
    const terms *t;
    pyhvd_fast_path path;
    pyhvd_window window;
    caller callers[CALLS];
    _Atomic uint32_t over, running;
};

static void note_end(void *context, const char *error) {
    caller *c = context;
    if (error) fail("an error: %s", error);
    if (pyhvd_c_functions.wait(atomic_load(&c->id), LOST) != PYHVD_CALL_NOT_HERE)
        fail("a callback may wait");
    c->seen = c->target;
    atomic_fetch_add_explicit(&c->callbacks, 1, memory_order_release);
}

/* Submit until it succeeds; return 0 if that never happens. */
static int submit(caller *c, uint32_t flags) {
    const void *source = &c->source;
    void *target = &c->target;
    for (int64_t until = pyhvd_after(LOST); pyhvd_now() < until; sched_yield()) {
        int status = pyhvd_c_functions.submit(atomic_load(&c->id), 1, &source, &target, note_end, c,
                                              flags);
        if (status == PYHVD_CALL_SUBMITTED) return 1;
        if (status == PYHVD_CALL_INVALID) fail("an argument is wrong");
    }
    return 0;
}

static void *run_caller(void *what) {
    caller *c = what;
    dice draw = dice_of(c->e->t->seed, 600 + c->slot);
    for (uint32_t k = 0; k < (uint32_t)c->e->t->rounds; k++) {
        c->source = (int64_t)mixed(k + c->slot);
        c->target = 0;
        if (!submit(c, c->waits ? PYHVD_SUBMIT_WAITS : 0)) fail("no submission in turn %u", k);
        while (c->waits &&
               pyhvd_c_functions.wait(atomic_load(&c->id), 1000000) == PYHVD_CALL_PENDING) {
        }
        for (int64_t until = pyhvd_after(LOST);
             atomic_load_explicit(&c->callbacks, memory_order_acquire) <= k; sched_yield())
            if (pyhvd_now() > until) fail("no callback in turn %u", k);
        if (atomic_load(&c->callbacks) != k + 1 || c->seen != c->source)
            fail("a wrong end of turn %u", k);
        linger(&draw);
    }
    atomic_fetch_sub(&c->e->running, 1);
    return NULL;
}

static void *run_background(void *what) {
    end *e = what;
    while (!atomic_load(&e->over)) pyhvd_fast_path_sleep(&e->path, -1);
    return NULL;
}

static void give_id(caller *c) {
    pyhvd_id_tensor *tensor = calloc(1, sizeof *tensor);
    if (!tensor) fail("no memory");
    tensor->layout.n = 1;
    tensor->layout.type = PYHVD_INT64;
    pyhvd_id_facts facts = {.path = &c->e->path, .call = &c->call, .tensors = tensor};
    pyhvd_call_id id = pyhvd_call_id_attach(&facts);
    if (!id) fail("no id");
    atomic_store(&c->id, id);
}

static void renew_id(caller *c) {
    pyhvd_call_id id = atomic_load(&c->id);
    pyhvd_call_id_detach(id);
    while (!pyhvd_call_id_release(id)) sched_yield();
    give_id(c);
}

/* As the queue and Python: let messages come and go; make ids stale, and give new ones. */
static void disturb(end *e, dice *draw) {
    pyhvd_tensor_layout layout = {.struct_size = sizeof layout};
    while (atomic_load(&e->running)) {
        pyhvd_set_word(&e->path.has_messages, 1);
        linger(draw);
        pyhvd_set_word(&e->path.has_messages, 0);
        caller *c = &e->callers[roll(draw, CALLS)];
        pyhvd_nap((int64_t)roll(draw, 200000));
        if (!roll(draw, 4)) renew_id(c);
        if (pyhvd_c_functions.describe(atomic_load(&c->id), 0, &layout) || layout.n != 1)
            fail("a wrong layout");
    }
}

static void set_up(end *e, uint8_t **area, void *base) {
    uint32_t alone = 0;
    make_areas(area, 1, PYHVD_FLAT);
    look_at(&e->window, area, 0, 1, PYHVD_FLAT, PYHVD_FLAT);
    pyhvd_ready_table_attach(&e->path.setup.table, base, 0, 1, SLOTS);
    e->path.progress.threshold = 1 << 16;
    e->path.background.cycle_ns = 100000;
    if (!pyhvd_fast_path_init(&e->path) || !pyhvd_fast_path_open(&e->path, 0, &e->window))
        fail("no memory");
    pyhvd_ready_table_open_set(&e->path.setup.table, 0, &alone, 1, 0);
    for (uint32_t k = 0; k < CALLS; k++) {
        caller *c = &e->callers[k];
        c->e = e, c->slot = k, c->version = 1, c->waits = k == 0;
        pyhvd_ready_table_delegate(&e->path.setup.table, 0, c->slot, c->version);
        c->call = (pyhvd_call){.slots = {.n = 1, .ids = &c->slot, .versions = &c->version}};
        c->call.srcs = c->call.single_addresses, c->call.dsts = c->call.single_addresses + 1;
        e->path.setup.sets[0].tensors[k] = (pyhvd_cached_tensor){.call = &c->call,
                                                                 .count = 1,
                                                                 .prescale = 1,
                                                                 .postscale = 1,
                                                                 .dtype = PYHVD_INT64,
                                                                 .op = PYHVD_SUM};
        give_id(c);
    }
}

static void use(int rank, void *what) {
    end *e = make(sizeof *e);
    uint8_t *area;
    void *base = make(pyhvd_ready_table_bytes(1, SLOTS));
    pthread_t background, submitting[CALLS];
    dice draw = dice_of(((const terms *)what)->seed, (uint64_t)rank);
    e->t = what;
    set_up(e, &area, base);
    atomic_store(&e->running, CALLS);
    start_thread(&background, run_background, e);
    for (int k = 0; k < CALLS; k++) start_thread(&submitting[k], run_caller, &e->callers[k]);
    disturb(e, &draw);
    for (int k = 0; k < CALLS; k++) pthread_join(submitting[k], NULL);
    for (int k = 0; k < CALLS; k++) {
        pyhvd_call_id id = atomic_load(&e->callers[k].id);
        pyhvd_call_id_detach(id);
        if (!pyhvd_call_id_release(id)) fail("an id is used");
        if (pyhvd_c_functions.wait(id, 0) != PYHVD_CALL_STALE) fail("a stale id is taken");
    }
    atomic_store(&e->over, 1);
    pyhvd_ready_table_wake(&e->path.setup.table, 0, PYHVD_WAKE_WORK);
    pthread_join(background, NULL);
    pyhvd_fast_path_free(&e->path);
    free(area), free(base), free(e);
}

void play_ids(const terms *t) { play(t->size, use, (void *)t); }
