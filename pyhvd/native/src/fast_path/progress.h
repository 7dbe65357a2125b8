/* One rank's engine of the fast lane: from a submission to its completion without the GIL.
 *
 * A *unit* is what is submitted together: one cached tensor, or a grouped call. Submitting holds it back
 * (`held`), until somebody waits or the background thread finds that nothing more comes; then it is posted on
 * the board. What the board's log says is ready is carried out by whoever *drives* the engine: a thread that
 * waits for a unit, or the background thread. One thread drives at a time, with its rank's seat as the lock.
 *
 * Invariants. `mutex` guards `held`, `refused`, and each unit's `started` and `state`. The engine's own state
 * (pending, batch, course, counters of windows) belongs to the thread that drives. A unit is in flight while
 * started > finished; while it is, its records and slots are left alone by everybody but the engine.
 * `finished` is stored (release) after the results were written, and read (acquire) before they are used.
 * `progress` grows whenever somebody who waits without driving should look again.
 *
 * Where a window turns out to be aborted (`window.h`), the batch under way can never be carried out to its end, and what stands
 * behind it in the log is not carried out either. Whoever drives then notes the set in `aborted`, shuts the lane, so that
 * those who wait wait for the background thread only, and calls that thread, which fails all that is in flight.
 *
 * A unit whose slots the board no longer lends as it knew them is *refused*, and Python *takes* it over to
 * submit it by message; one whose posts were recalled is taken over when the answer to it arrives. From then
 * on Python alone ends it.
 */
#ifndef PYHVD_DRIVER_H
#define PYHVD_DRIVER_H

#include <pthread.h>

#include "fast_path/ready_table.h"
#include "common/prefetch.h"
#include "common/sampler.h"
#include "common/counters.h"

enum { PYHVD_IDLE, PYHVD_HELD, PYHVD_POSTED, PYHVD_REFUSED, PYHVD_TAKEN };

enum { PYHVD_UNKNOWN, PYHVD_ALIKE, PYHVD_UNLIKE };

/* Why the background thread is wanted in Python. */
enum { PYHVD_CALL_WORK = 1, PYHVD_CALL_LIST = 2, PYHVD_CALL_REFUSED = 4, PYHVD_CALL_DONE = 8, PYHVD_CALL_ABORTED = 16 };

/* How a drive ended. */
enum { PYHVD_DONE = 1, PYHVD_IDLING = 2, PYHVD_AT_LIST = 3, PYHVD_LATE = 4, PYHVD_CLOSED = 5 };

typedef struct {
    _Atomic uint64_t finished;
    uint64_t started;
    _Atomic uint32_t left;   /* tensors of this turn that have not ended */
    _Atomic uint64_t notify; /* the last turn at whose end the background thread is to be called; never goes back */
    int state;
    uint32_t set;
    int grouped;
    pyhvd_posting post;   /* its slots, one for each tensor; what follows is in their order */
    int64_t *srcs, *dsts; /* addresses of this turn; of a single tensor in `own` */
    int64_t own[2];
    int64_t *starts; /* of a grouped call: n + 1 prefix sums of the element counts */
    int alike;       /* whether its tensors ride together: PYHVD_ALIKE, PYHVD_UNLIKE; the driver's */
    int64_t posted; /* when (ns); written before the post, read behind the log's entry */
    void *owner;
} pyhvd_unit;

/* What a slot of a process set means on this rank. */
typedef struct {
    pyhvd_unit *unit;
    uint32_t at; /* which of the unit's tensors it is */
    int64_t count;
    double prescale, postscale;
    int dtype, op;
    int direct; /* whether every rank's array lies in its arena, as long as this is what the slot means */
    uint32_t sample, seen; /* how often it came in which of the sampler's samples; the driver's */
} pyhvd_record;

typedef struct {
    pyhvd_window *window; /* NULL: no such set here */
    pyhvd_record *records;
} pyhvd_lane_set;

typedef struct {
    pyhvd_board board;
    pyhvd_trace *trace; /* where units and batches are recorded; NULL: nowhere */
    size_t threshold; /* changed by who has entered; so are the windows' chunks */
    int groups_alone;
    int64_t cycle; /* ns; the background thread's */
    pyhvd_sampler *sampler; /* NULL: nothing is measured */
    pthread_mutex_t mutex;
    pyhvd_unit **held, **refused;
    uint32_t capacity, refusals;
    _Atomic uint32_t holding; /* units in `held` */
    _Atomic uint32_t holds;   /* units that were ever held */
    pyhvd_lane_set sets[PYHVD_BOARD_SETS];
    /* the driver's */
    uint32_t set, pendings, at, members, by;
    uint64_t place; /* of the entry that is being carried out, in the log */
    int64_t ready, begun;
    uint32_t *pending, *batch;
    pyhvd_unit *whole; /* the grouped call that is the batch, or NULL: `srcs` and so on have been put together for it */
    int64_t *srcs, *dsts, *starts;
    pyhvd_job job;
    pyhvd_course course;
    int running, patience;
    int64_t parted;
    int64_t began; /* when (ns) the batch was ready, or 0: it is not timed */
    /* the background thread's */
    uint64_t told; /* the list at which the log stands, if the thread knows of it */
    uint32_t known, quiet, idle; /* `holds` at the last look; looks without anything to post, or any submission */
    int alone;                   /* whether nobody waited for the last submissions */
    int64_t looked;              /* when everything submitted had been posted (ns) */
    int short_turns;
    _Atomic uint32_t left_over; /* whether the last driver left something that is in no log any more */
    _Atomic uint32_t watching, progress, waiters, closed;
    _Atomic uint32_t aborted; /* 1 + the set whose window was found to be aborted, or 0; stored before the call */
    pyhvd_tally tally;
} pyhvd_lane;

