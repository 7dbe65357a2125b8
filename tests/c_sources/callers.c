/* C code that uses pyhvd.h, as an adapter would; built apart from pyhvd, and driven by
 * tests/c_callers.py through ctypes, which releases the GIL. */
#include <pyhvd.h>

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct {
    int calls;  /* how often `done` was called; atomic */
    int waited; /* what wait() said inside of `done` */
    char error[1024];
    const pyhvd_c_api *api;
    pyhvd_call_id id;
} outcome;

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void note_end(void *context, const char *error) {
    outcome *o = context;
    if (error) strncpy(o->error, error, sizeof o->error - 1);
    o->waited = o->api->wait(o->id, 1000000000);
    __atomic_add_fetch(&o->calls, 1, __ATOMIC_RELEASE);
}

/* Submit; return the outcome to come, and the status. */
outcome *begin(const pyhvd_c_api *api, pyhvd_call_id id, uint32_t n, const void *const *sources,
               void *const *targets, uint32_t flags, int *status) {
    outcome *o = calloc(1, sizeof *o);
    o->api = api;
    o->id = id;
    *status = api->submit(id, n, sources, targets, note_end, o, flags);
    return o;
}

/* Wait until `done` was called, for at most `ns`; with `help`, make progress meanwhile. Return how often it
 * was called. */
int await_end(outcome *o, int64_t ns, int help) {
    int64_t until = now() + ns;
    while (!__atomic_load_n(&o->calls, __ATOMIC_ACQUIRE) && now() < until)
        if (!help || o->api->wait(o->id, 1000000) != PYHVD_CALL_PENDING) sched_yield();
    return __atomic_load_n(&o->calls, __ATOMIC_ACQUIRE);
}

const char *error_of(const outcome *o) { return o->error; }
int waited_in_done(const outcome *o) { return o->waited; }
void drop(outcome *o) { free(o); }

int describe(const pyhvd_c_api *api, pyhvd_call_id id, uint32_t k, pyhvd_tensor_layout *layout) {
    layout->struct_size = sizeof *layout;
    return api->describe(id, k, layout);
}

uint64_t generation(const pyhvd_c_api *api) { return api->generation(); }
int wait_for(const pyhvd_c_api *api, pyhvd_call_id id, int64_t ns) { return api->wait(id, ns); }
int submit_without_done(const pyhvd_c_api *api, pyhvd_call_id id) {
    return api->submit(id, 1, NULL, NULL, NULL, NULL, 0);
}

/* ---- many submissions of one call, from a thread that Python does not know ---- */

typedef struct {
    const pyhvd_c_api *api;
    pyhvd_call_id id;
    int turns, rank, size, waits;
    int64_t *took; /* ns of each turn; or NULL */
    int wrong;
} work;

static void *submit_many(void *what) {
    work *w = what;
    for (int turn = 0; turn < w->turns && !w->wrong; turn++) {
        float source = (float)(turn + w->rank), target = -1, sum = 0;
        const void *from = &source;
        void *to = &target;
        int status;
        for (int r = 0; r < w->size; r++) sum += (float)(turn + r);
        int64_t began = now(), until = began + 30000000000LL;
        outcome o = {.api = w->api, .id = w->id};
        do /* names of other calls may be going by message */
            status = w->api->submit(w->id, 1, &from, &to, note_end, &o,
                                    w->waits ? PYHVD_SUBMIT_WAITS : 0);
        while (status == PYHVD_CALL_BY_PYTHON && now() < until && !sched_yield());
        if (status != PYHVD_CALL_SUBMITTED) {
            w->wrong = 1000 + status;
            break;
        }
        while (w->waits && w->api->wait(w->id, 50000000) == PYHVD_CALL_PENDING && now() < until) {
        }
        while (!__atomic_load_n(&o.calls, __ATOMIC_ACQUIRE) && now() < until) sched_yield();
        if (w->took) w->took[turn] = now() - began;
        if (o.calls != 1 || o.error[0] || target != sum) w->wrong = turn + 1;
    }
    return NULL;
}

/* Return 0, or the first turn that went wrong, or 1000 and the status of a submission. */
int repeat(const pyhvd_c_api *api, pyhvd_call_id id, int turns, int rank, int size, int waits,
           int64_t *took) {
    work w = {api, id, turns, rank, size, waits, took, 0};
    pthread_t thread;
    if (pthread_create(&thread, NULL, submit_many, &w)) return -1;
    pthread_join(thread, NULL);
    return w.wrong;
}
