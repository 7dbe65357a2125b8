/* The fast path of one rank: from a submission to its completion without the GIL.
 *
 * A *call* is one submission: one cached tensor, or a grouped call. Its way:
 *
 *   1. `hold` puts the call on hold, so that several calls can travel together.
 *   2. `flush` marks the held calls ready in the ready table. A waiting thread flushes at once; the
 *      background thread flushes when no more calls arrive, or when the cycle time is over.
 *   3. When all ranks have marked a slot ready, the ready log gets an entry.
 *   4. The holder of the progress lock carries out the log's entries in order, and ends their
 *      calls.
 *
 * Any thread that waits for a call tries to take the progress lock and, with it, makes progress for
 * the whole rank, as in MPI's progress engine. If no thread waits, the background thread does so.
 *
 * States of a call. `started` and `finished` count its turns (submissions); a call is in flight
 * while they differ.
 *
 *   from     event                                     to       thread       lock
 *   -------  ----------------------------------------  -------  -----------  ---------------
 *   IDLE     hold: started + 1                         HELD     submitter    mutex
 *   HELD     withdraw: finished = started              IDLE     submitter    mutex
 *   HELD     flush, all its slots are delegated        MARKED   any          mutex and table
 *   HELD     flush, a slot is not delegated            REFUSED  any          mutex and table
 *   MARKED   its batch is carried out: finished + 1    IDLE     any          progress lock
 *   MARKED   its marks were recalled                   REFUSED  background   mutex
 *   HELD     take: Python will end the call            TAKEN    background   mutex
 *   MARKED   take, after its slots were recalled       TAKEN    background   mutex
 *   REFUSED  take                                      TAKEN    background   mutex
 *   TAKEN    settle, once per tensor: finished + 1     IDLE     background   none
 *
 * Marks are recalled with several hosts, and in turn slots (agreement/ready_table.h).
 *
 * The field `state` is not written at the end of a turn: a call with finished == started is idle,
 * whatever it says.
 *
 * Invariants
 *   1. Each part of pyhvd_fast_path has one owner, named at its struct. Fields outside those parts
 *      are atomic.
 *   2. The mutex also guards `started` and `state` of every call.
 *   3. While a call is in flight, only the fast path changes its addresses, its slots and their
 *      cached tensors.
 *   4. `finished` is stored with release after the results were written, and loaded with acquire
 *      before they are read.
 *   5. `wakeups` changes whenever threads that wait without the progress lock must look again.
 *   6. Nothing of Python runs under the mutex.
 *   7. After a window was aborted (window.h), its batch never ends and later entries are not
 *      carried out. The lock's holder then stores the set in `aborted`, closes the path, and wakes
 *      the background thread, which fails all calls in flight.
 */
#ifndef PYHVD_PROGRESS_H
#define PYHVD_PROGRESS_H

#include "common/counters.h"
#include "common/prefetch.h"
#include "common/sampler.h"
#include "agreement/ready_table.h"

#include <pthread.h>

enum { PYHVD_IDLE, PYHVD_HELD, PYHVD_MARKED, PYHVD_REFUSED, PYHVD_TAKEN };

/* Whether all tensors of a grouped call fit into one batch; computed when first needed. */
enum { PYHVD_UNKNOWN, PYHVD_ALIKE, PYHVD_UNLIKE };

/* Why a function that makes progress returned. */
enum {
    PYHVD_DONE = 1,    /* the awaited call has ended */
    PYHVD_IDLING = 2,  /* the log has no further entry */
    PYHVD_AT_LIST = 3, /* a response list is next: only the background thread may pass it */
    PYHVD_LATE = 4,    /* the time is over */
    PYHVD_CLOSED = 5,  /* the path is closed */
};

/* The function that learns of the end of a turn which C code has submitted (call_ids.h), else NULL.
 * Written by the submitter before the turn begins; `error` by the thread that ends a taken call. */
typedef struct {
    void (*done)(void *context, const char *error);
    void *context;
    const char *error; /* NULL: none */
} pyhvd_ending;

