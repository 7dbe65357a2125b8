#include "fast_path/internal.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/kernels.h"

#define GATHER 50000 /* ns between two looks whether submissions still come in */
#define WATCH 100000 /* ns between two looks after submissions for which nobody waited */
#define WATCHED 3    /* such looks */
#define LAZY 20      /* looks, a cycle time apart, after the last submission; then the next one has to ring */

/* ---- memory ---- */

int pyhvd_lane_init(pyhvd_lane *lane) {
    size_t slots = lane->board.slots;
    pthread_mutex_init(&lane->mutex, NULL);
    lane->board.over = &lane->closed;
    lane->patience = PYHVD_YIELDS;
    lane->parted = pyhvd_may_part(lane->board.size);
    lane->pending = calloc(slots, sizeof *lane->pending);
    lane->batch = calloc(slots, sizeof *lane->batch);
    lane->srcs = calloc(slots, sizeof *lane->srcs);
    lane->dsts = calloc(slots, sizeof *lane->dsts);
    lane->starts = calloc(slots + 1, sizeof *lane->starts);
    return lane->pending && lane->batch && lane->srcs && lane->dsts && lane->starts;
}

void pyhvd_lane_free(pyhvd_lane *lane) {
    for (uint32_t set = 0; set < PYHVD_BOARD_SETS; set++) pyhvd_lane_close_set(lane, set);
    free(lane->pending);
    free(lane->batch);
    free(lane->srcs);
    free(lane->dsts);
    free(lane->starts);
    free(lane->held);
    free(lane->refused);
    pthread_mutex_destroy(&lane->mutex);
}

int pyhvd_lane_open(pyhvd_lane *lane, uint32_t set, pyhvd_window *window) {
    free(lane->sets[set].records); /* of another set of this number, before */
    lane->sets[set].records = calloc(lane->board.slots, sizeof(pyhvd_record));
    lane->sets[set].window = window;
    return lane->sets[set].records != NULL;
}

void pyhvd_lane_close_set(pyhvd_lane *lane, uint32_t set) {
    free(lane->sets[set].records);
    lane->sets[set].records = NULL;
    lane->sets[set].window = NULL;
}

/* ---- carrying out ---- */

static int rides_with(const pyhvd_lane *lane, const pyhvd_record *a, const pyhvd_record *b) {
    return a->dtype == b->dtype && a->op == b->op && a->prescale == b->prescale &&
           a->postscale == b->postscale && a->direct == b->direct &&
           (!lane->groups_alone || a->unit == b->unit || !(a->unit->grouped || b->unit->grouped));
}

/* Remember which slots an entry makes ready. */
static void unfold(pyhvd_lane *lane, const pyhvd_entry *entry) {
    lane->set = entry->set;
    lane->by = entry->by;
    lane->place = atomic_load_explicit(&seat_of(lane)->cursor, memory_order_relaxed);
    lane->ready = pyhvd_trace_now(lane->trace);
    lane->pendings = lane->at = 0;
    for (uint32_t w = entry->first; w < entry->last; w++)
        for (uint64_t bits = entry->words[w]; bits; bits &= bits - 1)
            lane->pending[lane->pendings++] = w * 64 + (uint32_t)__builtin_ctzll(bits);
}

/* Whether a unit's tensors all ride together. They do for as long as its slots mean what they mean. */
static int is_alike(const pyhvd_lane *lane, pyhvd_unit *unit) {
    const pyhvd_record *records = lane->sets[unit->set].records;
    if (unit->alike == PYHVD_UNKNOWN) {
        uint32_t k = 1;
        while (k < unit->post.n && rides_with(lane, &records[unit->post.slots[0]], &records[unit->post.slots[k]])) k++;
        unit->alike = k == unit->post.n ? PYHVD_ALIKE : PYHVD_UNLIKE;
    }
    return unit->alike == PYHVD_ALIKE;
}

/* The grouped call that is all that is pending, and may ride as it is; or NULL. */
static pyhvd_unit *whole_unit(const pyhvd_lane *lane, const pyhvd_record *first) {
    pyhvd_unit *unit = first->unit;
    if (!unit->grouped || lane->at || unit->post.n != lane->pendings) return NULL;
    if (memcmp(lane->pending, unit->post.slots, unit->post.n * sizeof *unit->post.slots)) return NULL;
    if ((size_t)unit->starts[unit->post.n] * pyhvd_itemsize(first->dtype) > lane->threshold) return NULL;
    return is_alike(lane, unit) ? unit : NULL;
}

/* Let the first pending tensor ride with those of its kind that fit, in slot order: the same on every rank.
 * What is left stays behind, in order. Returns how many ride. */
