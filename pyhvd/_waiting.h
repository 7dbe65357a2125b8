/* Time, pauses and futexes, for the window and the board. */
#ifndef PYHVD_WAITING_H
#define PYHVD_WAITING_H

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define PYHVD_LINE 128         /* two cache lines: adjacent-line prefetch pairs them */
#define PYHVD_SPINS 60         /* about 1 us */
#define PYHVD_YIELDS 10
#define PYHVD_LONG_YIELD 20000 /* ns: somebody else wants this core */
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

/* One round of waiting without sleeping; returns 0 when it is time to sleep. */
static inline int pyhvd_yield(int *yields) {
    if ((*yields)++ >= PYHVD_YIELDS) return 0;
    int64_t before = pyhvd_now();
    sched_yield();
    return pyhvd_now() - before <= PYHVD_LONG_YIELD;
}

#endif