typedef struct pyhvd_call pyhvd_call;
struct pyhvd_call {
    _Atomic uint64_t finished;
    uint64_t started;
    _Atomic uint32_t unfinished; /* tensors of this turn that have not ended */
    /* wake the background thread when this turn ends; never decreases */
    _Atomic uint64_t notify_turn;
    pyhvd_ending ending;
    int state;
    uint32_t set;
    int grouped;
    /* one slot per tensor, ascending; the arrays below are in this order */
    pyhvd_slot_list slots;
    int64_t *srcs, *dsts;        /* addresses of this turn */
    int64_t single_addresses[2]; /* where `srcs` and `dsts` of a single tensor point to */
    /* grouped call: n + 1 prefix sums of the element counts; else NULL */
    int64_t *starts;
    /* of a grouped call in a turn slot, which stands for all of its arrays: how many they are; else 0.
     * `srcs`, `dsts` and `starts` are about the arrays, which one batch reduces alone. */
    uint32_t arrays;
    int alike;         /* PYHVD_UNKNOWN and so on; the progress lock holder's */
    int64_t marked_ns; /* stored before the marks, read after the log's entry */
    /* of a call without a name: its place in the order of the set's calls, and what it is, from 1 on;
     * else 0. For the trace. */
    uint64_t number;
    uint32_t signature;
    void *owner; /* the Python object */
    int retired; /* under the mutex: it is submitted no more */
    pyhvd_call *next_refused;
};

/* The tensor that a slot of a process set stands for, on this rank. `call` is NULL after the call is
 * gone. It is used under the submissions' mutex, or by who holds the progress lock and has a log
 * entry with the slot: such a call is in flight. A turn slot's entry is written again, under the mutex,
 * with each call that the slot is used for, before the call is held: then none is in flight there. */
typedef struct {
    pyhvd_call *call;
    uint32_t index; /* of the tensor in the call */
    int64_t count;
    double prescale, postscale;
    int dtype, op;
    int direct; /* whether every rank's array and its result lie in its arena */
    int verb;   /* a code of negotiation.messages.RequestType */
    /* Not both; without them it is an allreduce, or a barrier, which has no elements. */
    const pyhvd_local_move *move; /* for a verb that reduces nothing ... */
    const pyhvd_move *moves;      /* ... and, over several hosts, how its bytes get there */
    size_t move_count;
    const pyhvd_portions *portions; /* of a reducescatter */
    /* how often the tensor came in this sample; the progress lock holder's */
    uint32_t sample, times;
} pyhvd_cached_tensor;

typedef struct {
    pyhvd_window *window; /* NULL: the path does not serve this set */
    pyhvd_cached_tensor *tensors;
} pyhvd_path_set;

/* Owner: none. Read-only once the path is in use; `sets` changes while the caller has entered. */
typedef struct {
    pyhvd_ready_table table;
    pyhvd_trace *trace;     /* NULL: nothing is recorded */
    pyhvd_sampler *sampler; /* NULL: nothing is measured */
    /* whether a grouped call's tensors share a batch only with each other */
    int groups_alone;
    pyhvd_path_set sets[PYHVD_MAX_SETS];
} pyhvd_path_setup;

/* Owner: the holder of `mutex`. */
typedef struct {
    pthread_mutex_t mutex;
    pyhvd_call **held;
    uint32_t capacity;           /* of `held` */
    pyhvd_call *refused;         /* the first refused call */
    pyhvd_call **refused_end;    /* the null pointer at the end of the refused calls */
    _Atomic uint32_t held_count; /* written under the mutex, read by any thread */
    _Atomic uint32_t hold_count; /* calls that were ever held; likewise */
} pyhvd_submissions;

/* Owner: the holder of the progress lock. */
typedef struct {
    size_t threshold; /* bytes of a batch, at most */
    /* The log entry that is being carried out. */
    uint32_t set, last_rank;
    uint64_t log_position;
    uint32_t *pending;            /* its slots */
    uint32_t pending_count, next; /* slots before `next` are done */
    int has_results;              /* whether its results are in the arrays already */
    /* The batch: slots pending[next] to pending[next + batch_count - 1]. */
    uint32_t batch_count;
    uint32_t *left_behind;         /* scratch memory of the batch's choice */
    int64_t *srcs, *dsts, *starts; /* its addresses and prefix sums ... */
    /* ... unless the batch is this call, whose own arrays are used; else NULL */
    pyhvd_call *whole_call;
    pyhvd_job job;
    pyhvd_job_cursor cursor;
    int running;                      /* whether the batch has begun; other threads look at it */
    int alone;                        /* whether the holder is the background thread */
    int64_t ready_ns;                 /* when the batch was ready; 0: it is not timed */
    int64_t trace_ready, trace_begin; /* for the trace; 0: not recorded */
    int spin_budget;                  /* yields before the holder falls asleep */
    int64_t left_core_ns;             /* see pyhvd_leave_shared_core */
} pyhvd_progress;