static uint32_t gather_batch(pyhvd_lane *lane) {
    const pyhvd_record *records = lane->sets[lane->set].records;
    const pyhvd_record *first = &records[lane->pending[lane->at]];
    size_t item = pyhvd_itemsize(first->dtype), bytes = 0;
    uint32_t n = 0, kept = lane->pendings;
    lane->starts[0] = 0;
    /* From the back, so that what stays behind can be moved up in place. */
    for (uint32_t k = lane->at; k < lane->pendings; k++) {
        const pyhvd_record *r = &records[lane->pending[k]];
        size_t more = (size_t)r->count * item;
        if (n && (!rides_with(lane, first, r) || bytes + more > lane->threshold)) {
            lane->batch[--kept] = lane->pending[k];
            continue;
        }
        lane->srcs[n] = r->unit->srcs[r->at];
        lane->dsts[n] = r->unit->dsts[r->at];
        lane->starts[n + 1] = lane->starts[n] + r->count;
        lane->pending[lane->at + n++] = lane->pending[k];
        bytes += more;
    }
    for (uint32_t k = lane->at + n, from = lane->pendings; k < lane->pendings; k++)
        lane->pending[k] = lane->batch[--from];
    return n;
}

/* Choose what is carried out next. */
static void load_batch(pyhvd_lane *lane) {
    const pyhvd_record *first = &lane->sets[lane->set].records[lane->pending[lane->at]];
    pyhvd_unit *whole = lane->whole = whole_unit(lane, first);
    uint32_t n = lane->members = whole ? whole->post.n : gather_batch(lane);
    lane->job = (pyhvd_job){whole ? whole->srcs : lane->srcs, whole ? whole->dsts : lane->dsts,
                            whole ? whole->starts : lane->starts, n, first->dtype, first->op,
                            first->prescale, first->postscale, first->direct};
    pyhvd_window_begin(&lane->course, &lane->job);
    lane->began = pyhvd_is_timed(&lane->tally) ? pyhvd_now() : 0;
    lane->begun = pyhvd_trace_now(lane->trace);
    for (uint32_t k = 0; lane->begun && k < n; k++)
        pyhvd_trace_add(lane->trace, PYHVD_READY, lane->ready, lane->set, lane->pending[lane->at + k], lane->place, lane->by);
    __atomic_store_n(&lane->running, 1, __ATOMIC_RELAXED); /* others look at it */
}

/* Tell the sampler of the batch that has just been carried out. */
static void measure(pyhvd_lane *lane) {
    pyhvd_sampler *sampler = lane->sampler;
    uint32_t most = 0;
    if (!sampler || !pyhvd_sampler_counts(sampler)) return;
    for (uint32_t k = 0; k < lane->members; k++) {
        pyhvd_record *record = &lane->sets[lane->set].records[lane->pending[lane->at + k]];
        if (record->sample != sampler->sample) record->seen = 0;
        record->sample = sampler->sample;
        if (++record->seen > most) most = record->seen;
    }
    uint64_t bytes = (uint64_t)lane->job.starts[lane->members] * pyhvd_itemsize(lane->job.dtype);
    if (pyhvd_sampler_count(sampler, bytes, most)) pyhvd_board_call(&lane->board, lane->board.rank, PYHVD_CALL_WORK);
}

/* The batch has been carried out. */
static void count_batch(pyhvd_lane *lane) {
    pyhvd_tally *tally = &lane->tally;
    int64_t count = lane->job.starts[lane->members];
    pyhvd_observe(&tally->tensors, lane->members, 1);
    pyhvd_observe(&tally->bytes, (uint64_t)count * pyhvd_itemsize(lane->job.dtype), 1);
    if (lane->began) pyhvd_observe(&tally->execution, (uint64_t)(pyhvd_now() - lane->began), 1);
}

/* Let the units of the batch know. Their arrays may be someone else's as soon as they do. */
static void end_members(pyhvd_lane *lane) {
    const pyhvd_record *records = lane->sets[lane->set].records;
    for (uint32_t k = 0, n; k < lane->members; k += n) {
        pyhvd_unit *unit = records[lane->pending[lane->at + k]].unit;
        n = lane->whole ? lane->members : 1;
        while (k + n < lane->members && records[lane->pending[lane->at + k + n]].unit == unit) n++;
        int64_t agreed = lane->began - unit->posted;
        if (lane->began) pyhvd_observe(&lane->tally.negotiation, agreed > 0 ? (uint64_t)agreed : 0, n);
        pyhvd_end_parts(lane, unit, n);
    }
}

