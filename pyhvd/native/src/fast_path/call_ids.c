/* Submission by call ids; call_ids.h states the rules. */
#include "fast_path/call_ids.h"

#include <stdlib.h>
#include <string.h>

#define CHUNK 256 /* entries that are allocated together */
#define CHUNKS 256
#define CLOSED_NAP_NS 1000000 /* between looks at a call that the background thread will end */

typedef struct {
    _Atomic uint64_t state;
    uint32_t forks; /* of the process at the time of `attach` */
    uint32_t next;  /* under `mutex`: 1 + the next entry in `unused`, or 0 */
    pyhvd_id_facts facts;
} entry;

/* Owner: the holder of `mutex`; chunks are read by any thread. */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static _Atomic(entry *) chunks[CHUNKS];
static uint32_t made, unused; /* entries; 1 + the first that can be reused, or 0 */
static pthread_once_t watches_forks = PTHREAD_ONCE_INIT;

static _Atomic uint32_t forks;
static _Atomic uint64_t generation = 1;

/* ---- the table ---- */

/* In a forked child. Another thread of the parent may have held the mutex. */
static void begin_child(void) {
    pthread_mutex_init(&mutex, NULL);
    atomic_fetch_add_explicit(&forks, 1, memory_order_relaxed);
    pyhvd_call_id_next_generation();
}

static void watch_forks(void) { pthread_atfork(NULL, NULL, begin_child); }

static entry *entry_at(uint32_t index) {
    if (index >= CHUNK * CHUNKS) return NULL;
    entry *chunk = atomic_load_explicit(&chunks[index / CHUNK], memory_order_acquire);
    return chunk ? chunk + index % CHUNK : NULL;
}

/* Under the mutex: return an unused entry, or NULL. */
static entry *find_unused(uint32_t *index) {
    entry *found;
    if (unused) {
        *index = unused - 1;
        found = entry_at(*index);
        unused = found->next;
        return found;
    }
    if (made == CHUNK * CHUNKS) return NULL;
    if (made % CHUNK == 0) {
        entry *chunk = calloc(CHUNK, sizeof *chunk);
        if (!chunk) return NULL;
        atomic_store_explicit(&chunks[made / CHUNK], chunk, memory_order_release);
    }
    *index = made++;
    found = entry_at(*index);
    atomic_store_explicit(&found->state, (uint64_t)1 << 32, memory_order_relaxed);
    return found;
}

pyhvd_call_id pyhvd_call_id_attach(const pyhvd_id_facts *facts) {
    uint32_t index;
    uint64_t state = 0;
    pthread_once(&watches_forks, watch_forks);
    pthread_mutex_lock(&mutex);
    entry *e = find_unused(&index);
    if (e) {
        e->forks = atomic_load_explicit(&forks, memory_order_relaxed);
        e->facts = *facts;
        /* Nobody knows this serial yet. The release is for the threads that will. */
        state = atomic_load_explicit(&e->state, memory_order_relaxed);
        atomic_store_explicit(&e->state, state, memory_order_release);
    }
    pthread_mutex_unlock(&mutex);
    return e ? (state & ~(uint64_t)0xffffffff) | index : 0;
}

void pyhvd_call_id_detach(pyhvd_call_id id) {
    entry *e = entry_at((uint32_t)id);
    atomic_fetch_add_explicit(&e->state, (uint64_t)1 << 32, memory_order_acq_rel);
}

int pyhvd_call_id_release(pyhvd_call_id id) {
    entry *e = entry_at((uint32_t)id);
    /* The acquire is for what the last users did with the call. */
    if ((uint32_t)atomic_load_explicit(&e->state, memory_order_acquire)) return 0;
    pthread_mutex_lock(&mutex);
    free(e->facts.tensors);
    e->facts = (pyhvd_id_facts){0};
    e->next = unused;
    unused = 1 + (uint32_t)id;
    pthread_mutex_unlock(&mutex);
    return 1;
}

