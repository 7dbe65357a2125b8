/* Time, spinning, sleeping and waking: how the ranks of a node wait for each other. */
#ifndef PYHVD_FUTEX_H
#define PYHVD_FUTEX_H

#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/param.h> /* MIN, MAX */
#include <time.h>
#include <unistd.h>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#define PYHVD_LINE 128 /* bytes: two cache lines, which the processor prefetches as a pair */
#define PYHVD_SPINS 60 /* about 1 us */
#define PYHVD_YIELDS 10
#define PYHVD_MOST_YIELDS 80
#define PYHVD_SHORT_NAP 200000 /* ns: a sleep that was too short to be worth it */
#define PYHVD_LONG_YIELD 20000 /* ns: a yield that shows that another thread needs the core */
#define PYHVD_NAP 100000000    /* ns: the longest sleep between two looks at the state */

/* How a thread sleeps: on a futex, or in poll(2), with a descriptor (eventfd or pipe) as its bell:
 * on the connections too, or not. */
enum { PYHVD_SLEEPS = 1, PYHVD_POLLS = 2, PYHVD_POLLS_BELL = 3 };

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

/* The time `ns` from now; INT64_MAX if `ns` is negative. */
static inline int64_t pyhvd_after(int64_t ns) { return ns < 0 ? INT64_MAX : pyhvd_now() + ns; }

static inline void pyhvd_nap(int64_t ns) {
    struct timespec nap = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
    nanosleep(&nap, NULL);
}

/* Sleep until woken, at most `ns`; return at once if the word is not `seen`. */
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

/* Ring a bell that is a descriptor. */
static inline void pyhvd_ring_bell(int bell) {
    uint64_t one = 1;
    if (write(bell, &one, sizeof one) < 0) return; /* it is full, and wakes the sleeper as well */
}

/* Empty such a bell. */
static inline void pyhvd_empty_bell(int bell) {
    uint64_t rings;
    if (read(bell, &rings, sizeof rings) < 0) return; /* another ring came to nothing */
}

/* Yield the core; return 0 when it is time to sleep: no yields are left, or another thread needed
 * the core. */
static inline int pyhvd_yield(int *left) {
    if ((*left)-- <= 0) return 0;
    int64_t before = pyhvd_now();
    sched_yield();
    return pyhvd_now() - before < PYHVD_LONG_YIELD;
}

/* Return how often to yield before the next sleep, given the length of the last one. After a short
 * sleep, yield more: waking takes tens of us, for which the waking rank waits and falls asleep in
 * turn. */
static inline int pyhvd_next_spin_budget(int yields, int64_t slept) {
    if (slept > PYHVD_SHORT_NAP || yields < PYHVD_YIELDS) return PYHVD_YIELDS;
    return yields < PYHVD_MOST_YIELDS ? 2 * yields : yields;
}

#endif
