/* Time, pauses and futexes, for the window and the board. */
#ifndef PYHVD_WAITING_H
#define PYHVD_WAITING_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* sched_getcpu, CPU_SET */
#endif

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#endif

#define PYHVD_LINE 128         /* two cache lines: adjacent-line prefetch pairs them */
#define PYHVD_SPINS 60         /* about 1 us */
#define PYHVD_YIELDS 10
#define PYHVD_MOST_YIELDS 80
#define PYHVD_SHORT_NAP 200000 /* ns: it was not worth it to fall asleep */
#define PYHVD_LONG_YIELD 20000 /* ns: somebody else wants this core */
#define PYHVD_PARTING 200000 /* ns between two attempts to leave a core */
#define PYHVD_TURN 100000 /* ns: the shortest turn that Linux knows */
#define PYHVD_NAP 100000000    /* ns: longest sleep between two looks at what else may have happened */

static inline void pyhvd_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline int64_t pyhvd_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* When `ns` from now have passed; negative: never. */
static inline int64_t pyhvd_after(int64_t ns) { return ns < 0 ? INT64_MAX : pyhvd_now() + ns; }

static inline void pyhvd_nap(int64_t ns) {
    struct timespec nap = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
    nanosleep(&nap, NULL);
}

/* Sleep until woken, at most so long, unless the word is no longer as it was seen. */
static inline void pyhvd_futex_wait(_Atomic uint32_t *word, uint32_t seen, int64_t ns) {
#ifdef __linux__
    struct timespec nap = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
    syscall(SYS_futex, (uint32_t *)word, FUTEX_WAIT, seen, &nap, NULL, 0);
#else
    if (atomic_load(word) == seen) pyhvd_nap(ns < 50000 ? ns : 50000);
#endif
}

/* Change the word, and wake one sleeper, or all. */
static inline void pyhvd_futex_wake(_Atomic uint32_t *word, int all) {
    atomic_fetch_add_explicit(word, 1, memory_order_release);
#ifdef __linux__
    syscall(SYS_futex, (uint32_t *)word, FUTEX_WAKE, all ? INT32_MAX : 1, NULL, NULL, 0);
#else
    (void)all;
#endif
}

/* Ask for short turns on the core: this thread works little and often, and is not to wait for the end of the turn of a
 * thread that computes (some 3 ms). Linux from 6.12 on grants it to anybody; elsewhere nothing happens. */
static inline void pyhvd_take_short_turns(void) {
#if defined(__linux__) && defined(SYS_sched_setattr)
    if (sched_getscheduler(0) != SCHED_OTHER) return;
    struct {
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime, deadline, period;
    } wanted = {.size = sizeof wanted, .nice = getpriority(PRIO_PROCESS, 0), .runtime = PYHVD_TURN};
    syscall(SYS_sched_setattr, 0, &wanted, 0);
#endif
}

/* One round of waiting without sleeping; returns the ns that the yield took, or -1 if it is time to sleep. */
static inline int64_t pyhvd_yield(int *left) {
    if ((*left)-- <= 0) return -1;
    int64_t before = pyhvd_now();
    sched_yield();
    return pyhvd_now() - before;
}

/* How many yields to wait next time, given how long a sleep has just lasted. Waking takes tens of us, for which the
 * waker will wait in turn, and fall asleep as well: without more patience both would go on like that. */
static inline int pyhvd_patience(int yields, int64_t slept) {
    if (slept > PYHVD_SHORT_NAP || yields < PYHVD_YIELDS) return PYHVD_YIELDS;
    return yields < PYHVD_MOST_YIELDS ? 2 * yields : yields;
}

/* Two ranks that wake each other in turn end up on one core, because the kernel places a sleeper beside who wakes it,
 * and stay there: each runs while the other sleeps, so that nobody seems to want a second core. That halves their
 * speed. Where there are cores for all, a rank that finds itself on a peer's core moves to a free one. */
static inline uint32_t pyhvd_here(void) {
#ifdef __linux__
    return (uint32_t)sched_getcpu() + 1; /* 0: not known */
#else
    return 0;
#endif
}

/* The first value of `last` for pyhvd_part: with more ranks than cores there is nowhere to go. */
static inline int64_t pyhvd_may_part(int ranks) { return ranks <= sysconf(_SC_NPROCESSORS_ONLN) ? 0 : INT64_MAX; }

/* Move this thread off its core if a peer was last seen there; `taken` are the peers' cores, as pyhvd_here() gave
 * them. Its affinity stays as it was. Returns whether it has moved: it then says so, lest the peer moves as well. */
static inline int pyhvd_part(const uint32_t *taken, int n, int64_t *last) {
#ifdef __linux__
    cpu_set_t all, one;
    if (*last == INT64_MAX) return 0;
    uint32_t here = pyhvd_here();
    int shared = 0;
    for (int k = 0; k < n; k++) shared |= taken[k] == here;
    if (!shared || pyhvd_now() - *last < PYHVD_PARTING || sched_getaffinity(0, sizeof all, &all)) return 0;
    *last = pyhvd_now();
    CPU_ZERO(&one);
    for (uint32_t cpu = 0; cpu < CPU_SETSIZE && !CPU_COUNT(&one); cpu++) {
        int free = CPU_ISSET(cpu, &all) && cpu + 1 != here;
        for (int k = 0; k < n && free; k++) free = taken[k] != cpu + 1;
        if (free) CPU_SET(cpu, &one);
    }
    if (!CPU_COUNT(&one) || sched_setaffinity(0, sizeof one, &one)) return 0;
    sched_setaffinity(0, sizeof all, &all);
    return 1;
#else
    (void)taken, (void)n, (void)last;
    return 0;
#endif
}

#endif