void pyhvd_call_id_next_generation(void) {
    atomic_fetch_add_explicit(&generation, 1, memory_order_release);
}

static uint64_t read_generation(void) {
    return atomic_load_explicit(&generation, memory_order_acquire);
}

static void leave(entry *e) { atomic_fetch_sub_explicit(&e->state, 1, memory_order_release); }

/* Begin to use the entry of an id, until `leave`; return NULL if the id is stale. */
static entry *enter(pyhvd_call_id id) {
    entry *e = entry_at((uint32_t)id);
    if (!id || !e) return NULL;
    uint64_t state = atomic_load_explicit(&e->state, memory_order_relaxed);
    do {
        if (state >> 32 != id >> 32) return NULL;
    } while (!atomic_compare_exchange_weak_explicit(&e->state, &state, state + 1,
                                                    memory_order_acquire, memory_order_relaxed));
    if (e->forks == atomic_load_explicit(&forks, memory_order_relaxed)) return e;
    leave(e);
    return NULL;
}

/* ---- submission ---- */

static int is_in_arena(const pyhvd_id_facts *facts, const void *memory) {
    int64_t at = (int64_t)(intptr_t)memory;
    return facts->arena_from <= at && at < facts->arena_to;
}

/* Return whether a tensor and its result lie in the arena if the ranks have agreed on that; in place, only
 * then. */
static int suits(const pyhvd_id_facts *facts, const pyhvd_id_tensor *tensor, const void *source,
                 const void *target) {
    int held = tensor->may_be_held && is_in_arena(facts, source) && is_in_arena(facts, target);
    if (source == target) return held == (tensor->layout.in_arena != 0);
    return held || !tensor->layout.in_arena;
}

/* Put the call on hold; return whether it is in flight now. */
static int hold(const pyhvd_id_facts *facts, const void *const *sources, void *const *targets,
                pyhvd_ending ending) {
    pyhvd_fast_path *path = facts->path;
    pyhvd_call *call = facts->call;
    int held = 0;
    pthread_mutex_lock(&path->submissions.mutex);
    /* After its end a path looks for calls in flight under the mutex: it finds this one, or this
     * thread finds it closed. */
    if (pyhvd_call_finished(call, call->started) && !call->retired &&
        !atomic_load_explicit(&path->closed, memory_order_acquire)) {
        for (uint32_t k = 0; sources && k < call->slots.n; k++) {
            call->srcs[facts->tensors[k].index] = (int64_t)(intptr_t)sources[k];
            call->dsts[facts->tensors[k].index] = (int64_t)(intptr_t)targets[k];
        }
        call->ending = ending;
        held = pyhvd_fast_path_hold(path, call);
        if (!held) call->ending.done = NULL;
    }
    pthread_mutex_unlock(&path->submissions.mutex);
    return held;
}

static int has_messages(pyhvd_fast_path *path) {
    return atomic_load_explicit(&path->has_messages, memory_order_relaxed) != 0;
}

/* Take back a call that must go by message; return whether it is in flight nevertheless. */
static int withdraw(const pyhvd_id_facts *facts) {
    pthread_mutex_lock(&facts->path->submissions.mutex);
    int held = !pyhvd_fast_path_withdraw(facts->path, facts->call);
    pthread_mutex_unlock(&facts->path->submissions.mutex);
    return held;
}

/* Let another thread send the call. */
static void send_later(const pyhvd_id_facts *facts, int grouped) {
    pyhvd_fast_path *path = facts->path;
    if (!grouped) {
        pyhvd_fast_path_ring(path);
        return;
    }
    /* It gains little by waiting for other calls to share a batch with. */
    pyhvd_fast_path_flush(path, 0, pyhvd_now());
    pyhvd_ready_table_wake(&path->setup.table, path->setup.table.rank, 0);
}