/* Another rank has aborted a set's window: nobody on this rank goes on. */
static void give_up(pyhvd_lane *lane) {
    atomic_store_explicit(&lane->aborted, lane->set + 1, memory_order_release);
    pyhvd_lane_shut(lane);
    pyhvd_board_call(&lane->board, lane->board.rank, PYHVD_CALL_ABORTED);
}

static int run_batch(pyhvd_lane *lane) {
    pyhvd_window *window = lane->sets[lane->set].window;
    window->brief = 1;
    int status = pyhvd_window_proceed(window, &lane->course);
    window->brief = 0;
    if (status == PYHVD_LATER) return PYHVD_LATE;
    if (status) {
        give_up(lane);
        return PYHVD_CLOSED;
    }
    pyhvd_trace_add(lane->trace, PYHVD_CARRIED, lane->begun, lane->set, lane->members, lane->place, lane->by);
    measure(lane);
    count_batch(lane);
    end_members(lane);
    lane->at += lane->members;
    __atomic_store_n(&lane->running, 0, __ATOMIC_RELAXED);
    pyhvd_tell_waiters(lane);
    return PYHVD_DONE;
}

/* Whether an entry has been taken from the log, and not been carried out to its end. For who drives. */
static int is_under_way(const pyhvd_lane *lane) { return lane->running || lane->at < lane->pendings; }

static int finished(const pyhvd_unit *unit, uint64_t turn) { return unit && pyhvd_unit_finished(unit, turn); }

static int is_closed(const pyhvd_lane *lane) {
    return atomic_load_explicit(&lane->closed, memory_order_acquire) != 0;
}

/* Leave a core that another rank works on; see pyhvd_part. */
static void part(pyhvd_lane *lane) {
    uint32_t taken[PYHVD_MAX_LOCAL];
    int n = 0;
    for (int q = 0; q < lane->board.size; q++)
        if (q != lane->board.rank)
            taken[n++] = atomic_load_explicit(&lane->board.seats[q].core, memory_order_relaxed);
    if (pyhvd_part(taken, n, &lane->parted))
        atomic_store_explicit(&seat_of(lane)->core, pyhvd_here(), memory_order_relaxed);
}

/* The driver waits for the log to go on. */
static int await_entry(pyhvd_lane *lane, const pyhvd_unit *unit, uint64_t turn, int64_t until) {
    pyhvd_seat *seat = seat_of(lane);
    int yields = lane->patience;
    int64_t yielded = 0;
    do {
        for (int spin = 0; spin < PYHVD_SPINS; spin++) {
            if (pyhvd_board_behind(&lane->board) || finished(unit, turn)) return PYHVD_DONE;
            pyhvd_pause();
        }
        part(lane);
        yielded = pyhvd_yield(&yields);
    } while (yielded >= 0 && yielded < PYHVD_LONG_YIELD);
    uint32_t seen = atomic_load_explicit(&seat->bell, memory_order_acquire);
    atomic_store_explicit(&seat->asleep, 1, memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst);
    int64_t before = pyhvd_now(), left = until - before;
    if (!pyhvd_board_behind(&lane->board) && !finished(unit, turn) && !is_closed(lane) && left > 0)
        pyhvd_futex_wait(&seat->bell, seen, left < PYHVD_NAP ? left : PYHVD_NAP);
    lane->patience = pyhvd_patience(lane->patience, pyhvd_now() - before);
    atomic_store_explicit(&seat->asleep, 0, memory_order_relaxed);
    return pyhvd_now() < until ? PYHVD_DONE : PYHVD_LATE;
}

/* Carry out what the log says, as the one who drives. Without a unit: as far as the log goes. */
static int run(pyhvd_lane *lane, const pyhvd_unit *unit, uint64_t turn, int64_t until) {
    for (;;) {
        if (is_closed(lane)) return PYHVD_CLOSED;
        if (is_under_way(lane)) {
            if (!lane->running) load_batch(lane);
            int status = run_batch(lane);
            if (status == PYHVD_DONE) continue;
            if (status == PYHVD_LATE && unit && pyhvd_now() < until) continue;
            return status;
        }
        if (finished(unit, turn)) return PYHVD_DONE;
        const pyhvd_entry *entry = pyhvd_board_next(&lane->board);
        if (entry && entry->kind == PYHVD_LIST) return PYHVD_AT_LIST;
        if (entry) {
            unfold(lane, entry);
            pyhvd_board_advance(&lane->board);
        } else if (!unit) {
            return PYHVD_IDLING;
        } else if (await_entry(lane, unit, turn, until) == PYHVD_LATE) {
            return PYHVD_LATE;
        }
    }
}