/* Memory for one rank's engine; 0 if there is none. `board` must be attached already. */
int pyhvd_lane_init(pyhvd_lane *lane);
void pyhvd_lane_free(pyhvd_lane *lane);

/* Let a set's records be used, or forget them; nothing of it may be in flight. */
int pyhvd_lane_open(pyhvd_lane *lane, uint32_t set, pyhvd_window *window);
void pyhvd_lane_close_set(pyhvd_lane *lane, uint32_t set);

/* Under the mutex: hold a unit back; 0 if there is no memory. Its records are complete. */
int pyhvd_lane_hold(pyhvd_lane *lane, pyhvd_unit *unit);

/* Call the background thread if it sleeps, so that what is held is posted in time. */
void pyhvd_lane_ring(pyhvd_lane *lane);

/* Post all that is held; `now` is the time (ns). With `whole` also wait for other threads that are just doing so, and for
 * the board; without, 0 if the board's lock is not to be had just now, and the caller tries again soon. */
int pyhvd_lane_flush(pyhvd_lane *lane, int whole, int64_t now);

/* Under the mutex: take a unit out of the engine's hands; returns the state that it was in. */
int pyhvd_lane_take(pyhvd_lane *lane, pyhvd_unit *unit);

/* Under the mutex: undo `hold`, unless the unit has been posted meanwhile; 1 if it is no longer in flight. */
int pyhvd_lane_withdraw(pyhvd_lane *lane, pyhvd_unit *unit);

/* One tensor of a taken unit has ended. */
void pyhvd_lane_settle(pyhvd_lane *lane, pyhvd_unit *unit);

/* Post what is held, and wait until `unit` has finished its turn, driving the engine if nobody else does: PYHVD_DONE, PYHVD_LATE
 * `ns` after `now`, or PYHVD_CLOSED. */
int pyhvd_lane_wait(pyhvd_lane *lane, pyhvd_unit *unit, uint64_t turn, int64_t now, int64_t ns);

/* The background thread's sleep: posts what is held, drives where nobody waits; returns its calls, or 0 when
 * `ns` (negative: no end) have passed. */
uint32_t pyhvd_lane_doze(pyhvd_lane *lane, int64_t ns);

/* Put response list `number` into the log, where it concerns these ranks; 0 if that cannot be done just now. */
int pyhvd_lane_announce(pyhvd_lane *lane, uint64_t number, const pyhvd_ranks *audience);

/* Drive as far as the log goes; 1 if it has come to response list `number`, and the caller then drives until
 * it calls `leave`. */
int pyhvd_lane_enter(pyhvd_lane *lane, uint64_t number);
void pyhvd_lane_leave(pyhvd_lane *lane);

/* Let nobody wait any longer, on this rank. */
void pyhvd_lane_shut(pyhvd_lane *lane);

/* After `shut`: wait until nobody drives any more, and let nobody drive again. */
void pyhvd_lane_seize(pyhvd_lane *lane);

/* Whether a batch is being carried out. From any thread, for a look only: `running` is the driver's. */
static inline int pyhvd_lane_is_running(pyhvd_lane *lane) { return __atomic_load_n(&lane->running, __ATOMIC_RELAXED); }

/* 1 + the set whose window the engine has found aborted, or 0. From any thread. */
static inline uint32_t pyhvd_lane_aborted(pyhvd_lane *lane) {
    return atomic_load_explicit(&lane->aborted, memory_order_acquire);
}

static inline int pyhvd_unit_finished(const pyhvd_unit *unit, uint64_t turn) {
    return atomic_load_explicit(&unit->finished, memory_order_acquire) >= turn;
}

/* A caller has waited for a unit since `began` (ns). */
static inline void pyhvd_lane_waited(pyhvd_lane *lane, int64_t began) {
    if (pyhvd_is_timed(&lane->tally)) pyhvd_observe_shared(&lane->tally.waits, (uint64_t)(pyhvd_now() - began));
}

/* Call the background thread when the unit ends, if it has not ended yet. The turn is named: whoever has ended the one
 * before may still be about to look here, and is not to take this for his own. */
static inline int pyhvd_unit_notify(pyhvd_unit *unit, uint64_t turn) {
    uint64_t last = atomic_load_explicit(&unit->notify, memory_order_relaxed);
    while (last < turn && !atomic_compare_exchange_weak_explicit(&unit->notify, &last, turn, memory_order_relaxed,
                                                                 memory_order_relaxed)) {
    }
    atomic_thread_fence(memory_order_seq_cst);
    return pyhvd_unit_finished(unit, turn);
}

#endif
