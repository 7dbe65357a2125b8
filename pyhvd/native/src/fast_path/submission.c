/* What is submitted: held back, posted, refused, taken, ended. */
#include "fast_path/internal.h"

#include <stdlib.h>
#include <string.h>

#define LOCK_WAIT 2000000 /* ns; the lock is held for microseconds, unless its holder has been stopped */

void pyhvd_tell_waiters(pyhvd_lane *lane) {
    atomic_fetch_add_explicit(&lane->progress, 1, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&lane->waiters, memory_order_relaxed)) pyhvd_futex_wake(&lane->progress, 1);
}

void pyhvd_wake_driver(pyhvd_lane *lane) {
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&seat_of(lane)->asleep, memory_order_relaxed))
        pyhvd_futex_wake(&seat_of(lane)->bell, 0);
}

static int grow(pyhvd_lane *lane) {
    uint32_t wanted = lane->capacity ? 2 * lane->capacity : 64;
    pyhvd_unit **held = realloc(lane->held, wanted * sizeof *held);
    if (held) lane->held = held;
    pyhvd_unit **refused = realloc(lane->refused, wanted * sizeof *refused);
    if (refused) lane->refused = refused;
    if (!held || !refused) return 0;
    lane->capacity = wanted;
    return 1;
}

int pyhvd_lane_hold(pyhvd_lane *lane, pyhvd_unit *unit) {
    uint32_t n = atomic_load_explicit(&lane->holding, memory_order_relaxed);
    /* Whatever is held may be refused: there is room for both. */
    if (n + lane->refusals >= lane->capacity && !grow(lane)) return 0;
    unit->started++;
    unit->state = PYHVD_HELD;
    atomic_store_explicit(&unit->left, unit->post.n, memory_order_relaxed);
    lane->held[n] = unit;
    atomic_fetch_add_explicit(&lane->holds, 1, memory_order_relaxed);
    atomic_store_explicit(&lane->holding, n + 1, memory_order_release);
    pyhvd_trace_add(lane->trace, PYHVD_SUBMITTED, pyhvd_trace_now(lane->trace), unit->set, unit->post.slots[0], 0, 0);
    return 1;
}

void pyhvd_lane_ring(pyhvd_lane *lane) {
    pyhvd_seat *seat = seat_of(lane);
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&seat->dozing, memory_order_relaxed) &&
        !atomic_load_explicit(&lane->watching, memory_order_relaxed))
        pyhvd_futex_wake(&seat->alarm, 0);
}

/* Post what is held; 0 if the board's lock is not to be had. */
static int try_flush(pyhvd_lane *lane, int64_t now) {
    pyhvd_board *board = &lane->board;
    pyhvd_ranks audience = {{0}};
    uint32_t from[PYHVD_BOARD_SETS], to[PYHVD_BOARD_SETS] = {0}, refusals = 0;
    memset(from, 0xff, sizeof from);
    pthread_mutex_lock(&lane->mutex);
    uint32_t n = atomic_load_explicit(&lane->holding, memory_order_relaxed);
    /* The mutex is what the watch needs too: it is not kept while a stopped rank keeps the board. */
    if (!n || !pyhvd_board_lock(board, LOCK_WAIT)) {
        pthread_mutex_unlock(&lane->mutex);
        return !n;
    }
    int64_t traced = pyhvd_trace_now(lane->trace);
    for (uint32_t k = 0; k < n; k++) {
        pyhvd_unit *unit = lane->held[k];
        unit->posted = now;
        if (!pyhvd_board_post(board, unit->set, &unit->post, now)) {
            unit->state = PYHVD_REFUSED;
            lane->refused[lane->refusals++] = unit;
            refusals++;
            continue;
        }
        unit->state = PYHVD_POSTED;
        pyhvd_trace_add(lane->trace, PYHVD_MARKED_READY, traced, unit->set, unit->post.slots[0], 0, 0);
        uint32_t first = unit->post.slots[0] / 64, last = unit->post.slots[unit->post.n - 1] / 64;
        if (first < from[unit->set]) from[unit->set] = first;
        if (last + 1 > to[unit->set]) to[unit->set] = last + 1;
    }
    for (uint32_t set = 0; set < PYHVD_BOARD_SETS; set++)
        if (to[set]) pyhvd_board_match(board, set, from[set], to[set], now, &audience);
    pyhvd_board_unlock(board, &audience);
    atomic_store_explicit(&lane->holding, 0, memory_order_release);
    pthread_mutex_unlock(&lane->mutex);
    /* An entry for this rank itself: whoever drives here and sleeps has not been woken by the others. */
    pyhvd_wake_driver(lane);
    if (refusals) pyhvd_board_call(board, board->rank, PYHVD_CALL_REFUSED);
    return 1;
}

int pyhvd_lane_flush(pyhvd_lane *lane, int whole, int64_t now) {
    if (!whole && !atomic_load_explicit(&lane->holding, memory_order_acquire)) return 1;
    while (!try_flush(lane, now)) {
        if (!whole || atomic_load_explicit(&lane->closed, memory_order_acquire)) return 0;
        pyhvd_nap(LOCK_WAIT);
    }
    return 1;
}

int pyhvd_lane_take(pyhvd_lane *lane, pyhvd_unit *unit) {
    int was = unit->state;
    uint32_t n = atomic_load_explicit(&lane->holding, memory_order_relaxed), kept = 0;
    if (was == PYHVD_HELD) {
        for (uint32_t k = 0; k < n; k++)
            if (lane->held[k] != unit) lane->held[kept++] = lane->held[k];
        atomic_store_explicit(&lane->holding, kept, memory_order_release);
    } else if (was == PYHVD_REFUSED) {
        for (uint32_t k = 0; k < lane->refusals; k++)
            if (lane->refused[k] != unit) lane->refused[kept++] = lane->refused[k];
        lane->refusals = kept;
    }
    unit->state = PYHVD_TAKEN;
    return was;
}

int pyhvd_lane_withdraw(pyhvd_lane *lane, pyhvd_unit *unit) {
    if (unit->state != PYHVD_HELD) return 0;
    pyhvd_lane_take(lane, unit);
    atomic_store_explicit(&unit->finished, unit->started, memory_order_release);
    return 1;
}

void pyhvd_end_parts(pyhvd_lane *lane, pyhvd_unit *unit, uint32_t n) {
    if (atomic_fetch_sub_explicit(&unit->left, n, memory_order_acq_rel) != n) return;
    uint64_t turn = atomic_fetch_add_explicit(&unit->finished, 1, memory_order_release) + 1;
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&unit->notify, memory_order_relaxed) >= turn)
        pyhvd_board_call(&lane->board, lane->board.rank, PYHVD_CALL_DONE);
}

void pyhvd_lane_settle(pyhvd_lane *lane, pyhvd_unit *unit) {
    pyhvd_end_parts(lane, unit, 1);
    pyhvd_tell_waiters(lane);
    pyhvd_wake_driver(lane);
}
