/* Which core a thread runs on, and how it leaves a core that it shares with a peer.
 *
 * The kernel places a woken thread beside the thread that wakes it. Two ranks that wake each other
 * in turn therefore end up on one core. They stay there, because each runs while the other sleeps,
 * and run at half speed. If there are cores for all ranks, a rank that shares a peer's core moves
 * to a free one.
 */
#ifndef PYHVD_CPU_AFFINITY_H
#define PYHVD_CPU_AFFINITY_H

#include "common/futex.h"

#include <unistd.h>

#ifdef __linux__
#include <sys/resource.h>
#endif

#define PYHVD_LEAVE_NS 200000 /* between two attempts to leave a core */
#define PYHVD_SLICE_NS 100000 /* the shortest time slice that Linux knows */

/* The core of this thread + 1; 0: not known. */
static inline uint32_t pyhvd_current_core(void) {
#ifdef __linux__
    return (uint32_t)sched_getcpu() + 1;
#else
    return 0;
#endif
}

/* Publish the core of this thread. The peers read the line, so it is written only if it changes. */
static inline void pyhvd_publish_core(_Atomic uint32_t *core) {
    uint32_t here = pyhvd_current_core();
    if (atomic_load_explicit(core, memory_order_relaxed) != here)
        atomic_store_explicit(core, here, memory_order_relaxed);
}

/* The first value of `last` for pyhvd_leave_shared_core: never leave if there are more ranks than
 * cores. */
static inline int64_t pyhvd_first_leave_ns(int ranks) {
    return ranks <= sysconf(_SC_NPROCESSORS_ONLN) ? 0 : INT64_MAX;
}

/* Move this thread to a free core if its core is among `taken`, the peers' cores. The thread's
 * affinity stays the same. Publish the new core in `core`, so that the peer does not move too. */
static inline void pyhvd_leave_shared_core(const uint32_t *taken, int n, int64_t *last,
                                           _Atomic uint32_t *core) {
#ifdef __linux__
    cpu_set_t all, one;
    if (*last == INT64_MAX) return;
    uint32_t here = pyhvd_current_core();
    int shared = 0;
    for (int k = 0; k < n; k++) shared |= taken[k] == here;
    if (!shared || pyhvd_now() - *last < PYHVD_LEAVE_NS || sched_getaffinity(0, sizeof all, &all))
        return;
    *last = pyhvd_now();
    CPU_ZERO(&one);
    for (uint32_t cpu = 0; cpu < CPU_SETSIZE && !CPU_COUNT(&one); cpu++) {
        int is_free = CPU_ISSET(cpu, &all) && cpu + 1 != here;
        for (int k = 0; k < n && is_free; k++) is_free = taken[k] != cpu + 1;
        if (is_free) CPU_SET(cpu, &one);
    }
    if (!CPU_COUNT(&one) || sched_setaffinity(0, sizeof one, &one)) return;
    sched_setaffinity(0, sizeof all, &all);
    pyhvd_publish_core(core);
#else
    (void)taken, (void)n, (void)last, (void)core;
#endif
}

/* Ask for short time slices: this thread works little and often, and must not wait for the end of
 * the slice (about 3 ms) of a thread that computes. Linux grants this to any thread from 6.12 on;
 * elsewhere nothing happens. */
static inline void pyhvd_take_short_turns(void) {
#if defined(__linux__) && defined(SYS_sched_setattr)
    if (sched_getscheduler(0) != SCHED_OTHER) return;
    struct {
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime, deadline, period;
    } wanted = {
        .size = sizeof wanted, .nice = getpriority(PRIO_PROCESS, 0), .runtime = PYHVD_SLICE_NS};
    syscall(SYS_sched_setattr, 0, &wanted, 0);
#endif
}

#endif