static int submit_entered(const pyhvd_id_facts *facts, uint32_t n, const void *const *sources,
                          void *const *targets, pyhvd_ending ending, uint32_t flags) {
    int is_barrier = facts->tensors[0].layout.type < 0, grouped = facts->call->grouped;
    if (n != facts->call->slots.n || (!is_barrier && (!sources || !targets)))
        return PYHVD_CALL_INVALID;
    if (has_messages(facts->path)) return PYHVD_CALL_BY_PYTHON;
    for (uint32_t k = 0; !is_barrier && k < n; k++)
        if (!suits(facts, &facts->tensors[k], sources[k], targets[k])) return PYHVD_CALL_BY_PYTHON;
    if (!hold(facts, is_barrier ? NULL : sources, targets, ending)) return PYHVD_CALL_BY_PYTHON;
    /* Relaxed, as the mutex orders this look after the queue's store; see call_ids.h. */
    if (has_messages(facts->path) && !withdraw(facts)) return PYHVD_CALL_BY_PYTHON;
    if (!(flags & PYHVD_SUBMIT_WAITS)) send_later(facts, grouped);
    return PYHVD_CALL_SUBMITTED;
}

static int submit(pyhvd_call_id id, uint32_t n, const void *const *sources, void *const *targets,
                  pyhvd_done done, void *context, uint32_t flags) {
    if (!done || flags & ~(uint32_t)PYHVD_SUBMIT_WAITS) return PYHVD_CALL_INVALID;
    entry *e = enter(id);
    if (!e) return PYHVD_CALL_STALE;
    pyhvd_ending ending = {.done = done, .context = context};
    int status = submit_entered(&e->facts, n, sources, targets, ending, flags);
    leave(e);
    return status;
}

/* ---- waiting ---- */

/* Wait as Python's handles do: in slices, of which the second and later ones count as a long wait. */
static int wait_entered(pyhvd_fast_path *path, const pyhvd_call *call, int64_t ns) {
    pthread_mutex_lock(&path->submissions.mutex);
    uint64_t turn = call->started;
    pthread_mutex_unlock(&path->submissions.mutex);
    if (pyhvd_call_finished(call, turn)) return PYHVD_CALL_ENDED;
    int64_t began = pyhvd_now(), now = began, left = ns;
    int is_long = 0;
    while (left > 0) {
        int64_t slice = left < PYHVD_NAP ? left : PYHVD_NAP;
        int status = pyhvd_fast_path_wait(path, call, turn, now, slice);
        if (status == PYHVD_DONE) break;
        if (status == PYHVD_CLOSED) pyhvd_nap(CLOSED_NAP_NS);
        now = pyhvd_now();
        left = ns - (now - began);
        if (left > 0 && !is_long) pyhvd_fast_path_wait_longer(path, is_long = 1);
    }
    if (is_long) pyhvd_fast_path_wait_longer(path, -1);
    if (ns > 0) pyhvd_fast_path_waited(path, began);
    return pyhvd_call_finished(call, turn) ? PYHVD_CALL_ENDED : PYHVD_CALL_PENDING;
}

static int wait_for(pyhvd_call_id id, int64_t ns) {
    if (pyhvd_must_not_wait) return PYHVD_CALL_NOT_HERE;
    entry *e = enter(id);
    if (!e) return PYHVD_CALL_STALE;
    int status = wait_entered(e->facts.path, e->facts.call, ns);
    leave(e);
    return status;
}

static int describe(pyhvd_call_id id, uint32_t k, pyhvd_tensor_layout *layout) {
    entry *e = enter(id);
    if (!e) return PYHVD_CALL_STALE;
    int exists = k < e->facts.call->slots.n;
    if (exists) {
        size_t size = layout->struct_size, known = sizeof *layout;
        memcpy(layout, &e->facts.tensors[k].layout, size < known ? size : known);
        layout->struct_size = size;
    }
    leave(e);
    return exists ? 0 : PYHVD_CALL_INVALID;
}

const pyhvd_c_api pyhvd_c_functions = {
    .version = PYHVD_C_API_VERSION,
    .struct_size = sizeof(pyhvd_c_api),
    .generation = read_generation,
    .describe = describe,
    .submit = submit,
    .wait = wait_for,
};