static int try_drive(pyhvd_lane *lane) {
    pyhvd_seat *seat = seat_of(lane);
    uint32_t free = 0, here = pyhvd_here();
    if (atomic_load_explicit(&seat->driven, memory_order_relaxed) ||
        !atomic_compare_exchange_strong_explicit(&seat->driven, &free, 1, memory_order_acquire,
                                                 memory_order_relaxed))
        return 0;
    if (atomic_load_explicit(&seat->core, memory_order_relaxed) != here) /* the peers read this line */
        atomic_store_explicit(&seat->core, here, memory_order_relaxed);
    return 1;
}

/* Give up the seat, having come so far; returns whether something is left to be done. Waiters are told, as one of them
 * is to drive: but not where a response list is next. They would find that out one after the other, tell each other
 * and the background thread, and keep every core from whoever is to send that list. */
static int leave_seat(pyhvd_lane *lane, int status) {
    /* Seen while it is still ours; what comes in later finds `driven` clear, and rings. */
    int left_over = is_under_way(lane);
    atomic_store_explicit(&lane->left_over, (uint32_t)left_over, memory_order_relaxed);
    atomic_store_explicit(&seat_of(lane)->driven, 0, memory_order_release);
    if (status != PYHVD_AT_LIST) pyhvd_tell_waiters(lane); /* with a fence: `driven` before the look at the log */
    else atomic_thread_fence(memory_order_seq_cst);
    return left_over || pyhvd_board_behind(&lane->board);
}

static void stop_driving(pyhvd_lane *lane, int status) {
    if (leave_seat(lane, status)) pyhvd_lane_ring(lane);
}

/* Wait for a sign of those who drive. */
static void await_progress(pyhvd_lane *lane, uint32_t seen, const pyhvd_unit *unit, uint64_t turn,
                           int64_t until) {
    int64_t left = until - pyhvd_now();
    atomic_fetch_add_explicit(&lane->waiters, 1, memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst);
    if (!finished(unit, turn) && !is_closed(lane) && left > 0)
        pyhvd_futex_wait(&lane->progress, seen, left < PYHVD_NAP ? left : PYHVD_NAP);
    atomic_fetch_sub_explicit(&lane->waiters, 1, memory_order_relaxed);
}

int pyhvd_lane_wait(pyhvd_lane *lane, pyhvd_unit *unit, uint64_t turn, int64_t now, int64_t ns) {
    int64_t until = now + ns;
    for (int round = 0;; round++) {
        uint32_t seen = atomic_load_explicit(&lane->progress, memory_order_acquire);
        if (finished(unit, turn)) return PYHVD_DONE;
        if (is_closed(lane)) return PYHVD_CLOSED;
        if (round && (now = pyhvd_now()) >= until) return PYHVD_LATE;
        int drives = try_drive(lane);
        /* Posted only now: who completes the batch sees that somebody drives here, and wakes nobody else. */
        int posted = pyhvd_lane_flush(lane, 0, now);
        if (!posted) {
            if (drives) stop_driving(lane, PYHVD_IDLING);
            pyhvd_nap(GATHER);
            continue;
        }
        if (drives) {
            int status = run(lane, unit, turn, until);
            /* Seen while the seat is still ours: nobody else has got past the list, which is news as soon as it is. */
            seen = atomic_load_explicit(&lane->progress, memory_order_acquire);
            stop_driving(lane, status);
            if (status == PYHVD_DONE) return PYHVD_DONE;
            if (status == PYHVD_LATE) continue;
            if (status == PYHVD_AT_LIST) pyhvd_board_call(&lane->board, lane->board.rank, PYHVD_CALL_LIST);
        }
        await_progress(lane, seen, unit, turn, until);
    }
}

/* ---- the background thread ---- */

/* Post what has gathered once nothing more came in for a while, or the cycle time is over; return how long to wait
 * for that, or 0. */
static int64_t gather(pyhvd_lane *lane) {
    uint32_t holds = atomic_load_explicit(&lane->holds, memory_order_acquire);
    int64_t now = pyhvd_now(), since = lane->looked;
    int settled = holds == lane->known;
    if (!settled) lane->idle = 0;
    lane->known = holds;
    if (!atomic_load_explicit(&lane->holding, memory_order_acquire)) {
        lane->looked = now;
        if (!settled) lane->alone = 0;
        return 0;
    }
    if (!settled && now - since < lane->cycle) return GATHER;
    lane->looked = now;
    lane->alone = 1;
    lane->quiet = 0;
    return pyhvd_lane_flush(lane, 0, now) ? 0 : GATHER;
}