/* Owner: the background thread. */
typedef struct {
    int64_t cycle_ns; /* for how long calls are held at most while no thread waits */
    /* the response list that is next in the log, if the thread knows of it; else 0 */
    uint64_t known_list;
    uint32_t seen_holds;  /* `hold_count` at the last look */
    uint32_t quiet_looks; /* looks since the last flush */
    uint32_t idle_looks;  /* looks since the last call was held */
    int unattended;       /* whether no thread waited for the last calls */
    int64_t settled_ns;   /* when no call was held any more */
    int found_held;       /* whether the last look found held calls */
    int short_turns;
} pyhvd_background;

typedef struct {
    pyhvd_path_setup setup;
    pyhvd_submissions submissions;
    pyhvd_progress progress;
    pyhvd_background background;
    _Atomic uint32_t left_over;          /* whether the last holder left a log entry unfinished */
    _Atomic uint32_t background_watches; /* whether the background thread soon looks by itself */
    /* futex word of threads without the progress lock; how many sleep on it */
    _Atomic uint32_t wakeups, waiters;
    _Atomic uint32_t long_waits;     /* threads that have waited for PYHVD_NAP and still do */
    _Atomic int64_t offers_again_ns; /* when a thread that polls offers its core again */
    _Atomic uint32_t closed;
    /* 1 + the set whose window was aborted, 1 + PYHVD_MAX_SETS if another host is lost, or 0; stored
     * before the wake-up */
    _Atomic uint32_t aborted;
    /* whether the queue has entries or refusals, of any names; see call_ids.h */
    _Atomic uint32_t has_messages;
    pyhvd_counters counters;
} pyhvd_fast_path;

/* ---- set-up ---- */

/* Allocate the path's memory; return 0 if there is none. `setup.table` must be attached already. */
int pyhvd_fast_path_init(pyhvd_fast_path *path);
void pyhvd_fast_path_free(pyhvd_fast_path *path);

/* Serve a set through a window; none of its calls may be in flight. */
int pyhvd_fast_path_open(pyhvd_fast_path *path, uint32_t set, pyhvd_window *window);

/* ---- submission ---- */

/* Under the mutex: make room for more calls in `held`; return 0 without memory. */
int pyhvd_fast_path_grow(pyhvd_fast_path *path);

/* Under the mutex: put a call on hold; return 0 without memory. Its addresses and cached tensors
 * are complete. */
static inline int pyhvd_fast_path_hold(pyhvd_fast_path *path, pyhvd_call *call) {
    pyhvd_submissions *s = &path->submissions;
    pyhvd_trace *trace = path->setup.trace;
    uint32_t n = atomic_load_explicit(&s->held_count, memory_order_relaxed);
    if (n == s->capacity && !pyhvd_fast_path_grow(path)) return 0;
    call->started++;
    call->state = PYHVD_HELD;
    atomic_store_explicit(&call->unfinished, call->arrays ? call->arrays : call->slots.n,
                          memory_order_relaxed);
    s->held[n] = call;
    atomic_fetch_add_explicit(&s->hold_count, 1, memory_order_relaxed);
    atomic_store_explicit(&s->held_count, n + 1, memory_order_release);
    pyhvd_trace_add(trace, PYHVD_SUBMITTED, pyhvd_trace_now(trace), call->set, call->slots.ids[0],
                    call->number, call->signature);
    return 1;
}

/* Set or read a word of the path that other threads look at. */
static inline void pyhvd_set_word(_Atomic uint32_t *word, int value) {
    atomic_store_explicit(word, value != 0, memory_order_release);
}

static inline uint32_t pyhvd_read_word(_Atomic uint32_t *word) {
    return atomic_load_explicit(word, memory_order_acquire);
}

/* Under the mutex: undo `hold`, unless the call was marked meanwhile; return 1 if it is no longer
 * in flight. */
int pyhvd_fast_path_withdraw(pyhvd_fast_path *path, pyhvd_call *call);

/* Under the mutex: let Python end the call; return the state that it was in. */
int pyhvd_fast_path_take(pyhvd_fast_path *path, pyhvd_call *call);

/* End one tensor of a taken call. */
void pyhvd_fast_path_settle(pyhvd_fast_path *path, pyhvd_call *call);

static inline pyhvd_rank_state *rank_state_of(pyhvd_fast_path *path) {
    return &path->setup.table.shared->rank_states[path->setup.table.rank];
}

/* Wake the background thread if it sleeps and does not watch, so that it flushes in time. */
static inline void pyhvd_fast_path_ring(pyhvd_fast_path *path) {
    pyhvd_rank_state *mine = rank_state_of(path);
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&mine->background_asleep, memory_order_relaxed) &&
        !atomic_load_explicit(&path->background_watches, memory_order_relaxed))
        pyhvd_ready_table_wake_background(&path->setup.table, path->setup.table.rank);
}

/* Mark all held calls ready, at the time `now` (ns). With `all`, wait for other threads that flush,
 * and for the table's lock. Otherwise return 0 if the table's lock cannot be taken soon; the caller
 * tries again. */
int pyhvd_fast_path_flush(pyhvd_fast_path *path, int all, int64_t now);

/* ---- waiting ---- */

/* Whether this thread ends calls, and so must not wait for one: a background thread, or a thread
 * inside the `done` function of an ending. */
extern _Thread_local int pyhvd_must_not_wait;

/* Flush, and wait until the call has finished a turn, with the progress lock if it is free. Return
 * PYHVD_DONE, PYHVD_LATE at `now` + `ns`, or PYHVD_CLOSED. */
int pyhvd_fast_path_wait(pyhvd_fast_path *path, const pyhvd_call *call, uint64_t turn, int64_t now,
                         int64_t ns);

/* Count the time that a caller has waited since `began` (ns). */
static inline void pyhvd_fast_path_waited(pyhvd_fast_path *path, int64_t began) {
    if (pyhvd_is_timed(&path->counters))
        pyhvd_observe_shared(&path->counters.waits, (uint64_t)(pyhvd_now() - began));
}

/* Count a thread that has waited for PYHVD_NAP: 1 when it goes on, -1 when it ends. */
static inline void pyhvd_fast_path_wait_longer(pyhvd_fast_path *path, int change) {
    atomic_fetch_add_explicit(&path->long_waits, (uint32_t)change, memory_order_relaxed);
}

/* Return how many threads have waited for long. */
static inline uint32_t pyhvd_fast_path_long_waits(pyhvd_fast_path *path) {
    return atomic_load_explicit(&path->long_waits, memory_order_relaxed);
}

/* Offer the core to other threads, which may be ranks that have yet to submit: a thread has polled a
 * call in vain. It then keeps the core for as long as others had it. So a thread that polls and
 * computes in turn gives away half of its time at most. */
static inline void pyhvd_fast_path_offer_core(pyhvd_fast_path *path) {
    int64_t before = pyhvd_now();
    if (before < atomic_load_explicit(&path->offers_again_ns, memory_order_relaxed)) return;
    sched_yield();
    int64_t now = pyhvd_now();
    atomic_store_explicit(&path->offers_again_ns, now + (now - before), memory_order_relaxed);
}

static inline int pyhvd_call_finished(const pyhvd_call *call, uint64_t turn) {
    return atomic_load_explicit(&call->finished, memory_order_acquire) >= turn;
}

/* Wake the background thread at the end of this turn; return whether the turn has ended already.
 * The turn is named because the thread that ended the turn before may still be about to read
 * `notify_turn`. */
static inline int pyhvd_call_notify(pyhvd_call *call, uint64_t turn) {
    uint64_t last = atomic_load_explicit(&call->notify_turn, memory_order_relaxed);
    while (last < turn &&
           !atomic_compare_exchange_weak_explicit(&call->notify_turn, &last, turn,
                                                  memory_order_relaxed, memory_order_relaxed)) {
    }
    atomic_thread_fence(memory_order_seq_cst);
    return pyhvd_call_finished(call, turn);
}

/* ---- the background thread ---- */

/* Sleep; meanwhile flush, and make progress while no thread waits. Return the reasons of a wake-up,
 * or 0 when `ns` (negative: no limit) have passed. */
uint32_t pyhvd_fast_path_sleep(pyhvd_fast_path *path, int64_t ns);

/* Append response list `number` to the log for these ranks; return 0 if that is not possible
 * now. */
int pyhvd_fast_path_announce(pyhvd_fast_path *path, uint64_t number, const pyhvd_ranks *audience);

/* Make progress to the end of the log. Return 1 if response list `number` is next: the caller then
 * holds the progress lock until it calls `leave`, which steps past the list. */
int pyhvd_fast_path_enter(pyhvd_fast_path *path, uint64_t number);
void pyhvd_fast_path_leave(pyhvd_fast_path *path);

/* Let no thread of this rank wait or make progress any longer. */
void pyhvd_fast_path_end(pyhvd_fast_path *path);

/* After its end: take the progress lock for ever. */
void pyhvd_fast_path_keep_lock(pyhvd_fast_path *path);

/* Whether a batch is being carried out. From any thread; only a hint. */
static inline int pyhvd_fast_path_is_running(pyhvd_fast_path *path) {
    return __atomic_load_n(&path->progress.running, __ATOMIC_RELAXED);
}

/* 1 + the set whose window was found aborted, or 0. From any thread. */
static inline uint32_t pyhvd_fast_path_aborted(pyhvd_fast_path *path) {
    return atomic_load_explicit(&path->aborted, memory_order_acquire);
}

#endif