/* How long to sleep when there is nothing to do, and whether the thread will look by itself what was submitted, so
 * that nobody need ring. Where nobody waits for tensors, it looks often for a while. Where somebody does, it had
 * better keep out of the way, and is not to be rung time and again. */
static int64_t choose_nap(pyhvd_lane *lane, int64_t nap, int64_t left, int *watching) {
    int64_t lazy = lane->cycle < WATCH ? WATCH : lane->cycle;
    *watching = 1;
    if (nap) return nap < left ? nap : left;
    if (lane->quiet++ < WATCHED) return WATCH < left ? WATCH : left;
    if (!lane->alone && lane->idle++ < LAZY) return lazy < left ? lazy : left;
    *watching = 0;
    return left;
}

/* Sleep until called, or for so long; what happens before the sleep is seen by the second look. With
 * `watching` the thread will soon look by itself whether anything was submitted, and is not rung for that. */
static void rest(pyhvd_lane *lane, int64_t ns, int watching) {
    pyhvd_seat *seat = seat_of(lane);
    uint32_t seen = atomic_load_explicit(&seat->alarm, memory_order_acquire);
    atomic_store_explicit(&lane->watching, (uint32_t)watching, memory_order_relaxed);
    atomic_store_explicit(&seat->dozing, 1, memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst);
    int driven = atomic_load_explicit(&seat->driven, memory_order_relaxed) != 0;
    int busy = atomic_load_explicit(&seat->calls, memory_order_relaxed) ||
               (!watching && atomic_load_explicit(&lane->holding, memory_order_relaxed)) ||
               (!driven && atomic_load_explicit(&lane->left_over, memory_order_relaxed)) ||
               (!driven && pyhvd_board_behind(&lane->board) && !lane->told);
    if (!busy) pyhvd_futex_wait(&seat->alarm, seen, ns);
    atomic_store_explicit(&seat->dozing, 0, memory_order_relaxed);
}

/* Drive where nobody does; returns whether the caller is wanted for a list that it does not know of. */
static int drive_alone(pyhvd_lane *lane) {
    /* Whoever drives just now rings if anything is left over. */
    int left_over = atomic_load_explicit(&lane->left_over, memory_order_relaxed) != 0;
    if ((!left_over && !pyhvd_board_behind(&lane->board)) || !try_drive(lane)) return 0;
    int status = run(lane, NULL, 0, 0);
    int news = 0;
    if (status == PYHVD_AT_LIST) {
        uint64_t number = pyhvd_board_next(&lane->board)->number;
        news = number != lane->told;
        lane->told = number;
    } else {
        lane->told = 0;
    }
    leave_seat(lane, status);
    return news;
}

uint32_t pyhvd_lane_doze(pyhvd_lane *lane, int64_t ns) {
    pyhvd_seat *seat = seat_of(lane);
    int64_t until = pyhvd_after(ns);
    if (!lane->short_turns) pyhvd_take_short_turns();
    lane->short_turns = 1;
    for (;;) {
        uint32_t calls = atomic_exchange_explicit(&seat->calls, 0, memory_order_acquire);
        if (calls) return calls;
        if (!is_closed(lane) && drive_alone(lane)) return PYHVD_CALL_LIST;
        int64_t nap = gather(lane), left = until - pyhvd_now();
        if (left <= 0) return 0;
        int watching;
        nap = choose_nap(lane, nap, left, &watching);
        rest(lane, nap, watching);
    }
}

int pyhvd_lane_announce(pyhvd_lane *lane, uint64_t number, const pyhvd_ranks *audience) {
    int written = pyhvd_board_list(&lane->board, number, audience);
    if (written) pyhvd_wake_driver(lane); /* the board wakes the other ranks; this one's driver is to give way */
    return written;
}

int pyhvd_lane_enter(pyhvd_lane *lane, uint64_t number) {
    lane->told = 0;
    if (is_closed(lane) || !try_drive(lane)) return 0;
    int status = run(lane, NULL, 0, 0);
    if (status == PYHVD_AT_LIST && pyhvd_board_next(&lane->board)->number == number) return 1;
    stop_driving(lane, status);
    return 0;
}

void pyhvd_lane_leave(pyhvd_lane *lane) {
    pyhvd_board_advance(&lane->board);
    stop_driving(lane, PYHVD_IDLING);
}

void pyhvd_lane_seize(pyhvd_lane *lane) {
    while (!try_drive(lane)) pyhvd_nap(GATHER);
}

void pyhvd_lane_shut(pyhvd_lane *lane) {
    atomic_store_explicit(&lane->closed, 1, memory_order_release);
    pyhvd_tell_waiters(lane);
    pyhvd_wake_driver(lane);
}
